"""What a start saves when ranks are forked from one server that has imported torch: short runs with it and without it.

    python benchmarks/start.py [--config configs/demo.toml] [--pairs 10] [--steps 1] [--max-load 0.5]

The same command twice per pair, the order changes from pair to pair. `ready_s` is the time from the command to the
moment when all executors are there, `cpu_s` the processor time of the command and all its processes. Before each
command the script waits, for `--wait-s` at most, until the machine's load is at most `--max-load`; the load at each
start is in the file. The base model of the configuration must exist: one run is made beforehand and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _record import write_result

ROOT = Path(__file__).parents[1]
SWITCH = "LLAMARL_FORK_SERVER"
STARTING = "starting executors"
Measured = dict[str, float]


def measured(options: argparse.Namespace, folder: Path, *, with_server: bool) -> Measured:
    """One run of the command. Raises CalledProcessError."""
    deadline_s = time.monotonic() + options.wait_s
    while (load := load_now()) > options.max_load and time.monotonic() < deadline_s:
        time.sleep(1)
    command = [
        sys.executable, "-m", "llamarl", "train", options.config, "--steps", str(options.steps), "--name", "start",
        "--output", str(folder), "--overwrite", "--eval.max_prompts", "8", "--screen.kind", "lines",
    ]  # fmt: skip
    env = os.environ | {SWITCH: "1" if with_server else "0"}
    started_s = time.time()
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    ended_s = time.time()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    lines = (folder / "start" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    phases = [row for row in map(json.loads, lines) if row["kind"] == "phase"]
    at = next(number for number, row in enumerate(phases) if row["text"] == STARTING)
    return {
        "begins_s": phases[at]["at_s"] - started_s,
        "ready_s": phases[at + 1]["at_s"] - started_s,
        "wall_s": ended_s - started_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "load": load,
    }


def load_now() -> float:
    """Share of all cores that is busy, over half a second."""
    before = busy_and_all()
    time.sleep(0.5)
    after = busy_and_all()
    return (after[0] - before[0]) / (after[1] - before[1])


def busy_and_all() -> tuple[int, int]:
    """Ticks of all cores since the machine's start: busy ones, and all."""
    first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    ticks = [int(word) for word in first.split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def summarized(pairs: Sequence[tuple[Measured, Measured]]) -> dict[str, Any]:
    """Medians of what each pair saves, with the quartiles, and of both sides."""
    found: dict[str, Any] = {}
    for name, figure in (("ready_s", "start_s_saved"), ("cpu_s", "cpu_s_saved"), ("wall_s", "wall_s_saved")):
        saved = [without[name] - with_server[name] for with_server, without in pairs]
        low, middle, high = statistics.quantiles(saved, n=4) if len(saved) > 1 else saved * 3
        found[figure] = round(middle, 3)
        found[f"{figure}_quartiles"] = [round(low, 3), round(high, 3)]
        found[name] = [round(statistics.median(one[name] for one in side), 3) for side in zip(*pairs, strict=True)]
    found["load"] = round(statistics.median(one["load"] for pair in pairs for one in pair), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/demo.toml")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--max-load", type=float, default=0.5, help="busy share of the cores before a start")
    parser.add_argument("--wait-s", type=float, default=60.0)
    options = parser.parse_args()
    pairs = list[tuple[Measured, Measured]]()
    with tempfile.TemporaryDirectory() as folder:
        measured(options, Path(folder), with_server=True)
        for number in range(options.pairs):
            one: dict[bool, Measured] = {}
            for with_server in (True, False) if number % 2 else (False, True):
                one[with_server] = measured(options, Path(folder), with_server=with_server)
            pairs.append((one[True], one[False]))
            print(json.dumps(summarized(pairs)), flush=True)
    rows = [{"with": _rounded(with_server), "without": _rounded(without)} for with_server, without in pairs]
    notes = [
        "ready_s, cpu_s and wall_s are medians: with the server, then without it",
        "begins_s: from the command to the moment when it begins to start executors",
        "load: share of all cores that was busy in the half second before a command",
    ]
    path = write_result("start", vars(options), summarized(pairs) | {"pairs": rows}, notes)
    print(path)


def _rounded(one: Measured) -> Measured:
    return {name: round(value, 3) for name, value in one.items()}


if __name__ == "__main__":
    main()
