"""A trained model is asked as it was trained, whatever names it: run, export, adapters; whoever asks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import llamarl
from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.episodes.cli.serve import _tokenizer
from llamarl.run.models import asked_model
from tests.end_to_end.tiny import llamarl_here, make_model, rows, write_toml
from tests.nightly import NIGHTLY, nightly

CHATTY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS: dict[str, list[str]] = {
    "plain": [],
    "examples": ["--data.examples", "[{question='1+1?', answer='2'}]", "--data.template", "Q: {question}\nA: "],
    "chat": ["--data.system", "Be brief."],
    "text-of-chatty": ["--data.template", "Q: {question}\nA: "],
    "lora": ["--trainer.lora.rank", "2", "--trainer.lora.alpha", "64"],
}
PROMPTS = {
    "plain": "How many?\n",
    "examples": "Q: 1+1?\nA: 2\n\nQ: How many?\nA: ",
    "chat": "<system>Be brief.<user>How many?<assistant>",
    "text-of-chatty": "Q: How many?\nA: ",
    "lora": "How many?\n",
}
Run = tuple[Path, Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Makes a run in bfloat16 and its export, once for each name of `SETTINGS`."""
    made = dict[str, Run]()

    def run(kind: str) -> Run:
        if kind in made:
            return made[kind]
        folder = tmp_path_factory.mktemp(kind)
        model = make_model(folder / "model")
        if "chat" in kind:
            (model / "chat_template.jinja").write_text(CHATTY)
        (model / "LICENSE").write_text("ours")
        toml, half = write_toml(folder, model), ("--trainer.dtype", "bfloat16", "--generator.dtype", "bfloat16")
        done = llamarl_here(
            "train", toml, "--output", folder / "runs", "--steps", "2", "--cluster.kind", "inline", "--screen.kind",
            "none", "--trainer.learning_rate", "0.05", "--reward.parts",
            "[{name = 'regex_format', pattern = '[a-m]', whole = false}]", *half, *SETTINGS[kind],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        done = llamarl_here("export", folder / "runs/tiny")
        assert done.returncode == 0, done.stderr
        assert ("float32" if kind == "lora" else "bfloat16") in done.stdout and "is asked as" in done.stdout
        made[kind] = folder / "runs/tiny", folder / "runs/tiny/export"
        return made[kind]

    return run


def answer(model: Path, tmp_path: Path, *words: str) -> tuple[dict[str, Any], str]:
    (tmp_path / "prompts.txt").write_text("How many?\n")
    done = llamarl_here(
        "generate", model, "--prompts", tmp_path / "prompts.txt", "--eval.temperature", "0", "--output",
        tmp_path / "out.jsonl", "--rollout.max_new_tokens", "6", "--generator.dtype", "bfloat16", *words,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path / "out.jsonl")
    return row, done.stderr


@nightly("runs of their own; answers of an export are asked for in test_generate.py by day")
@pytest.mark.parametrize("kind", list(SETTINGS) if NIGHTLY else ["chat", "lora"])
def test_run_and_export_get_the_same_prompt_and_say_the_same(
    trained: Callable[[str], Run], tmp_path: Path, kind: str
) -> None:
    run, export = trained(kind)
    (ours, shown), (theirs, also) = (answer(model, tmp_path) for model in (run, export))
    assert ours == theirs
    assert repr(PROMPTS[kind]) in shown and repr(PROMPTS[kind]) in also
    messages = [{"role": "user", "content": "How many?"}]
    for path in (run, export):
        with asked_model(path, "MODEL", command="test") as asked:
            assert _tokenizer(asked).apply_chat_template(messages) == PROMPTS[kind]  # as `serve` does
    (of_python,) = llamarl.generate(
        run, ["How many?"], eval={"temperature": 0.0}, rollout={"max_new_tokens": 6}, generator={"dtype": "bfloat16"}
    )
    assert of_python == ours
    if kind != "lora":
        assert (export / "LICENSE").read_text() == "ours" and "# tiny" in (export / "README.md").read_text()
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(export))
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == PROMPTS[kind]


@nightly("runs of their own; answers of an export are asked for in test_generate.py by day")
def test_an_evaluation_of_a_run_is_that_of_its_last_step(trained: Callable[[str], Run]) -> None:
    """Without a word of settings: the run's own problems, reward, prompts and types."""
    run, export = trained("examples")
    done = llamarl_here("eval", run, "--json", "--eval.max_prompts", "12")
    assert done.returncode == 0, done.stderr
    last = [row for row in rows(run / "metrics.jsonl") if row["kind"] == "eval"][-1]
    found = json.loads(done.stdout)
    assert {name: found[name] for name in ("accuracy", "mean_response_tokens", "num_prompts")} == {
        name: last[name] for name in ("accuracy", "mean_response_tokens", "num_prompts")
    }
    of_run = llamarl.evaluate(run)
    assert isinstance(of_run, llamarl.EvalRecord) and of_run.responses[0]["prompt"].startswith("Q: 1+1?\nA: 2\n\nQ: ")
    done = llamarl_here("eval", export, "--against", run)  # the run's problems, for both
    assert done.returncode == 0 and "minus" in done.stdout, done.stderr


