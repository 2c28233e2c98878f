"""A run whose controller is killed (SIGKILL) goes on with all that it had generated, also by itself."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

from tests.end_to_end.tiny import Command, descendants, gone, llamarl, llamarl_here, rows
from tests.nightly import NIGHTLY, nightly

STEPS = 24
"""Many more than are taken while a run is killed."""
EXACT = (
    "--cluster.kind", "inline", "--steps", STEPS, "--rollout.max_staleness", 0, "--rollout.window", 1,
    "--trainer.learning_rate", 3e-3, "--reward.parts", "[{name = 'tests.executors.rewards:EvenLength'}]",
    "--eval.every_steps", 0, "--checkpoint.every_steps", 3, "--recipe", "ppo",
)  # fmt: skip


def num_steps(run: Path) -> int:
    journal = run / "journal.jsonl"
    return sum(b'"groups"' in row for row in journal.read_bytes().splitlines()) if journal.exists() else 0


def recorded(run: Path) -> list[tuple[Any, ...]]:
    names = ("step", "group_id", "index", "token_ids", "behavior_logprobs", "advantage", "policy_versions")
    return [tuple(row[name] for name in names) for row in rows(run / "rollouts.jsonl")]


def test_killed_it_becomes_what_it_would_have_become(tmp_path: Path, toml: Path) -> None:
    """Between two checkpoints, at night also before the first one. Bit for bit, with a critic and a reference, too."""
    whole, run = tmp_path / "whole" / "tiny", tmp_path / "killed" / "tiny"
    done = llamarl_here("train", toml, "--output", whole.parent, *EXACT)
    assert done.returncode == 0, done.stderr
    for count in (2, 5) if NIGHTLY else (5,):
        more = ("--resume",) if run.exists() else ()
        command = Command.start(tmp_path, "train", toml, "--output", run.parent, *EXACT, *more)
        command.until(lambda count=count: num_steps(run) >= count)
        command.end(signal.SIGKILL)
        done_before = num_steps(run)
    assert 5 <= done_before < STEPS
    done = llamarl_here("train", toml, "--output", run.parent, *EXACT, "--resume")
    assert done.returncode == 0, done.stderr
    assert "repeating the steps after the checkpoint" in done.stdout
    assert "--resume" not in done.stderr and "fingerprint" not in done.stderr
    assert recorded(run) == recorded(whole)
    steps = [[row["step"] for row in rows(one / "metrics.jsonl") if row["kind"] == "step"] for one in (run, whole)]
    assert steps[0] == steps[1] == list(range(1, STEPS + 1))
    fingerprints = [
        {row["step"]: row["fingerprint"] for row in rows(one / "journal.jsonl") if "fingerprint" in row}
        for one in (run, whole)
    ]
    assert fingerprints[0].items() <= fingerprints[1].items() and len(fingerprints[0]) >= STEPS - 2
    files = [path.relative_to(run) for path in run.rglob("*.safetensors")]
    assert len(files) >= 4
    assert all((run / file).read_bytes() == (whole / file).read_bytes() for file in files)


@nightly("a controller that is killed goes on above")
def test_by_itself_with_processes_and_segments(tmp_path: Path, toml: Path) -> None:
    """`--restarts`: the controller is killed twice; nobody is left of those that it had started."""
    run, kills, steps = tmp_path / "tiny", (5, 11), 90
    command = Command.start(
        tmp_path, "train", toml, "--output", tmp_path, "--steps", steps, "--restarts", 2, "--checkpoint.every_steps", 4,
        "--rollout.segment_tokens", 4, "--rollout.prompts_per_step", 4,
    )  # fmt: skip
    killed = list[int]()
    for count in kills:
        command.until(lambda count=count: num_steps(run) >= count)
        controller = descendants(command.process.pid)[0]
        assert controller not in killed
        killed += [controller, *descendants(controller)]
        os.kill(controller, signal.SIGKILL)
        assert not gone([controller])
    code, said = command.wait()
    assert code == 0, said
    assert not gone(killed)
    assert re.findall(r"restart (\d) of 2", said) == ["1", "2"][: len(kills)] and "SIGKILL" in said
    assert [row["step"] for row in rows(run / "metrics.jsonl") if row["kind"] == "step"] == list(range(1, steps + 1))
    keys = [(row["group_id"], row["index"]) for row in rows(run / "rollouts.jsonl")]
    assert len(set(keys)) == len(keys) == steps * 4 * 3
    assert {group_id for group_id, _ in keys} == set(range(4 * steps)), "every prompt once, in the order of admission"


RESTARTED = ("--steps", 1000, "--cluster.kind", "inline", "--restarts", 3)


@nightly("a run that is killed and kept is, above")
def test_whoever_starts_it_again_passes_signals_on(tmp_path: Path, toml: Path) -> None:
    """Nothing is started again of what would end the same way."""
    run = tmp_path / "tiny"
    train = ("train", toml, "--output", tmp_path, *RESTARTED)
    command = Command.start(tmp_path, *train)
    command.until(lambda: num_steps(run) >= 2)
    code, said = command.end(signal.SIGTERM)
    assert code == 130 and "restart " not in said and "SIGTERM" in said and "--resume" in said, said
    fails = llamarl(*train, "--overwrite", "--model.path", tmp_path / "nowhere")
    assert fails.returncode == 2 and "restart " not in fails.stderr and run.exists()


@nightly("a child that ends with its parent is in tests/sandbox/test_child.py")
def test_whoever_starts_it_again_and_is_killed_leaves_nobody_behind(tmp_path: Path, toml: Path) -> None:
    run = tmp_path / "tiny"
    command = Command.start(tmp_path, "train", toml, "--output", tmp_path, *RESTARTED)
    command.until(lambda: num_steps(run) >= 2)
    below = descendants(command.process.pid)
    command.end(signal.SIGKILL)
    assert below and not gone(below)
