"""What a run exports, in vLLM itself: greedy answers are those of `llamarl generate`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.end_to_end.tiny import llamarl_here, make_model, write_toml
from tests.nightly import nightly
from tests.parts.vllm.test_vllm import PYTHON, needs_vllm

PROMPTS = ["Ann has 3 books: a+2. How many books now?", "Liv has 26 coins: a+5 b+1. How many coins now?"]
ASK = """
import json, sys
from vllm import LLM, SamplingParams

folder, prompts = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(folder, dtype="float32", max_model_len=128, enforce_eager=True, seed=0)
params = SamplingParams(temperature=0.0, max_tokens=16)
outputs = llm.chat([[{"role": "user", "content": one}] for one in prompts], params, use_tqdm=False)
json.dump([one.outputs[0].token_ids for one in outputs], open(sys.argv[3], "w"))
"""
OF_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


@needs_vllm
@nightly("vLLM takes a minute to start")
def test_vllm_answers_an_export_as_the_run_does(tmp_path: Path) -> None:
    """By the chat template that the export carries, as the base model has none."""
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))
    words = (
        "--cluster.kind",
        "inline",
        "--steps",
        "2",
        "--output",
        tmp_path / "runs",
        "--trainer.learning_rate",
        "1e-3",
    )
    run = tmp_path / "runs/tiny"
    assert llamarl_here("train", toml, *words).returncode == 0
    assert llamarl_here("export", run).returncode == 0
    (prompts := tmp_path / "prompts.txt").write_text("".join(f"{one}\n" for one in PROMPTS))
    options = ("--rollout.max_new_tokens", "16", "--eval.temperature", "0", "--output", tmp_path / "answers.jsonl")
    done = llamarl_here("generate", run, "--prompts", prompts, *options)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: row["number"])
    found = tmp_path / "found.json"
    command = [PYTHON, "-c", ASK, run / "export", json.dumps(PROMPTS), found]
    asked = subprocess.run(command, env=os.environ | OF_CPU, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert asked.returncode == 0, asked.stderr[-4000:]
    from llamarl.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(run / "export")
    texts = [tokenizer.decode(ids) for ids in json.loads(found.read_text())]
    assert texts == [row["text"] for row in rows]
    assert any(texts), "both end at once, which shows nothing"
