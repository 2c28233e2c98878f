"""Hybrids of attention and delta nets from files to files: trained, saved, resumed, exported, replayed; and what is
refused of them."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.hf import load_model
from tests.end_to_end.test_resume import SYNCHRONOUS
from tests.end_to_end.tiny import Command, descendants, gone, llamarl_here, make_model, rows, write_toml
from tests.generation.hybrids import MOE
from tests.nightly import nightly

DELTA = DeltaShape(layers=(0,), num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8)
STATE = "model.layers.0.linear_attn.A_log"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    return make_model(folder, family="qwen3_5_text", delta=DELTA, partial_rotary_factor=0.5)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, moe = tmp_path_factory.mktemp("hybrid_moe") / "model", replace(MOE, sparse_layers=(0, 1))
    return make_model(folder, family="qwen3_next", delta=DELTA, moe=moe, partial_rotary_factor=0.5)


@nightly("two whole runs; checkpoint, generation and training have hybrids by day")
@pytest.mark.parametrize("kind", ["hybrid", "mixture"])
def test_one_is_trained_saved_resumed_exported_and_replayed(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """Bit for bit, whether it was interrupted, and when its rollouts are computed again."""
    model: Path = request.getfixturevalue(kind)
    toml, whole, cut = write_toml(tmp_path, model), tmp_path / "whole", tmp_path / "cut"
    done = llamarl_here("train", toml, "--output", whole, "--steps", 4, *SYNCHRONOUS)
    assert done.returncode == 0, done.stderr
    of_steps = [row for row in rows(whole / "tiny/metrics.jsonl") if row["kind"] == "step"]
    assert all(row["kl_to_behavior"] < 1e-6 for row in of_steps), "chunked and recurrent form agree"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "tiny/checkpoints/step-00000004")
    done = llamarl_here("train", toml, "--output", cut, "--steps", 4, "--resume", *SYNCHRONOUS)
    assert done.returncode == 0, done.stderr
    files = [path.relative_to(cut) for path in cut.rglob("*.safetensors")]
    assert len(files) == 2
    assert all((whole / file).read_bytes() == (cut / file).read_bytes() for file in files)
    replayed = llamarl_here("replay", whole / "tiny")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "all equal" in replayed.stdout
    assert llamarl_here("export", whole / "tiny", tmp_path / "made").returncode == 0
    before, after = (load_model(one, torch.float32, "cpu").state_dict() for one in (model, tmp_path / "made"))
    assert not torch.equal(after[STATE], before[STATE])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    assert torch.equal(theirs.state_dict()[STATE], after[STATE])


@nightly("a run of its own; by day generation/test_hybrid.py takes weights in flight")
def test_new_weights_in_flight_and_partial_rollouts(tmp_path: Path, hybrid: Path) -> None:
    """Asynchronous, with rollouts that are parked and go on in another step, under newer weights."""
    toml = write_toml(tmp_path, hybrid)
    options = ("--output", tmp_path, "--steps", 5, "--rollout.segment_tokens", 3, "--cluster.kind", "inline")
    for kv_on_update in ("keep", "recompute"):
        done = llamarl_here("train", toml, *options, "--name", kv_on_update, "--generator.kv_on_update", kv_on_update)
        assert done.returncode == 0, done.stderr
        recorded = rows(tmp_path / kv_on_update / "rollouts.jsonl")
        assert max(len({*map(str, row["policy_versions"])}) for row in recorded) >= 2
        replayed = llamarl_here("replay", tmp_path / kv_on_update)
        assert replayed.returncode == 0 and "all equal" in replayed.stdout, replayed.stdout + replayed.stderr


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--trainer.parallelism.cp", 2, "trainer.parallelism.cp = 2: the delta nets of"),
        ("--trainer.compile", "true", "trainer.compile = true with"),
        ("--trainer.lora", "{rank = 2, targets = ['out_proj']}", "trainer.lora.targets"),
        ("--trainer.parallelism.tp", 4, "trainer.parallelism.tp = 4 cannot share"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    tmp_path: Path, hybrid: Path, option: str, value: object, named: str
) -> None:
    done = llamarl_here("train", write_toml(tmp_path, hybrid), "--output", tmp_path, "--dry-run", option, value)
    assert done.returncode == 2 and named in done.stderr, done.stderr


@nightly("two of its processes are killed")
@pytest.mark.timeout(900)
def test_a_run_with_kills_replays_bit_for_bit(tmp_path: Path, hybrid: Path) -> None:
    toml, folder = write_toml(tmp_path, hybrid), tmp_path / "faulty"
    folder.mkdir()
    command = Command.start(folder, "train", toml, "--output", folder, "--steps", 12, "--checkpoint.every_steps", 4)
    metrics, pids = folder / "tiny/metrics.jsonl", list[int]()
    for name, step in (("generator-0", 3), ("trainer", 6)):
        command.until(lambda step=step: metrics.exists() and f'"step": {step},' in metrics.read_text())
        pids += descendants(command.process.pid)
        os.kill(command.children()[name], signal.SIGKILL)
    code, said = command.wait()
    assert code == 0, said
    assert "trainer continues" in said and gone(pids) == []
    replayed = llamarl_here("replay", folder / "tiny")
    assert replayed.returncode == 0 and "all equal" in replayed.stdout, replayed.stdout + replayed.stderr


@nightly("a run of its own; tests/kernels and generation compare both forms by day")
def test_the_form_of_delta_nets_is_a_cause_of_the_mismatch(tmp_path: Path, hybrid: Path) -> None:
    """In float32 it is a rounding, as are the other causes."""
    options = ("--cluster.kind", "inline", "--steps", 4, "--eval.every_steps", 0, "--rollout.max_staleness", 0)
    done = llamarl_here("train", write_toml(tmp_path, hybrid), "--output", tmp_path, *options, "--rollout.window", 1)
    assert done.returncode == 0, done.stderr
    (row,) = [row for row in rows(tmp_path / "tiny/metrics.jsonl") if "extra.kl_from_chunked_vs_recurrent" in row]
    mismatch = {name: value for name, value in row.items() if name.startswith("extra.mismatch_from_")}
    assert 0 < abs(mismatch["extra.mismatch_from_chunked_vs_recurrent"]) < 1e-5
    assert sum(mismatch.values()) < 1e-4
