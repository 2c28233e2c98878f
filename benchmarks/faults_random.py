"""Random faults: processes killed and stopped, disks full, slow and damaged; every run still ends as it should.

    python benchmarks/faults_random.py [--runs 20] [--faults 10] [--seed 0] [--more]

Each run is the demo with two generators under `--restarts`, with so many faults at random moments; as root on a disk
of its own, which is full or stands still at times. A run fails when it does not end by itself with all steps, each on
record once, with rollouts that are each there once (where the disk was full: or are said to be lost), with held-out
accuracy as seeds without faults have it, with no process and no shared memory left behind. `--more` adds to the runs
that today's file has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from _record import RESULTS, write_result
from faults import ROOT, executors

from llamarl.run.rollouts import rollout_rows

STEPS = 100
LEAST_ACCURACY = 0.6
"""After so few steps seeds without faults end between 0.7 and 0.85."""
RUN_S = 1200.0
KINDS = (
    "kill generator", "kill trainer", "kill reward", "kill controller", "stop generator", "stop trainer", "stop reward",
    "damage checkpoint",
)  # fmt: skip
DISK_KINDS = ("fill disk", "freeze disk")
DISK_MB = 400
STOPPED_S = 5.0


@contextmanager
def disk(folder: Path) -> Iterator[bool]:
    """A file system of its own in `folder`, where this user may make one; whether it is one."""
    image, target = folder / "disk.img", folder / "run"
    target.mkdir()
    if os.geteuid() or not shutil.which("fsfreeze"):
        yield False
        return
    with image.open("wb") as file:
        file.truncate(DISK_MB << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, target], check=True)
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", target], check=True)


def strike_disk(kind: str, folder: Path) -> None:
    """For a while nothing more fits on the run's disk, or nothing is written."""
    if kind == "freeze disk":
        subprocess.run(["fsfreeze", "-f", folder], check=True)
        time.sleep(STOPPED_S)
        subprocess.run(["fsfreeze", "-u", folder], check=True)
        return
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    time.sleep(STOPPED_S)
    ballast.unlink()


def damage(run: Path) -> str:
    """The controller is killed, and its newest checkpoint damaged, when there is another one."""
    able = sorted(path for path in run.glob("checkpoints/step-*") if not (path / "damaged").exists())
    newest = sorted(run.glob("checkpoints/step-*"))[-1:]
    if len(able) < 2 or able[-1:] != newest or (pid := controller(run)) is None:
        return ""
    os.kill(pid, signal.SIGKILL)
    victim = max(able[-1].glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as file:
        file.seek(victim.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    (able[-1] / "damaged").touch()
    return f"damage {able[-1].name}, kill controller"


def controller(folder: Path) -> int | None:
    """Who holds the lock of the run."""
    try:
        return int((folder / ".lock").read_text())
    except (OSError, ValueError):
        return None


def strike(kind: str, folder: Path, rng: random.Random) -> str:
    """One fault; what was hit, or nothing where nobody of that kind is there."""
    deed, _, role = kind.partition(" ")
    if role == "disk":
        strike_disk(kind, folder.parent)
        return kind
    if deed == "damage":
        with suppress(FileNotFoundError, ProcessLookupError):  # the run has deleted it meanwhile, or has ended
            return damage(folder)
        return ""
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


def one_run(folder: Path, seed: int, num_faults: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Its faults, and what is wrong with it."""
    rng, run = random.Random(seed), folder / "demo"
    memory = Path(tempfile.mkdtemp(prefix="faults-", dir="/dev/shm"))
    command = [
        *(sys.executable, "-m", "llamarl", "train", "configs/demo.toml", "--output", str(folder)),
        *("--steps", str(STEPS), "--seed", str(seed), "--screen.kind", "lines", "--generator.replicas", "2"),
        *("--checkpoint.every_steps", "5", "--cluster.max_restarts", "50", "--restarts", "50"),
        *(("--checkpoint.mirror", "true") if seed % 2 else ()),
    ]
    with (folder.parent / "out.txt").open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True,
            env=os.environ | {"LLAMARL_MEMORY": str(memory)},
        )  # fmt: skip
        start_s, done = time.monotonic(), list[str]()
        while process.poll() is None and time.monotonic() - start_s < RUN_S:
            time.sleep(rng.uniform(1.0, 8.0))
            steps = rows(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
            if len(done) < num_faults and steps and (hit := strike(rng.choice(kinds), run, rng)):
                done.append(hit)
        is_late = process.poll() is None
        if is_late:
            os.killpg(process.pid, signal.SIGKILL)
    time.sleep(2.0)
    left = [*executors(run).items(), *map(str, memory.iterdir())]
    shutil.rmtree(memory)
    return {"seed": seed, "faults": done, "seconds": time.monotonic() - start_s} | judged(run, process, is_late, left)


def judged(run: Path, process: subprocess.Popen[bytes], is_late: bool, left: list[Any]) -> dict[str, Any]:
    wrong = [f"exit code {process.returncode}"] if process.returncode else []
    wrong += ["too late"] if is_late else []
    metrics = rows(run / "metrics.jsonl")
    steps = [row["step"] for row in metrics if row["kind"] == "step"]
    said = (run.parents[1] / "out.txt").read_text()
    lost = "lost at" in said or "keeps nothing until" in said
    if sorted(set(steps)) != steps or (steps != list(range(1, STEPS + 1)) and not lost):
        wrong.append(f"steps {steps[:3]}...{steps[-3:]}, {len(steps)} in all")
    keys = Counter((row["group_id"], row["index"]) for row in rollout_rows(run))
    if set(keys.values()) != {1} or len(keys) > STEPS * 128 or (len(keys) < STEPS * 128 and not lost):
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
    parser.add_argument("--more", action="store_true")
    options = parser.parse_args()
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    before = RESULTS / f"faults_random-{day}.json"
    found: list[dict[str, Any]] = json.loads(before.read_text())["runs"] if options.more else []
    for seed in range(options.seed, options.seed + options.runs):
        with tempfile.TemporaryDirectory() as temporary, disk(Path(temporary)) as has_disk:
            kinds = KINDS + DISK_KINDS if has_disk else KINDS
            found.append(one_run(Path(temporary, "run"), seed, options.faults, kinds))
            if found[-1]["wrong"]:
                print(Path(temporary, "out.txt").read_text()[-3000:], flush=True)
        print(json.dumps(found[-1]), flush=True)
        print(write_result("faults_random", {"runs": len(found), "steps": STEPS}, figures_of(found), NOTES))


def figures_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs, and the sums."""
    return {
        "faults_tried": sum(len(one["faults"]) for one in found),
        "faults_failed": sum(len(one["faults"]) for one in found if one["wrong"]),
        "runs_failed": sum(bool(one["wrong"]) for one in found),
        "kinds": Counter(" ".join(fault.split("-")[0].split()) for one in found for fault in one["faults"]),
        "runs": found,
    }


NOTES = [
    f"A stopped executor or disk stands still for {STOPPED_S:g} s. All faults of a run that failed count as failed."
]

if __name__ == "__main__":
    main()
