"""Random faults: executors and controllers killed, executors stopped; every run still reaches its end as it should.

    python benchmarks/faults_random.py [--runs 20] [--faults 10] [--seed 0]

Each run is the demo with two generators under `--restarts`, with so many faults at random moments. A run fails when it
does not end by itself with all steps, each on record once, with rollouts that are each there once, with held-out
accuracy as seeds without faults have it, with no process and no shared memory left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _record import write_result
from faults import ROOT, executors

STEPS = 100
LEAST_ACCURACY = 0.6
"""After so few steps seeds without faults end between 0.7 and 0.85."""
RUN_S = 600.0
KINDS = (
    "kill generator", "kill trainer", "kill reward", "kill controller", "stop generator", "stop trainer", "stop reward",
)  # fmt: skip
STOPPED_S = 5.0


def controller(folder: Path) -> int | None:
    """Who holds the lock of the run."""
    try:
        return int((folder / ".lock").read_text())
    except (OSError, ValueError):
        return None


def strike(kind: str, folder: Path, rng: random.Random) -> str:
    """One fault; what was hit, or nothing where nobody of that kind is there."""
    deed, _, role = kind.partition(" ")
    if role == "controller":
        pid = controller(folder)
        name = role
    else:
        able = sorted((name, pid) for name, pid in executors(folder).items() if name.split("-")[0] == role)
        name, pid = rng.choice(able) if able else ("", None)
    if pid is None:
        return ""
    try:
        os.kill(pid, signal.SIGKILL if deed == "kill" else signal.SIGSTOP)
        if deed == "stop":
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return ""
    return f"{deed} {name}"


def one_run(folder: Path, seed: int, num_faults: int) -> dict[str, Any]:
    """Its faults, and what is wrong with it."""
    rng, run = random.Random(seed), folder / "demo"
    segments = set(Path("/dev/shm").iterdir())
    command = [
        *(sys.executable, "-m", "llamarl", "train", "configs/demo.toml", "--output", str(folder)),
        *("--steps", str(STEPS), "--seed", str(seed), "--screen.kind", "lines", "--generator.replicas", "2"),
        *("--checkpoint.every_steps", "20", "--cluster.max_restarts", "50", "--restarts", "50"),
        *(("--checkpoint.mirror", "true") if seed % 2 else ()),
    ]
    folder.mkdir(exist_ok=True)
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
        start_s, done = time.monotonic(), list[str]()
        while process.poll() is None and time.monotonic() - start_s < RUN_S:
            time.sleep(rng.uniform(1.0, 8.0))
            steps = rows(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
            if len(done) < num_faults and steps and (hit := strike(rng.choice(KINDS), run, rng)):
                done.append(hit)
        is_late = process.poll() is None
        if is_late:
            os.killpg(process.pid, signal.SIGKILL)
    time.sleep(2.0)
    left = [*executors(run).items(), *(set(Path("/dev/shm").iterdir()) - segments)]
    return {"seed": seed, "faults": done, "seconds": time.monotonic() - start_s} | judged(run, process, is_late, left)


def judged(run: Path, process: subprocess.Popen[bytes], is_late: bool, left: list[Any]) -> dict[str, Any]:
    wrong = [f"exit code {process.returncode}"] if process.returncode else []
    wrong += ["too late"] if is_late else []
    metrics = rows(run / "metrics.jsonl")
    steps = [row["step"] for row in metrics if row["kind"] == "step"]
    if steps != list(range(1, STEPS + 1)):
        wrong.append(f"steps {steps[:3]}...{steps[-3:]}, {len(steps)} in all")
    keys = Counter((row["group_id"], row["index"]) for row in rows(run / "rollouts.jsonl"))
    if set(keys.values()) != {1} or len(keys) != STEPS * 128:
        wrong.append(f"{len(keys)} rollouts, some {max(keys.values(), default=0)} times")
    accuracy = [row["accuracy"] for row in metrics if row["kind"] == "eval"][-1:]
    if not accuracy or accuracy[0] < LEAST_ACCURACY:
        wrong.append(f"accuracy {accuracy}")
    if left:
        wrong.append(f"left: {left}")
    return {"accuracy": accuracy[0] if accuracy else None, "wrong": wrong}


def rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def main() -> None:
    """Runs, judges and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = list[dict[str, Any]]()
    for number in range(options.runs):
        with tempfile.TemporaryDirectory() as temporary:
            found.append(one_run(Path(temporary, "run"), options.seed + number, options.faults))
            if found[-1]["wrong"]:
                print(Path(temporary, "run/out.txt").read_text()[-3000:], flush=True)
        print(json.dumps(found[-1]), flush=True)
    figures = {
        "faults_tried": sum(len(one["faults"]) for one in found),
        "faults_failed": sum(len(one["faults"]) for one in found if one["wrong"]),
        "runs_failed": sum(bool(one["wrong"]) for one in found),
        "runs": found,
    }
    print(write_result("faults_random", {"runs": options.runs, "steps": STEPS}, figures, NOTES))


NOTES = [f"A stopped executor stands still for {STOPPED_S:g} s. All faults of a run that failed count as failed."]

if __name__ == "__main__":
    main()
