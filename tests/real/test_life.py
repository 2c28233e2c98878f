"""The whole life of a real model: dry run, supervised training, training in many layouts, death, resume, replay, and
asking what was trained."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.tiny import ROOT, Command, llamarl, rows
from tests.nightly import nightly

CONFIG = ROOT / "examples/real/svamp.toml"
SMALL = (
    "--rollout.prompts_per_step", 2, "--rollout.group_size", 2, "--rollout.window", 1, "--rollout.max_new_tokens", 12,
    "--rollout.stop_strings", "[]",
    "--eval.every_steps", 0, "--eval.max_prompts", 6, "--checkpoint.every_steps", 1, "--screen.kind", "lines",
    "--reward.parts", "[{name = 'tests.executors.rewards:EvenLength'}]", "--trainer.warmup_steps", 0,
    "--weight_sync.probe_every_steps", 1,
)  # fmt: skip
pytestmark = [nightly("a real model takes minutes"), pytest.mark.timeout(1800)]


def train(model: Path, output: Path, *options: object) -> list[dict[str, Any]]:
    """Rows of the steps of a run that ended well."""
    done = llamarl("train", CONFIG, "--model.path", model, "--output", output, *SMALL, *options, timeout_s=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return steps_of(output / "svamp")


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run / "metrics.jsonl") if row["kind"] == "step"]


@pytest.fixture(scope="module")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps in bfloat16."""
    output = tmp_path_factory.mktemp("real")
    train(smollm2, output, "--steps", 3, "--trainer.learning_rate", "1e-4")
    return output / "svamp"


@pytest.fixture(scope="module")
def export(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "model"
    done = llamarl("export", run, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_healthy_run_passes_the_check_of_weights(run: Path) -> None:
    """At a learning rate at which the float32 masters leave their bfloat16 rounding."""
    steps = steps_of(run)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["extra.mismatch_mean"] < 0.05 for row in steps)


def test_the_dry_run_says_what_the_run_is_asked(smollm2: Path, tmp_path: Path) -> None:
    done = llamarl("train", CONFIG, "--model.path", smollm2, "--output", tmp_path, "--dry-run")
    assert done.returncode == 0 and "<|im_start|>assistant" in done.stdout and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        ("--generator.dtype", "int8"),
        ("--trainer.dtype", "float32", "--generator.dtype", "float32"),
        ("--trainer.weights", "bfloat16", "--trainer.moments", "8bit"),
        ("--trainer.lora.rank", 8, "--trainer.learning_rate", "1e-4"),
        ("--generator.replicas", 2),
        ("--generator.tensor_parallel", 3),
        ("--trainer.parallelism.tp", 3),
        ("--trainer.parallelism.fsdp", 2),
    ],
    ids=lambda options: "-".join(str(option).removeprefix("--") for option in options),
)
def test_layouts_and_precisions(smollm2: Path, tmp_path: Path, options: tuple[object, ...]) -> None:
    steps = train(smollm2, tmp_path, "--steps", 2, *options)
    assert [row["step"] for row in steps] == [1, 2] and all(np.isfinite(row["loss"]) for row in steps)
    # 8-bit rows are coarse for a model this small, and a merged adapter is rounded with its base.
    limit = 0.4 if "int8" in options else 0.1 if "--trainer.lora.rank" in options else 0.05
    assert all(row["extra.mismatch_mean"] < limit for row in steps)


@pytest.mark.parametrize("role", ["trainer", "generator-0", "reward"])
def test_a_role_is_killed(smollm2: Path, tmp_path: Path, role: str) -> None:
    command = Command.start(
        tmp_path, "train", CONFIG, "--model.path", smollm2, "--output", tmp_path, *SMALL, "--steps", 4
    )
    metrics = tmp_path / "svamp/metrics.jsonl"
    command.until(lambda: metrics.exists() and len(steps_of(tmp_path / "svamp")) >= 1, 600)
    os.kill(command.children()[role], signal.SIGKILL)
    assert command.process.wait(900) == 0, command.err.read_text()[-3000:]
    assert [row["step"] for row in steps_of(tmp_path / "svamp")] == [1, 2, 3, 4]


