"""Real runs, one process per executor: signals, deaths, exceptions; nothing is lost, and nobody is left behind.

Not covered: several machines, GPUs, a machine that loses power.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from llamarl.checkpoint.store import CheckpointStore
from llamarl.training import critic
from tests.end_to_end.learning import write_task
from tests.end_to_end.tiny import (
    SOMETIME_S,
    Command,
    descendants,
    environment,
    gone,
    is_alive,
    llamarl,
    llamarl_here,
    rows,
)
from tests.nightly import NIGHTLY, crossed, nightly

END_S = 120.0
"""A run that was asked to end, or that has lost a process, ends within this time; a call that hangs takes 600 s."""
AT_ONCE_S = 20.0
"""Much less than executors get to close (`cluster.shutdown_timeout_s` below), whatever else the machine does."""
EXECUTORS = frozenset({"generator-0", "reward", "trainer"})
FOR_EVER = (
    "--steps", 100_000, "--checkpoint.every_steps", 5, "--cluster.on_failure", "stop",
    "--cluster.timeout_s", 240, "--cluster.shutdown_timeout_s", 60,
)  # fmt: skip

GRADERS = ("--reward.parts", "[{name = 'exact'}, {name = 'math'}]")
"""A reward whose graders are processes of their own, which must end with it."""


MODELS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "reward": (GRADERS, ()),
    "reference": (("--reference.kl_coefficient", 0.1), ("reference",)),
    "reward-model": ((), ("reward-model",)),
}
"""Options by the executor that is killed, and the executors that they add."""
ALSO_AT_NIGHT = ("reward", "reward-model", "reference") if NIGHTLY else ()


def with_score(model: Path, folder: Path) -> Path:
    """A classification model."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    head = {"score.weight": weights["model.embed_tokens.weight"][:1].clone()}
    save_file(weights | head, folder / "model.safetensors", {"format": "pt"})
    return folder


class Running:
    """A run that has begun to train, its executors by name, and all its processes."""

    def __init__(self, folder: Path, toml: Path, *overrides: object) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder / "tiny"
        self.command = Command.start(folder, "train", toml, "--output", folder, *FOR_EVER, *overrides)

    def wait_for_steps(self, count: int = 7, executors: frozenset[str] = EXECUTORS) -> None:
        metrics, checkpoints = self.folder / "metrics.jsonl", self.folder / "checkpoints"
        self.command.until(lambda: metrics.exists() and f'"step": {count},' in metrics.read_text())
        self.command.until(lambda: any(checkpoints.glob("step-*")))  # written beside the steps, so it may come later
        self.executors = self.command.children()
        self.pids = descendants(self.command.process.pid)
        assert self.executors.keys() == executors

    def check_files(self) -> int:
        """Every line is whole, every step is on record once; the newest checkpoint's step."""
        steps = [row["step"] for row in rows(self.folder / "metrics.jsonl") if row["kind"] == "step"]
        assert steps == list(range(1, len(steps) + 1))
        keys = [(row["group_id"], row["index"]) for row in rows(self.folder / "rollouts.jsonl")]
        assert len(keys) == len(set(keys))
        # A step is in the journal when it is completed, in the metrics once its weights have arrived.
        assert len(keys) in (len(steps) * 6, (len(steps) + 1) * 6)
        checkpoint, damaged = CheckpointStore(self.folder / "checkpoints", keep=2).load_newest()
        assert checkpoint is not None and not damaged
        assert checkpoint.step <= len(steps)
        return checkpoint.step


@pytest.fixture
def running(tmp_path: Path, toml: Path) -> Iterator[Running]:
    run = Running(tmp_path / "runs", toml)
    run.wait_for_steps()
    yield run
    if run.command.process.poll() is None:
        run.command.end(signal.SIGKILL)


def test_ctrl_c_and_resume(running: Running, toml: Path) -> None:
    maps = Path(f"/proc/{running.command.process.pid}/maps").read_text()
    assert "libtorch" not in maps, "the controller has loaded torch"
    start_s = time.monotonic()
    code, said = running.command.end(signal.SIGINT, END_S)
    assert time.monotonic() - start_s < END_S
    assert code == 130
    assert len(said.strip().splitlines()) == 1 and "SIGINT" in said and "--resume" in said, said
    assert gone(running.pids, AT_ONCE_S) == []
    last = running.check_files()
    steps = [row["step"] for row in rows(running.folder / "metrics.jsonl") if row["kind"] == "step"]
    assert last == steps[-1], "the last step was not saved"
    assert '"end": "interrupted"' in (running.folder / "summary.json").read_text()
    told = running.command.out.read_text()
    assert "INTERRUPTED" in told and "\nverdict " in told, "what was measured stays on the screen"

    goes_on = ("--steps", last + 3, "--cluster.kind", "inline", "--resume")
    done = llamarl_here("train", toml, "--output", running.folder.parent, *goes_on)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert running.check_files() == last + 3
    assert re.search(rf"step +{last + 1}/{last + 3} ", done.stdout)
    assert not re.search(rf"step +{last}/", done.stdout), "a step was done again"


