"""Real runs whose executors are killed or stopped, and started again: what is learnt is what no fault would change."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from llamarl.checkpoint.store import CheckpointStore
from tests.end_to_end import tiny
from tests.end_to_end.tiny import Command, descendants, gone, llamarl_here, rows
from tests.nightly import NIGHTLY, nightly

pytestmark = pytest.mark.timeout(900)
STEPS = 24
OPTIONS = (
    "--rollout.max_staleness", 0, "--rollout.window", 1, "--steps", STEPS, "--eval.every_steps", 0,
    "--trainer.advantage", "gae", "--critic.learning_rate_scale", 1, "--reference.kl_coefficient", 0.05,
    "--checkpoint.every_steps", 8, "--trainer.learning_rate", 0.01,
)  # fmt: skip
LEARNT = ("loss", "grad_norm", "reward_mean", "extra.value_loss", "extra.critic_grad_norm", "extra.kl_to_reference")


def steps(folder: Path) -> list[dict[str, Any]]:
    found = [row for row in rows(folder / "tiny/metrics.jsonl") if row["kind"] == "step"]
    return [{name: row[name] for name in ("step", *LEARNT)} for row in found]


def weights(folder: Path) -> dict[str, Any]:
    checkpoint, damaged = CheckpointStore(folder / "tiny/checkpoints", keep=2).load_newest()
    assert checkpoint is not None and not damaged and checkpoint.step == STEPS
    return checkpoint.files


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A run that nothing befalls."""
    from tests.end_to_end.tiny import write_toml

    folder = tmp_path_factory.mktemp("whole")
    done = llamarl_here("train", write_toml(folder, model), "--output", folder, "--cluster.kind", "inline", *OPTIONS)
    assert done.returncode == 0, done.stderr
    return folder


class Faulty:
    """A run in processes, some of which are killed."""

    def __init__(self, folder: Path, toml: Path, *options: object) -> None:
        self.folder = folder
        self.command = Command.start(folder, "train", toml, "--output", folder, *OPTIONS, *options)
        self.pids = list[int]()

    def strike(self, name: str, step: int, number: signal.Signals = signal.SIGKILL) -> int:
        """After a step; the process's pid."""
        metrics = self.folder / "tiny/metrics.jsonl"
        self.command.until(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text())
        pid = self.command.children()[name]
        self.pids += descendants(self.command.process.pid)
        os.kill(pid, number)
        return pid

    def end(self) -> str:
        """What it said; it has finished, and nobody is left."""
        code, said = self.command.wait()
        assert code == 0, said
        assert gone(self.pids) == []
        return said


@nightly("runs whose processes die and sleep; controller/test_failures.py and controller/test_restart.py have them")
def test_whoever_dies_the_run_learns_the_same(tmp_path: Path, toml: Path, whole: Path) -> None:
    """Trainer between two checkpoints, critic, generator, and the new trainer once more; at night reward and reference,
    which have nothing to lose, too."""
    run = Faulty(tmp_path, toml)
    deaths = [("trainer", 3), ("reward", 6), ("critic", 10), ("reference", 13), ("generator-0", 15), ("trainer", 18)]
    killed = [run.strike(name, step) for name, step in deaths if NIGHTLY or name not in ("reward", "reference")]
    said = run.end()
    assert steps(tmp_path) == steps(whole)
    assert weights(tmp_path) == weights(whole), "bit for bit"
    for pid in killed:
        assert re.search(rf"pid {pid} (was killed by SIGKILL|has ended)", said), said
    again = [(int(start), int(number)) for start, number in
             re.findall(r"trainer continues from step (\d+), (\d+) steps were trained again", said)]  # fmt: skip
    assert len(again) == 2 and again[0][0] == 0 and again[1][0] in (8, 16), again
    assert 3 <= again[0][1] <= 7