def test_resume_and_replay(smollm2: Path, tmp_path: Path) -> None:
    train(smollm2, tmp_path, "--steps", 2)
    steps = train(smollm2, tmp_path, "--steps", 3, "--resume")
    assert [row["step"] for row in steps] == [1, 2, 3]
    done = llamarl("replay", tmp_path / "svamp", timeout_s=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_supervised_training(smollm2: Path, tmp_path: Path) -> None:
    rows_of_solutions = [
        {"question": row["question"], "answer": "", "solution": f"#### {row['answer']}"}
        for row in rows(ROOT / "examples/real/svamp_differences.jsonl")[:16]
    ]
    data = tmp_path / "solutions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of_solutions))
    toml = tmp_path / "sft.toml"
    toml.write_text(
        f'name = "sft"\nsteps = 2\nmodel = {{path = "{smollm2}"}}\n[data]\nsolution = "solution"\n'
        f'train = {{name = "file", path = "{data}"}}\n[trainer]\ndtype = "bfloat16"\nlearning_rate = 1e-5\n'
    )
    done = llamarl("sft", toml, "--output", tmp_path / "runs", timeout_s=600)
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_export_answers_as_the_run_did(run: Path, export: Path, tmp_path: Path) -> None:
    """Greedy: the run's folder and its export give the same text, of which transformers finds each token the likeliest,
    within the rounding of the cache."""
    config = json.loads((export / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    found = []
    for number, model in enumerate((run, export)):
        output = tmp_path / f"{number}.jsonl"
        done = llamarl(
            "eval", model, "--config", run / "config.toml", "--eval.max_prompts", 6, "--output", output, timeout_s=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append({row["prompt_id"]: row for row in rows(output)})
    assert found[0] == found[1] and len(found[0]) == 6
    tokenizer, theirs = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    theirs = theirs.to(torch.float32)  # generators on processors compute bfloat16 weights in float32
    questions = {row["id"]: row["question"] for row in rows(ROOT / "examples/real/svamp_test.jsonl")}
    for prompt_id, row in found[0].items():
        chat = [{"role": "user", "content": questions[prompt_id]}]
        assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == row["prompt"]
        asked, answer = (
            tokenizer(row[name], add_special_tokens=False, return_tensors="pt").input_ids
            for name in ("prompt", "response")
        )
        with torch.no_grad():
            logits_T_V = theirs(torch.cat((asked, answer), 1)).logits[0, asked.shape[1] - 1 : -1]
        # Keys and values are cached in bfloat16 here, so tokens that are nearly as likely may change places.
        gaps_T = logits_T_V.max(-1).values - logits_T_V.gather(1, answer[0][:, None])[:, 0]
        assert gaps_T.max() < 0.2


def test_another_family_with_a_large_vocabulary(qwen: Path, tmp_path: Path) -> None:
    """Qwen2.5-Coder-0.5B trains, its weights arrive, and its export answers as the run does."""
    light = ("--trainer.weights", "bfloat16", "--trainer.moments", "8bit")  # so that 16 GB are enough
    steps = train(qwen, tmp_path, "--steps", 2, "--trainer.learning_rate", "1e-4", *light)
    assert len(steps) == 2 and all(step["grad_norm"] > 0 for step in steps)
    assert max(step.get("extra.mismatch_mean", 0.0) for step in steps) < 0.05
    run, export = tmp_path / "svamp", tmp_path / "export"
    assert llamarl("export", run, export).returncode == 0
    found = []
    for number, model in enumerate((run, export)):
        output = tmp_path / f"{number}.jsonl"
        options = ("--config", run / "config.toml", "--eval.max_prompts", 3, "--output", output)
        done = llamarl("eval", model, *options, timeout_s=600)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append([(row["prompt_id"], row["response"]) for row in rows(output)])
    assert found[0] == found[1] and len(found[0]) == 3


@pytest.fixture
def served(run: Path, tmp_path: Path) -> Iterator[OpenAI]:
    command = Command.start(tmp_path, "serve", run, "--port", 0)
    said = command.err

    def address() -> str:
        words = (said.read_text() + command.out.read_text()).split()
        return next((word.strip(".,;") for word in words if word.startswith("http://")), "")

    command.until(lambda: bool(address()), 300)
    yield OpenAI(base_url=address().rstrip("/").removesuffix("/v1") + "/v1", api_key="none")
    command.process.send_signal(signal.SIGINT)
    command.process.wait(60)


def test_the_endpoint_chats(served: OpenAI) -> None:
    model = served.models.list().data[0].id
    chat = served.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is 1 + 1?"}], max_tokens=8, temperature=0
    )
    assert chat.choices[0].message.content
    completion = served.completions.create(model=model, prompt=["1 + 1 =", "2 + 2 ="], max_tokens=4, logprobs=3)
    assert len(completion.choices) == 2 and completion.choices[0].logprobs
