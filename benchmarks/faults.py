"""What a run feels of a generator that is killed, of one that is stopped for half a minute, and of a trainer that dies.

    python benchmarks/faults.py [--stopped-s 30]

The demo with two generators, whose base model must be there (`make demo` makes it). One generator is killed while it
receives weights, later one is stopped (SIGSTOP) and goes on, then the trainer is killed, whose state is mirrored; in a
second run without a mirror it is killed half-way between two checkpoints. Figures come from the files that every run
writes. `faults_random.py` throws dice instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _record import write_result

ROOT = Path(__file__).parents[1]
WAIT_S = 300.0
SETTLED_STEP = 40
"""Enough steps that start-up is over and the median of a step is known."""


def executors(folder: Path) -> dict[str, int]:
    """Process of each executor of the run in `folder` that is alive, by name: its output is a log file of this name."""
    found = dict[str, int]()
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            target = Path(os.readlink(path))
        except OSError:
            continue
        if target.parent == folder / "logs":
            found.setdefault(target.stem, int(path.parts[2]))
    return found


class DemoRun:
    """`llamarl train configs/demo.toml` with two generators, in a session of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder / "demo"
        command = [
            *(sys.executable, "-m", "llamarl", "train", "configs/demo.toml", "--output", str(folder)),
            *("--steps", "100000", "--eval.every_steps", "0", "--eval.max_prompts", "8", "--screen.kind", "lines"),
            *("--generator.replicas", "2", *options),
        ]
        self.out = (folder / "out.txt").open("w")
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self.out, stderr=self.out, start_new_session=True)

    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [row for line in lines if (row := json.loads(line))["kind"] == "step"]

    def wait(self, condition: Any, what: str) -> float:
        """Seconds until it holds."""
        start_s = time.monotonic()
        while not condition():
            assert self.process.poll() is None, f"the run ended: {Path(self.out.name).read_text()}"
            assert time.monotonic() - start_s < WAIT_S, f"no {what} within {WAIT_S} s"
            time.sleep(0.05)
        return time.monotonic() - start_s

    def generators(self) -> dict[str, int]:
        """Process of each generator that is alive, by name."""
        return {name: pid for name, pid in self.executors().items() if name.startswith("generator")}

    def executors(self) -> dict[str, int]:
        """Process of each executor that is alive, by name."""
        return executors(self.folder)

    def end(self) -> dict[str, Any]:
        """Asks it to end; its summary."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))

    def spans(self, executor: str, name: str) -> list[tuple[float, float]]:
        """Beginning and length of what an executor did, in seconds of the trace's clock."""
        events = json.loads((self.folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
        processes = {event["args"].get("name"): event["pid"] for event in events if event["ph"] == "M"}
        return [
            (event["ts"] / 1e6, event["dur"] / 1e6)
            for event in events
            if event["pid"] == processes[executor] and event["name"] == name
        ]


def kill(run: DemoRun) -> dict[str, Any]:
    """One generator dies right after a step ended, when weights are on their way."""
    before, num_steps = run.generators(), len(run.steps())
    run.wait(lambda: len(run.steps()) > num_steps, "next step")
    victim = sorted(before)[-1]
    os.kill(before[victim], signal.SIGKILL)
    run.wait(lambda: set(run.generators()) - set(before), "replacement")
    return {"killed": victim, "at_step": num_steps + 1}


def after_kill(run: DemoRun, step: int) -> dict[str, Any]:
    """How the trainer went on, and when the replacement worked with weights of its own."""
    train = run.spans("trainer", "train")
    killed_s = sum(train[step - 1])
    before, after = ([length for _, length in spans] for spans in (train[10:step], train[step : step + 20]))
    replaced_s = min(begin for begin, _ in run.spans("generator-2", "generate")) - killed_s
    rows = run.steps()
    ends = [row["wall_s"] for row in rows]
    replaced = next((i for i, end_s in enumerate(ends) if end_s > ends[step - 1] + replaced_s), len(ends))
    steps_s = _lengths(rows)
    ratio = statistics.median(steps_s[replaced : replaced + 20]) / statistics.median(steps_s[10 : step - 1])
    return {
        "step_ratio": ratio,
        "train_s_before": statistics.median(before), "train_s_after": statistics.median(after),
        "train_ratio": statistics.median(after) / statistics.median(before),
        "replacement_decodes_after_s": replaced_s, "step_s_after": _lengths(run.steps()[step - 1 : step + 5]),
    }  # fmt: skip


def stop(run: DemoRun, seconds: float) -> dict[str, Any]:
    """One generator stands still; how the run went on, and when it was no longer left behind."""
    name, pid = sorted(run.generators().items())[0]
    first = len(run.steps())
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    during = run.steps()[first:]
    os.kill(pid, signal.SIGCONT)
    resumed = len(run.steps())
    caught_up_s = run.wait(
        lambda: any(row["extra.late_generators"] == 0 for row in run.steps()[resumed + 1 :]), "generator in time"
    )
    return {
        "stopped": name, "stopped_s": seconds, "steps_meanwhile": len(during),
        "late_meanwhile": max((row["extra.late_generators"] for row in during), default=0.0),
        "longest_step_s": max(_lengths(run.steps()[max(0, first - 1) : resumed]), default=seconds),
        "caught_up_s": caught_up_s,
    }  # fmt: skip


def kill_trainer(run: DemoRun) -> float:
    """Seconds from its death to the next step on record."""
    num_steps = len(run.steps())
    run.wait(lambda: len(run.steps()) > num_steps, "next step")
    pid, before = run.executors()["trainer"], len(run.steps())
    os.kill(pid, signal.SIGKILL)
    start_s = time.monotonic()
    run.wait(lambda: len(run.steps()) > before + 1, "step of a new trainer")  # one may have been on its way
    return time.monotonic() - start_s


def from_a_checkpoint(folder: Path) -> float:
    """As `kill_trainer`, with 25 steps to take again."""
    run = DemoRun(folder, "--checkpoint.every_steps", "50")
    try:
        run.wait(lambda: len(run.steps()) >= 75, "step 75")
        seconds = kill_trainer(run)
        run.end()
        return seconds
    finally:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)


def _lengths(rows: list[dict[str, Any]]) -> list[float]:
    return [b["wall_s"] - a["wall_s"] for a, b in itertools.pairwise(rows)]


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stopped-s", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = DemoRun(Path(temporary, "mirror"), "--checkpoint.mirror", "true")
        try:
            run.wait(lambda: len(run.steps()) >= SETTLED_STEP, f"step {SETTLED_STEP}")
            killed = kill(run)
            settled = len(run.steps()) + SETTLED_STEP
            run.wait(lambda: len(run.steps()) >= settled, f"step {settled}")
            stopped = stop(run, options.stopped_s)
            trainer_mirror_s = kill_trainer(run)
            rows = run.steps()
            summary = run.end()
            killed |= after_kill(run, killed["at_step"])
        finally:
            if run.process.poll() is None:
                os.killpg(run.process.pid, signal.SIGKILL)
        figures = {
            "kill_step_ratio": killed["step_ratio"],
            "replacement_s": killed["replacement_decodes_after_s"],
            "continue_s": stopped["caught_up_s"],
            "trainer_mirror_s": trainer_mirror_s,
            "trainer_checkpoint_s": from_a_checkpoint(Path(temporary, "checkpoint")),
            "mirror_share": statistics.median(row["extra.mirror_s"] / row["step_s"] for row in rows[10:]),
            "record_share": statistics.median(row["extra.record_share"] for row in rows[10:]),
            "kill": killed, "stop": stopped, "stall_p99_s": summary["extra.stall_p99_s"], "steps": summary["steps"],
        }  # fmt: skip
    print(json.dumps(figures, indent=2))
    print(write_result("faults", {"stopped_s": options.stopped_s, "replicas": 2}, figures, NOTES))


NOTES = [
    "kill_step_ratio: median step time of 20 steps after the replacement came over that before the kill.",
    "mirror_share: seconds of the trainer's thread for the copy, over the step; it is written beside the next one.",
    "Train steps: the trainer's own spans, wall time. The machine has two cores for two generators, a trainer and a",
    "controller; a replacement that loads its model takes one of them for some seconds.",
]

if __name__ == "__main__":
    main()