@nightly("tests/cluster runs all of its tests without Monarch, too")
def test_without_monarch_a_run_is_killed_resumed_and_replayed(
    tmp_path: Path, toml: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer, generator and then the controller are killed, and the trainer of the resumed run."""
    (tmp_path / "monarch.py").write_text("raise ImportError('this Monarch is for another torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = tiny.llamarl("train", toml, "--output", tmp_path, "--cluster.kind", "monarch")
    assert done.returncode == 2 and "another torch" in done.stderr and "cluster.kind = 'processes'" in done.stderr
    processes = ("--cluster.kind", "processes")
    run = Faulty(tmp_path, toml, *processes)
    killed = [run.strike(name, step) for name, step in (("trainer", 3), ("generator-0", 6))]
    run.command.until(lambda: '"step": 10,' in (tmp_path / "tiny/metrics.jsonl").read_text())
    run.pids += descendants(run.command.process.pid)
    _, said = run.command.end(signal.SIGKILL)
    assert gone(run.pids) == []
    for pid in killed:
        assert f"pid {pid} was killed by SIGKILL" in said, said
    run = Faulty(tmp_path, toml, *processes, "--resume")
    run.strike("trainer", 18)
    run.end()
    assert steps(tmp_path) == steps(whole)
    assert weights(tmp_path) == weights(whole), "bit for bit"
    done = llamarl_here("replay", tmp_path / "tiny")
    assert done.returncode == 0 and "all equal" in done.stdout, done.stdout + done.stderr


@nightly("what a mirror keeps, and what goes on from it, is in tests/checkpoint and tests/controller")
def test_with_a_mirror_one_step_is_taken_again(tmp_path: Path, toml: Path, whole: Path) -> None:
    run = Faulty(tmp_path, toml, "--checkpoint.mirror", "true")
    run.strike("trainer", 5)
    run.strike("critic", 12)
    said = run.end()
    assert steps(tmp_path) == steps(whole) and weights(tmp_path) == weights(whole)
    found = re.findall(r"(trainer|critic) continues from step (\d+), ([01]) steps were trained again", said)
    assert [name for name, *_ in found] == ["trainer", "critic"], said
    assert int(found[0][1]) >= 4 and int(found[1][1]) >= 11
    assert not list(Path("/dev/shm").glob("llamarl-tmp-*/mirror/*/trainer")), "it goes with the run"


@nightly("two runs of two ranks; of one rank it is said above, of ranks in tests/training/test_layouts.py")
@pytest.mark.parametrize("kind", ["monarch", "processes"])
def test_a_rank_that_is_killed_or_stopped(tmp_path: Path, toml: Path, kind: str) -> None:
    """One of two ranks of the trainer dies, later one stands still: the sentence says which, and nothing is lost."""
    two = ("--trainer.parallelism.fsdp", 2, "--cluster.timeout_s", 60, "--checkpoint.mirror", "true")
    two += ("--cluster.kind", kind)
    two += ("--steps", 12)
    (tmp_path / "whole").mkdir()
    (tmp_path / "faulty").mkdir()
    whole, faulty = (Faulty(tmp_path / name, toml, *two) for name in ("whole", "faulty"))
    faulty.strike("trainer.1", 3)
    stopped = faulty.strike("trainer.0", 7, signal.SIGSTOP)
    said = faulty.end()
    whole.end()
    assert steps(faulty.folder) == steps(whole.folder)
    assert re.search(r"trainer \(rank 1\): pid \d+ ", said), said
    assert f"rank 0 (pid {stopped}) is stopped" in said, said
    assert said.count("trainer continues") == 2


FEWER = """
from llamarl.cli.main import main
from llamarl.config.roles import ParallelismConfig
from llamarl.run.placement import LocalPlacer

again = set()
LocalPlacer.again = lambda self, name: again.add(name) or self.place(name)
LocalPlacer.layout = lambda self, name: ParallelismConfig() if name in again else None
main()
"""
"""A machine that has less room than before for those that start again."""


@nightly("two runs of two ranks; states move between layouts in tests/training/test_layouts.py")
@pytest.mark.parametrize("mirror", ["true", "false"])
def test_a_trainer_that_goes_on_in_another_layout_learns_the_same(
    tmp_path: Path, toml: Path, whole: Path, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks become one, from the mirror or the checkpoint of both: steps are as before, but for rounding."""
    monkeypatch.setattr(tiny, "LLAMARL", (sys.executable, "-c", FEWER))
    run = Faulty(
        tmp_path, toml, "--trainer.parallelism.fsdp", 2, "--checkpoint.mirror", mirror, "--checkpoint.every_steps", 4
    )
    run.strike("trainer.1", 6)
    said = run.end()
    assert "trainer starts in another layout, because too few devices are left: fsdp 1, tp 1, pp 1, cp 1" in said
    found = re.search(r"trainer continues from step (\d+), (\d+) steps were trained again", said)
    assert found and (int(found[1]) >= 5 if mirror == "true" else int(found[1]) == 4), said
    last = int(found[1]) + int(found[2]) + 2
    for step, other in zip(steps(tmp_path)[:last], steps(whole), strict=False):
        assert step == {name: pytest.approx(value, rel=1e-5, abs=1e-5) for name, value in other.items()}
    assert [step["step"] for step in steps(tmp_path)] == list(range(1, STEPS + 1))


SLEEPY = ("--cluster.placement", "colocated")


@nightly("runs whose processes die and sleep; controller/test_failures.py and controller/test_restart.py have them")
def test_generators_that_sleep_learn_the_same(tmp_path: Path, toml: Path, whole: Path) -> None:
    """From the trainer's own weights; evaluations end before a step begins."""
    done = llamarl_here(
        "train", toml, "--output", tmp_path, "--cluster.kind", "inline", *OPTIONS, *SLEEPY, "--eval.every_steps", 3
    )
    assert done.returncode == 0, done.stderr
    assert "* in_place" in (tmp_path / "tiny/events.jsonl").read_text()
    assert steps(tmp_path) == steps(whole) and weights(tmp_path) == weights(whole)
    replayed = llamarl_here("replay", tmp_path / "tiny")
    assert replayed.returncode == 0 and "all equal" in replayed.stdout, replayed.stderr


@nightly("deaths beside generators that do not sleep are above, sleeping in one process, too")
def test_whoever_dies_while_generators_sleep_in_turns(tmp_path: Path, toml: Path, whole: Path) -> None:
    run = Faulty(tmp_path, toml, *SLEEPY, "--generator.replicas", 2, "--checkpoint.mirror", "true")
    run.strike("trainer", 3)
    run.strike("generator-0", 7)
    run.strike("trainer", 10)
    run.strike("generator-1", 14)
    run.strike("critic", 17)
    run.end()
    assert steps(tmp_path) == steps(whole) and weights(tmp_path) == weights(whole)
