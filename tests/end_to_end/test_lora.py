"""A run that trains adapters: it learns, only they travel and are saved, and what it exports is what it evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from llamarl.config.roles import LoraConfig
from llamarl.models.folder import load_shape
from llamarl.models.lora import adapted_weights
from tests.end_to_end.learning import Trained
from tests.end_to_end.tiny import llamarl, llamarl_here, rows
from tests.nightly import NIGHTLY, nightly

RANK, STEPS = 8, 25 if NIGHTLY else 2
LORA = ("--trainer.lora.rank", RANK, "--trainer.lora.alpha", 16.0, "--trainer.learning_rate", 3e-3)


def adapter_numbers(model: Path) -> int:
    shapes = [shape for _, shape in adapted_weights(load_shape(model), LoraConfig(rank=RANK))]
    return sum(RANK * (outputs + inputs) for outputs, inputs in shapes)


@pytest.fixture(scope="module")
def learnt(trained: Trained) -> Path:
    override = ("--steps", STEPS, "--eval.every_steps", 0, "--checkpoint.every_steps", STEPS, "--name", "adapters")
    done = llamarl_here("train", trained.toml, *override, *LORA)
    assert done.returncode == 0, done.stderr
    return trained.folder.with_name("adapters")


@nightly("full weights do in test_learning.py")
def test_it_learns(learnt: Path) -> None:
    summary = json.loads((learnt / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] > 0.85


@nightly("a run of processes; adapters are trained, sent and served by tests of those folders by day")
def test_only_adapters_travel_and_are_saved(learnt: Path, trained: Trained) -> None:
    numbers = adapter_numbers(trained.toml.parent / "base")
    steps, whole = (
        [row for row in rows(folder / "metrics.jsonl") if row["kind"] == "step"] for folder in (learnt, trained.folder)
    )
    assert {row["extra.sync_bytes"] for row in steps} == {4 * numbers}
    assert max(row.get("extra.mismatch_max", 0) for row in steps) < 1e-4  # merged or not, generator and trainer agree
    assert max(row["extra.num_flops"] for row in steps) < max(row["extra.num_flops"] for row in whole)
    (file,) = learnt.glob("checkpoints/*/*.safetensors")
    with safe_open(file, framework="pt") as tensors:
        names = set(tensors.keys())
    assert names and all(".lora_" in name for name in names)


@nightly("a run of processes; models/test_peft.py reads what is exported by day")
def test_what_is_exported(learnt: Path, trained: Trained, tmp_path: Path) -> None:
    """Adapters and, from the same run, the whole model: each has a folder by default, and a tokenizer."""
    exported = llamarl_here("export", learnt)
    assert exported.returncode == 0, exported.stderr
    settings = json.loads((learnt / "export/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (RANK, 16.0, "LORA")
    assert settings["base_model_name_or_path"] == str(trained.toml.parent / "base")
    with safe_open(learnt / "export/adapter_model.safetensors", framework="pt") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 - the file is no mapping
    assert sum(rows * columns for rows, columns in shapes) == adapter_numbers(trained.toml.parent / "base")
    base = trained.toml.parent / "base/tokenizer.json"
    assert (learnt / "export/tokenizer.json").read_bytes() == base.read_bytes()
    merged = llamarl_here("export", learnt, "--merge")
    assert merged.returncode == 0, merged.stderr
    output = tmp_path / "responses.jsonl"
    done = llamarl_here("eval", learnt / "merged", "--config", trained.toml, "--output", output)
    assert done.returncode == 0, done.stderr
    accuracy = sum(row["right"] for row in rows(output)) / len(rows(output))
    assert accuracy == json.loads((learnt / "summary.json").read_text())["accuracy_after"]
    wrong = llamarl_here("export", trained.folder, tmp_path / "other", "--merge")
    assert wrong.returncode == 2
    assert "--merge is for adapters" in wrong.stderr


@nightly("four more processes")
def test_cut_trainers_and_quantized_cut_generators(tmp_path: Path, toml: Path) -> None:
    """Each rank of the generator receives its part of the adapters, and merges before it quantizes."""
    done = llamarl(
        "train", toml, "--output", tmp_path, "--steps", 3, "--trainer.parallelism.fsdp", 2, *LORA,
        "--weight_sync.probe_every_steps", 1,
        "--generator.tensor_parallel", 2, "--generator.dtype", "int8", "--trainer.dtype", "bfloat16",
        "--reward.parts", "[{name = 'tests.executors.rewards:EvenLength'}]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [row for row in rows(tmp_path / "tiny/metrics.jsonl") if row["kind"] == "step"]
    assert len(steps) == 3 and max(row["grad_norm"] for row in steps) > 0
    assert max(row["extra.mismatch_max"] for row in steps) < 0.1
    (preflight,) = [path.read_text() for path in (tmp_path / "tiny/logs").glob("trainer.0.log")]
    assert "preflight of fsdp 2" in preflight


def test_vllm_is_refused_by_name(toml: Path) -> None:
    done = llamarl_here(
        "train", toml, *LORA, "--generator.backend", "vllm", "--generator.vllm.python", "python", "--dry-run"
    )
    assert done.returncode == 2
    assert "trainer.lora sends adapters, which only the native engine merges" in done.stderr