@nightly("`test_ctrl_c_and_resume` ends a run by the same path")
@pytest.mark.parametrize("kind", ["inline", "monarch", "processes"])
def test_being_asked_to_end_and_a_second_signal(tmp_path: Path, toml: Path, kind: str) -> None:
    """SIGTERM ends one run. A second run, which starts in parallel, receives two signals in a row."""
    polite, hasty = (Running(tmp_path / name, toml, "--cluster.kind", kind) for name in ("polite", "hasty"))
    end_politely(polite, signal.SIGTERM, kind)
    end_hastily(hasty, kind)


@nightly("SIGTERM and SIGINT have the same handler")
def test_a_terminal_that_is_closed(tmp_path: Path, toml: Path) -> None:
    end_politely(Running(tmp_path / "polite", toml, "--cluster.kind", "inline"), signal.SIGHUP, "inline")


def executors_of(kind: str) -> frozenset[str]:
    return frozenset() if kind == "inline" else EXECUTORS


def end_politely(polite: Running, number: signal.Signals, kind: str) -> None:
    polite.wait_for_steps(executors=executors_of(kind))
    code, said = polite.command.end(number, END_S)
    assert code == 130 and number.name in said and "--resume" in said, said
    assert gone(polite.pids, AT_ONCE_S) == []
    polite.check_files()


def end_hastily(hasty: Running, kind: str) -> None:
    """Two signals, at any moment of its end."""
    hasty.wait_for_steps(executors=executors_of(kind))
    hasty.command.process.send_signal(signal.SIGINT)
    start_s = time.monotonic()
    while hasty.command.process.poll() is None:
        assert time.monotonic() - start_s < AT_ONCE_S, "the second signal does not end it at once"
        time.sleep(0.02)
        hasty.command.process.send_signal(signal.SIGINT)
    assert hasty.command.process.returncode in (-signal.SIGINT, 130)
    assert gone(hasty.pids, END_S) == []
    for line in (hasty.folder / "metrics.jsonl").read_text().splitlines():
        assert line.startswith("{") and line.endswith("}")


@pytest.mark.parametrize("kill", ["generator-0", "trainer", *ALSO_AT_NIGHT])
def test_kill_of_an_executor(tmp_path: Path, toml: Path, model: Path, kill: str) -> None:
    """Ranks of trainer and critic are killed in `test_layouts.py`."""
    options, more = MODELS.get(kill, ((), ()))
    if kill == "reward-model":
        options = ("--reward.model.path", with_score(model, tmp_path / "judge"))
    run = Running(tmp_path / "runs", toml, *options)
    run.wait_for_steps(executors=EXECUTORS.union(more))
    pid = run.executors[kill]
    os.kill(pid, signal.SIGKILL)
    code, said = run.command.wait(END_S)
    assert code == 1
    lines = [line for line in said.splitlines() if "CPU threads work at once" not in line]
    assert len(lines) == 2 and str(run.folder) in lines[1], said
    found = re.search(rf"MeshFailed: {kill} \(rank 0\): pid {pid} .*--resume \D+(\d+)$", lines[0])
    assert found, said
    assert gone(run.pids, AT_ONCE_S) == []
    last = [row["step"] for row in rows(run.folder / "metrics.jsonl") if row["kind"] == "step"][-1]
    saved = run.check_files()
    # The journal, from which it goes on, may have a step whose weights had not arrived yet.
    assert int(found[1]) in (last, last + (kill == "trainer"))
    assert saved == last or kill == "trainer", "if the trainer lives it saves"
    assert f"{kill} (rank 0)" in (run.folder / "summary.json").read_text()


