"""A client that others wrote: `lm_eval` scores what `llamarl serve` answers, on tasks of two local files."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llamarl.data.tokenizer import Tokenizer
from tests.end_to_end.tiny import ROOT, llamarl_here
from tests.nightly import nightly
from tests.parts.episodes.test_openai import exact
from tests.parts.episodes.test_serve import TEMPLATE, served

PYTHON = Path(os.environ.get("LLAMARL_LM_EVAL_PYTHON", ROOT / ".venv-lmeval/bin/python"))
SUMS = """
task: llamarl_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 12, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""
CHOICES = """
task: llamarl_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" books", " coins now"]
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""
RUN = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

manager = TaskManager(include_path=sys.argv[1], include_defaults=False)
found = simple_evaluate(task_manager=manager, **json.loads(sys.argv[2]))
json.dump(found["samples"], open(sys.argv[3], "w"), default=str)
"""
QUESTIONS = ("Ann has 3 books: a+3. How many", "Liv has 4 books: a+4. How many")
pytestmark = [
    nightly("a server and a client that others wrote"),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no lm_eval at {PYTHON}; `make test-lm-eval` installs it"),
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": one, "answer": "7"}) + "\n" for one in QUESTIONS))
    for name, text in (("sums", SUMS), ("choices", CHOICES)):
        (folder / f"{name}.yaml").write_text(text.format(rows=rows))
    return folder


def scored(kind: str, url: str, model: Path, folder: Path, names: list[str], **options: Any) -> dict[str, list[Any]]:
    """Samples of each task; nothing but the server is asked. The thousands of tasks that come with it are not read."""
    given = {"model": "tiny", "base_url": url, "num_concurrent": 2, "max_retries": 1, "tokenizer": str(model)}
    request = {"model": kind, "model_args": given, "tasks": names, "log_samples": True, "bootstrap_iters": 0} | options
    offline = {"HF_HOME": str(folder.parent / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    found = folder / f"{kind}.json"
    command = [PYTHON, "-c", RUN, folder, json.dumps(request), found]
    own = os.environ | offline | {"OPENAI_API_KEY": "k"}
    done = subprocess.run(command, env=own, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    samples: dict[str, list[Any]] = json.loads(found.read_text())
    return {name: sorted(rows, key=lambda row: row["doc_id"]) for name, rows in samples.items()}


def answers(model: Path, prompts: list[str], folder: Path, template: str) -> list[str]:
    """Greedy answers of `llamarl generate`."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    words = ("--rollout.max_new_tokens", "12", "--eval.temperature", "0", "--data.template", template)
    to = folder / "answers.jsonl"
    done = llamarl_here("generate", model, "--prompts", folder / "prompts.jsonl", "--output", to, *words)
    assert done.returncode == 0, done.stderr
    rows = sorted(map(json.loads, to.read_text().splitlines()), key=lambda row: row["number"])
    return [row["text"].split("\n\n")[0] for row in rows]


def test_local_completions(model: Path, tasks: Path, tmp_path: Path) -> None:
    """Scores of given answers are the model's own, and greedy answers those of `llamarl generate`."""
    with served(model, "--api-key", "k", "--name", "tiny") as url:
        found = scored("local-completions", f"{url}/completions", model, tasks, ["llamarl_sums", "llamarl_choices"])
    tokenizer = Tokenizer(model)
    for row in found["llamarl_choices"]:
        for (text, end), said in zip(row["arguments"], row["filtered_resps"], strict=True):
            head, whole = tokenizer.encode(text), tokenizer.encode(text + end)
            logprobs = exact(model, whole.tolist())
            own = sum(float(logprobs[at - 1, token]) for at, token in enumerate(whole) if at >= len(head))
            assert float(said[0]) == pytest.approx(own, abs=1e-2)
    said = [row["resps"][0][0] for row in found["llamarl_sums"]]
    assert said == answers(model, [*QUESTIONS], tmp_path, "{question}")


def test_local_chat_completions(model: Path, tasks: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE)
    try:
        with served(model, "--api-key", "k", "--name", "tiny") as url:
            place = f"{url}/chat/completions"
            found = scored("local-chat-completions", place, model, tasks, ["llamarl_sums"], apply_chat_template=True)
        said = [row["resps"][0][0] for row in found["llamarl_sums"]]
        assert said == answers(model, [*QUESTIONS], tmp_path, "chat")
    finally:
        (model / "chat_template.jinja").unlink()