@nightly("runs of their own; answers of an export are asked for in test_generate.py by day")
def test_types_of_what_is_written(trained: Callable[[str], Run], tmp_path: Path) -> None:
    run, export = trained("plain")

    def dtype(folder: Path) -> tuple[str, str]:
        with safe_open(folder / "model.safetensors", "pt") as file:
            found = str(file.get_tensor("model.embed_tokens.weight").dtype).removeprefix("torch.")
        return found, json.loads((folder / "config.json").read_text())["torch_dtype"]

    assert dtype(export) == ("bfloat16", "bfloat16")
    done = llamarl_here("export", run, tmp_path / "whole", "--dtype", "float32")
    assert done.returncode == 0 and "--dtype" in done.stdout and dtype(tmp_path / "whole") == ("float32", "float32")
    done = llamarl_here("export", run, "--rollouts", "--dtype", "float32")
    assert done.returncode == 2 and "dtype" in done.stderr
    merged = llamarl.open_run(trained("lora")[0]).export(tmp_path / "merged", merge=True)
    assert dtype(merged) == ("bfloat16", "bfloat16")


@nightly("runs of their own; models/test_peft.py keeps bases and adapters together by day")
def test_adapters_move_with_their_base(trained: Callable[[str], Run], tmp_path: Path) -> None:
    """Alone, and together with the base model."""
    run, export = trained("lora")
    before, _ = answer(export, tmp_path)
    assert before == answer(run, tmp_path)[0]
    moved = Path(shutil.copytree(export, tmp_path / "elsewhere"))
    assert answer(moved, tmp_path)[0] == before
    base, _ = answer(run.parents[1] / "model", tmp_path)
    assert base["logprob"] != before["logprob"]
    done = llamarl_here("eval", moved, "--config", run / "config.toml", "--eval.max_prompts", "3")
    assert done.returncode == 0, done.stderr


@nightly("a run of its own; by day formats are read in tests/data and test_generate.py")
def test_a_format_that_no_chat_has_is_said(trained: Callable[[str], Run], tmp_path: Path) -> None:
    run, _ = trained("plain")
    other = Path(shutil.copytree(run, tmp_path / "other", ignore=shutil.ignore_patterns("export")))
    text = (
        (other / "config.toml").read_text().replace('template = "{question}\\n"', 'template = "{question} {solution}"')
    )
    (other / "config.toml").write_text(text)
    done = llamarl_here("export", other)
    assert done.returncode == 0 and "'solution'" in done.stdout, done.stderr
    assert not Tokenizer(other / "export").has_chat_template


@nightly("runs of their own; answers of an export are asked for in test_generate.py by day")
@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_run_starts_from_an_adapter(trained: Callable[[str], Run], tmp_path: Path, command: str) -> None:
    """`model.adapter`: what the adapter had learnt is where the run begins."""
    run, export = trained("lora")
    toml = write_toml(tmp_path, run.parents[1] / "model")
    rate = ("--trainer.learning_rate", "1e-10", "--steps", "1", "--cluster.kind", "inline", "--screen.kind", "none")
    words = (toml, "--model.adapter", export, "--output", tmp_path / "runs", *rate)
    if command == "train":
        done = llamarl_here("train", *words, "--dry-run")
        assert done.returncode == 0 and not (tmp_path / "runs").exists(), done.stderr
    done = llamarl_here(command, *words)
    assert done.returncode == 0, done.stderr
    half = ("--generator.dtype", "bfloat16")
    assert answer(tmp_path / "runs/tiny", tmp_path, *half)[0] == pytest.approx(answer(export, tmp_path)[0], abs=1e-2)
    done = llamarl_here(command, *words, "--resume")
    assert done.returncode == 0, done.stderr
    assert len([*(tmp_path / "runs/.models").iterdir()]) == 1
    words = (toml, "--model.path", export, "--output", tmp_path / "other", *rate)
    done = llamarl_here(command, *words)
    assert done.returncode == 2 and "model.adapter" in done.stderr


@nightly("runs of their own; answers of an export are asked for in test_generate.py by day")
def test_a_run_starts_from_another_run(trained: Callable[[str], Run], tmp_path: Path) -> None:
    """`model.path` names a run: its newest checkpoint, with its prompt format."""
    run, export = trained("examples")
    toml = write_toml(tmp_path, run)
    rate = ("--trainer.learning_rate", "1e-10", "--steps", "1", "--cluster.kind", "inline", "--screen.kind", "none")
    words = (toml, "--output", tmp_path / "runs", *rate)
    done = llamarl_here("train", *words, "--dry-run")
    assert done.returncode == 0 and not (tmp_path / "runs").exists(), done.stderr
    done = llamarl_here("sft", *words)
    assert done.returncode == 0, done.stderr
    found, shown = answer(tmp_path / "runs/tiny", tmp_path)
    assert repr(PROMPTS["examples"]) in shown and found["text"] == answer(export, tmp_path)[0]["text"]
    assert llamarl_here("sft", *words, "--resume").returncode == 0
