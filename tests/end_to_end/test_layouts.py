"""A run whose trainer or critic is several processes, from its first step to a resume in another layout, is that of one
process.

Not covered: several machines, GPUs.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from llamarl.checkpoint.store import CheckpointStore
from tests.end_to_end.tiny import Command, descendants, gone, llamarl, llamarl_here, rows
from tests.nightly import nightly

SYNCHRONOUS = (
    "--rollout.max_staleness", 0, "--rollout.window", 1, "--trainer.learning_rate", 1e-3,
    "--reward.parts", "[{name = 'tests.executors.rewards:EvenLength'}]",
)  # fmt: skip


ALONE = ("--cluster.kind", "inline")


def learn_alike(folder: Path, toml: Path, *layouts: tuple[object, ...]) -> tuple[list[dict[str, Any]], ...]:
    """Three steps in one layout, and in each other, have the rollouts, losses and norms of one process, and all
    weights arrive; the steps of both runs."""
    for number, layout in enumerate(layouts):
        steps = ("--steps", 3 * (number + 1), *(["--resume"] if number else []), "--weight_sync.probe_every_steps", 1)
        train = llamarl_here if layout == ALONE else llamarl
        done = train("train", toml, "--output", folder / "many", *SYNCHRONOUS, *steps, *layout)
        assert done.returncode == 0, done.stderr
    done = llamarl_here(
        "train", toml, "--output", folder / "one", *SYNCHRONOUS, "--cluster.kind", "inline",
        "--steps", 3 * len(layouts),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    many, one = ([row for row in rows(folder / name / "tiny/metrics.jsonl") if row["kind"] == "step"]
                 for name in ("many", "one"))  # fmt: skip
    assert [row["step"] for row in many] == [row["step"] for row in one] == [*range(1, 3 * len(layouts) + 1)]
    assert max(row["grad_norm"] for row in one) > 0.01, "nothing was learnt, so nothing was compared"
    for row, expected in zip(many, one, strict=True):
        for name in ("loss", "grad_norm", "reward_mean", "num_loss_tokens", "importance_ratio_mean"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
        assert row["extra.mismatch_max"] < 1e-4
    texts = [[row["token_ids"] for row in rows(folder / name / "tiny/rollouts.jsonl")] for name in ("many", "one")]
    assert texts[0] == texts[1]
    return many, one


@nightly("training/test_layouts.py moves states between layouts")
def test_a_run_changes_its_layout(tmp_path: Path, toml: Path) -> None:
    """FSDP, and after three steps one process."""
    learn_alike(tmp_path, toml, ("--trainer.parallelism.fsdp", 2), ALONE)
    preflights = [path.read_text() for path in sorted((tmp_path / "many/tiny/logs").glob("trainer.*.log"))]
    assert len(preflights) == 2
    assert all("preflight of fsdp 2, tp 1, pp 1, cp 1: " in text for text in preflights)


@nightly("two runs of two ranks; tests/training/test_layouts.py moves states between these layouts")
def test_a_run_changes_between_layouts_of_several_ranks(tmp_path: Path, toml: Path) -> None:
    """FSDP, and after three steps tensor parallel."""
    many, one = learn_alike(tmp_path, toml, ("--trainer.parallelism.fsdp", 2), ("--trainer.parallelism.tp", 2))
    for row, expected in zip(many, one, strict=True):
        assert row["extra.sync_bytes"] == expected["extra.sync_bytes"]
    preflights = [path.read_text() for path in sorted((tmp_path / "many/tiny/logs").glob("trainer.*.log"))]
    assert len(preflights) == 2
    assert all("preflight of fsdp 1, tp 2, pp 1, cp 1: " in text for text in preflights)


@nightly("training/test_layouts.py has it of ranks, test_processes.py of one rank and a run")
def test_a_killed_rank_ends_the_run(tmp_path: Path, toml: Path) -> None:
    """At once, with its name, and nobody is left; the last checkpoint is there to go on from."""
    command = Command.start(
        tmp_path, "train", toml, "--output", tmp_path, *SYNCHRONOUS, "--steps", 100_000, "--checkpoint.every_steps", 2,
        "--cluster.on_failure", "stop",
        "--trainer.parallelism.fsdp", 2,
    )  # fmt: skip
    checkpoints = tmp_path / "tiny/checkpoints"
    command.until(lambda: any(checkpoints.glob("step-*")))
    pids = descendants(command.process.pid)
    os.kill(command.children()["trainer.1"], signal.SIGKILL)
    start_s = time.monotonic()
    code, said = command.wait()
    assert code == 1
    assert "trainer (rank 1)" in said
    assert time.monotonic() - start_s < 120, "a call that waits for it takes 600 s"
    assert gone(pids) == []
    assert CheckpointStore(checkpoints, keep=2).load_newest()[0] is not None


@nightly("the trainer does it above, and a critic of two ranks is that of one in tests/training")
def test_a_critic_of_two_processes(tmp_path: Path, toml: Path) -> None:
    """It learns what one does. A killed rank ends the run at once; one process goes on from what two have saved."""
    options = (*SYNCHRONOUS, "--trainer.advantage", "gae", "--critic.learning_rate_scale", 1)
    command = Command.start(
        tmp_path, "train", toml, "--output", tmp_path / "two", *options, "--steps", 100_000,
        "--checkpoint.every_steps", 2, "--critic.parallelism.fsdp", 2, "--cluster.on_failure", "stop",
    )  # fmt: skip
    two, one = (tmp_path / name / "tiny" for name in ("two", "one"))
    command.until((two / "checkpoints/step-00000004").exists)
    pids, killed = descendants(command.process.pid), command.children()["critic.1"]
    os.kill(killed, signal.SIGKILL)
    code, said = command.wait()
    assert code == 1
    found = re.search(rf"MeshFailed: critic \(rank 1\): pid {killed} .*; --resume continues from step (\d+)\n", said)
    assert found, said
    assert gone(pids) == []
    assert "preflight of fsdp 2, tp 1, pp 1, cp 1: " in (two / "logs/critic.1.log").read_text()

    inline = ("--cluster.kind", "inline", "--steps")
    for output, more in ((two.parent, (int(found[1]) + 1, "--resume")), (one.parent, (4,))):
        done = llamarl_here("train", toml, "--output", output, *options, *inline, *more)
        assert done.returncode == 0, done.stderr
    for row, expected in zip(steps(two)[:4], steps(one), strict=True):
        for name in ("loss", "grad_norm", "extra.value_loss", "extra.critic_grad_norm", "extra.explained_variance"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    sampled = ([row["token_ids"] for row in rows(run / "rollouts.jsonl") if row["step"] <= 4] for run in (two, one))
    assert next(sampled) == next(sampled)
    assert len(steps(two)) == int(found[1]) + 1


def steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder / "metrics.jsonl") if row["kind"] == "step"]


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ({"tp": 4}, "trainer.parallelism.tp = 4 cannot share the 2 key/value heads of {model} evenly; use one of 1, 2"),
        ({"pp": 3}, "trainer.parallelism.pp = 3 is more than the 2 layers of {model}; use at most 2"),
    ],
)
def test_an_impossible_layout_is_refused_before_the_start(
    tmp_path: Path, toml: Path, model: Path, layout: dict[str, int], sentence: str
) -> None:
    options = [text for axis, size in layout.items() for text in (f"--trainer.parallelism.{axis}", size)]
    done = llamarl_here("train", toml, "--output", tmp_path, *options)
    assert done.returncode == 2
    assert sentence.format(model=model) in done.stderr
    assert not (tmp_path / "tiny").exists()


def test_one_process_cannot_be_several_ranks(tmp_path: Path, toml: Path) -> None:
    done = llamarl_here(
        "train", toml, "--output", tmp_path, "--cluster.kind", "inline", "--trainer.parallelism.fsdp", 2
    )
    assert done.returncode == 2
    assert "trainer.parallelism asks for 2 processes" in done.stderr
    assert "use cluster.kind = 'monarch'" in done.stderr
