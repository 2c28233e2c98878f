"""Without staleness, a run that goes on from any checkpoint is the one that was never interrupted, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.end_to_end.tiny import llamarl_here, rows

SYNCHRONOUS = (
    "--cluster.kind", "inline", "--rollout.max_staleness", 0, "--rollout.window", 1, "--trainer.learning_rate", 3e-3,
    "--reward.parts", "[{name = 'tests.executors.rewards:EvenLength'}]", "--checkpoint.every_steps", 2,
    "--checkpoint.keep", 9, "--eval.every_steps", 0,
)  # fmt: skip
KINDS = {"all_weights": (), "adapters": ("--trainer.lora.rank", 4), "critic_and_reference": ("--recipe", "ppo")}


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_periodic_checkpoint(tmp_path: Path, toml: Path, kind: str) -> None:
    """Groups that were in flight when it was written keep their numbers, and with them their noise."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = llamarl_here("train", toml, "--output", whole, "--steps", 6, *SYNCHRONOUS, *KINDS[kind])
    assert done.returncode == 0, done.stderr
    shutil.copytree(whole, cut)
    for folder in cut.rglob("step-*"):
        if folder.name > "step-00000002":
            shutil.rmtree(folder)
    done = llamarl_here("train", toml, "--output", cut, "--steps", 6, "--resume", *SYNCHRONOUS, *KINDS[kind])
    assert done.returncode == 0, done.stderr
    recorded = [
        [(row["step"], row["group_id"], row["token_ids"], row["behavior_logprobs"], row["advantage"]) for row in found]
        for found in (rows(folder / "tiny/rollouts.jsonl") for folder in (whole, cut))
    ]
    assert len({tuple(tokens) for _, _, tokens, _, _ in recorded[0]}) > 10
    assert len({advantage for *_, advantage in recorded[0]}) > 2, "nothing was learnt, so nothing was compared"
    assert recorded[0] == recorded[1]
    files = [path.relative_to(cut) for path in cut.rglob("*.safetensors")]
    assert len(files) >= 3
    assert all((whole / file).read_bytes() == (cut / file).read_bytes() for file in files)


def test_checkpoints_that_would_mean_something_else_are_refused(tmp_path: Path, toml: Path, model: Path) -> None:
    """Before anything of the run is touched."""
    run = ("train", toml, "--output", tmp_path, *SYNCHRONOUS)
    done = llamarl_here(*run, "--steps", 2, *KINDS["adapters"])
    assert done.returncode == 0, done.stderr
    settings = (tmp_path / "tiny/config.toml").read_text()
    other = shutil.copytree(model, tmp_path / "other")
    for more, name in (
        (("--trainer.lora.rank", 4, "--trainer.lora.alpha", 64.0), "trainer.lora"),
        ((), "trainer.lora"),
        ((*KINDS["adapters"], "--model.path", other), "model.path"),
    ):
        done = llamarl_here(*run, "--steps", 4, "--resume", *more)
        assert done.returncode == 2
        assert f"--resume: {name} was " in done.stderr and done.stderr.count("\n") == 1
        assert (tmp_path / "tiny/config.toml").read_text() == settings