@nightly("a killed generator is dropped and replaced in controller/test_failures.py")
@pytest.mark.parametrize("policy", ["drop", "respawn"])
def test_a_run_survives_the_kill_of_a_generator(tmp_path: Path, toml: Path, policy: str) -> None:
    """Others take over its work, or another one comes; each step and each rollout is on record once."""
    on_failure = f"{{generator = '{policy}'}}"
    run = Running(tmp_path / "runs", toml, "--generator.replicas", 2, "--cluster.on_failure", on_failure)
    run.wait_for_steps(executors=EXECUTORS | {"generator-1"})
    os.kill(run.executors["generator-1"], signal.SIGKILL)
    run.command.until(lambda: "generator-1 (rank 0)" in run.command.err.read_text())
    run.command.until(lambda: policy == "drop" or "generator-2" in run.command.children())
    metrics = run.folder / "metrics.jsonl"
    last = int(re.findall(r'"step": (\d+),', metrics.read_text())[-1])
    run.command.until(lambda: f'"step": {last + 20},' in metrics.read_text())
    code, said = run.command.end(signal.SIGINT, END_S)
    assert code == 130 and re.search(r"unfinished groups?\) .*generator-0 ", said), said
    run.check_files()


@nightly("half a minute of standing still; the clock that bears it is in tests/controller/test_clock.py")
@pytest.mark.parametrize("kind", ["inline", "monarch", "processes"])
def test_a_run_that_is_stopped_goes_on(tmp_path: Path, toml: Path, kind: str) -> None:
    """As by Ctrl-Z: for longer than it may stall, and than Monarch waits for an answer."""
    stall_s, stopped_s = (10, 14.0) if kind == "inline" else (30, 50.0)
    run = Running(tmp_path / "runs", toml, "--cluster.kind", kind, "--cluster.timeout_s", stall_s / 2)
    metrics = run.folder / "metrics.jsonl"
    run.command.until(lambda: metrics.exists() and '"step": 3,' in metrics.read_text())
    run.command.process.send_signal(signal.SIGSTOP)
    time.sleep(stopped_s)
    last = rows(metrics)[-1]["step"]
    run.command.process.send_signal(signal.SIGCONT)
    run.command.until(lambda: f'"step": {last + 20},' in metrics.read_text())
    code, said = run.command.end(signal.SIGINT, END_S)
    assert code == 130 and "no checkpoint" not in said and "had no answer" not in said, said


@nightly("test_keeping.py kills controllers with and without processes")
def test_kill_of_the_controller(tmp_path: Path, toml: Path) -> None:
    run = Running(tmp_path / "runs", toml, *GRADERS)
    run.wait_for_steps()
    assert all(map(is_alive, run.pids)) and len(run.pids) >= 3
    run.command.end(signal.SIGKILL)
    assert gone(run.pids, END_S) == []
    whole, _, _ = (run.folder / "metrics.jsonl").read_text().rpartition("\n")
    assert whole and rows(run.folder / "rollouts.jsonl")
    checkpoint, damaged = CheckpointStore(run.folder / "checkpoints", keep=2).load_newest()
    assert checkpoint is not None and not damaged
    last = max(row["step"] for row in rows(run.folder / "journal.jsonl") if "groups" in row)
    assert last >= checkpoint.step
    goes_on = ("--steps", last + 2, "--cluster.kind", "inline", "--resume")
    done = llamarl_here("train", toml, "--output", run.folder.parent, *goes_on)
    assert done.returncode == 0, done.stderr
    assert run.check_files() == last + 2


@pytest.mark.parametrize(
    ("kind", "override", "where"),
    [
        *((kind, ("--trainer.loss", "tests.end_to_end.parts:BrokenLoss"), "trainer.step failed")
          for kind in ("inline", *(["monarch"] if NIGHTLY else []))),
        ("inline", ("--reward.parts", "['tests.end_to_end.parts:BrokenReward']"), "reward.score failed"),
    ],
)  # fmt: skip
def test_an_exception_in_an_executor(
    tmp_path: Path, toml: Path, kind: str, override: tuple[str, str], where: str
) -> None:
    """How one comes from a process, `tests/cluster/test_processes.py` says."""
    run = llamarl if kind == "monarch" else llamarl_here
    done = run("train", toml, "--output", tmp_path, "--cluster.kind", kind, *override)
    assert done.returncode == 1
    first, *trace, last, files = done.stderr.strip().splitlines()
    assert first.endswith(f"RemoteError: {where}")
    assert trace[0].startswith("Traceback")
    assert any("tests/end_to_end/parts.py" in line for line in trace)
    assert last.startswith("ZeroDivisionError: the user's ") and str(tmp_path) in files


@pytest.mark.parametrize(("policy", "who"), crossed(["stop", "skip"], ["trainer", "critic"]))
def test_a_run_that_diverges_does_not_look_like_a_success(
    tmp_path: Path, toml: Path, monkeypatch: pytest.MonkeyPatch, policy: str, who: str
) -> None:
    """It ends with a sentence that names what was not finite: at once, or after some skipped steps."""
    part, rate = ("--trainer.loss", "tests.end_to_end.parts:InfiniteLoss"), "trainer.learning_rate"
    if who == "critic":
        monkeypatch.setattr(critic, "value_losses", lambda values_R, *_: values_R.exp() * float("inf"))
        part, rate = ("--trainer.advantage", "gae"), "critic.learning_rate_scale"
    limit = ("--trainer.on_nonfinite", policy, "--cluster.kind", "inline")
    done = llamarl_here("train", toml, "--output", tmp_path, *part, *limit)
    assert done.returncode == 1
    *warnings, last, files = (line for line in done.stderr.splitlines() if "CPU threads work at once" not in line)
    name = "critic step" if who == "critic" else "step"
    count = 0 if policy == "stop" else 2
    assert f"NonFiniteStep: {name} {count}: loss inf, " in last and "microbatch 1 of 1" in last
    assert str(tmp_path) in files
    if policy == "stop":
        assert rate in last and "trainer.on_nonfinite = 'skip'" in last and not warnings
    else:
        assert "3 steps in a row" in last
        warning, _ = warnings
        assert f"{name} 0: loss inf, " in warning and "trainer.on_nonfinite = 'skip'" in warning
    assert last.partition("NonFiniteStep: ")[2] in (tmp_path / "tiny/summary.json").read_text()


@nightly("an end while the base model is made, by day, finds a start that cannot be interrupted")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_while_executors_start(tmp_path: Path, toml: Path, number: signal.Signals) -> None:
    command = Command.start(tmp_path, "train", toml, "--output", tmp_path)
    command.until(lambda: "starting executors" in command.out.read_text() and len(command.children()) > 1)
    pids = descendants(command.process.pid)
    code, said = command.end(number, END_S)
    assert code == 130
    assert number.name in said.strip().splitlines()[-1], said
    assert gone(pids, AT_ONCE_S) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, *([signal.SIGKILL] if NIGHTLY else [])])
def test_an_end_while_the_base_model_is_made(tmp_path: Path, number: signal.Signals) -> None:
    """At the first moment at which there is a process that makes it."""
    write_task(tmp_path)
    sft = tmp_path / "sft.toml"
    sft.write_text(sft.read_text().replace("steps = 180", "steps = 100000"))
    command = Command.start(tmp_path, "train", tmp_path / "run.toml")
    command.until(lambda: len(descendants(command.process.pid)) > 0)
    pids = descendants(command.process.pid)
    code, _ = command.end(number, END_S)
    assert code == (130 if number == signal.SIGTERM else -number)
    assert gone(pids, END_S) == []
    assert not (tmp_path / "base").exists() and not (tmp_path / "runs").exists()


@nightly("config/test_ref.py and python/test_api.py find parts of the user's own by day")
def test_parts_of_the_user_s_own_are_found_from_the_working_folder(tmp_path: Path, toml: Path) -> None:
    """By the installed script, whose own folder is what Python would search."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from llamarl.rewards.exact import Exact\n"
        "@dataclass\nclass Mine(Exact):\n"
        "    def score(self, items):\n        raise ZeroDivisionError('in a file of mine')\n"
    )
    script = Path(sys.executable).with_name("llamarl")
    command = [script, "train", toml, "--reward.parts", "['mine:Mine']", "--cluster.kind", "inline"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment())
    assert done.returncode == 1
    assert "reward.score failed" in done.stderr and "ZeroDivisionError: in a file of mine" in done.stderr


def test_rewards_that_judge_nothing_end_the_run(tmp_path: Path, toml: Path) -> None:
    override = ("--reward.parts", "['tests.end_to_end.parts:Undecided']", "--cluster.kind", "inline")
    done = llamarl_here("train", toml, "--output", tmp_path, *override)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()
    assert len(said) == 2
    assert "TooManyInvalid: 6 of 6 " in said[0] and said[0].endswith("the user's reward cannot say")


@nightly("a run of its own; controller/test_failures.py ends runs that cannot write by day")
def test_a_run_whose_folder_is_deleted_ends(tmp_path: Path, toml: Path) -> None:
    folder, begun = tmp_path / "tiny", threading.Event()

    def delete() -> None:
        metrics, deadline_s = folder / "metrics.jsonl", time.monotonic() + SOMETIME_S
        while not (metrics.exists() and '"step": 2,' in metrics.read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        begun.set()
        while folder.exists():  # the run may write into it while it goes
            shutil.rmtree(folder, ignore_errors=True)

    deleting = threading.Thread(target=delete)
    deleting.start()
    done = llamarl_here("train", toml, "--output", tmp_path, *FOR_EVER, "--cluster.kind", "inline")
    deleting.join(SOMETIME_S)
    assert begun.is_set() and done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"^llamarl train: FolderLost: \S+/tiny ", done.stderr, re.MULTILINE), done.stderr
