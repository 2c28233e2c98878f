"""How much a long run grows: memory, descriptors and threads of every process, and files, per 100 steps.

    python benchmarks/soak/soak.py --steps 10000 [--config RUN.toml] [--section.key value ...]

Trains the demo (its base model is made on first use) as a user would, and reads what the run says of itself in its
metrics. Growth is the slope of a least-squares line over the steps after the first tenth, which fills caches. Shared
memory and sockets are those in /dev/shm and of this machine before and after. The file goes beside this one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from llamarl.observability.files import pieces, read_run_rows

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from _record import write_result  # noqa: E402

KINDS = {"rss_bytes": 1e6, "descriptors": 1.0, "threads": 1.0}
"""Units: megabytes, and numbers."""


def growth(steps: np.ndarray, values: np.ndarray) -> dict[str, float]:
    """Of one process: first and last value after the warm-up, and the slope per 100 steps."""
    late = steps > steps[0] + (steps[-1] - steps[0]) / 10
    slope, _ = np.polyfit(steps[late], values[late], 1)
    first, last = values[late][0], values[late][-1]
    return {"first": round(float(first), 3), "last": round(float(last), 3), "per_100_steps": round(100 * slope, 4)}


def shared() -> dict[str, int]:
    """Named shared memory, and listening sockets, of this machine."""
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    listening = sum(words[3] == "0A" for words in lines)
    return {"shared_memory_entries": len(list(Path("/dev/shm").iterdir())), "listening_sockets": listening}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--config", default="configs/demo.toml")
    parser.add_argument("--steps", type=int, default=300)
    options, overrides = parser.parse_known_args()
    before = shared()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "llamarl", "train", options.config, "--output", folder, "--name", "soak",
                   "--steps", str(options.steps), "--screen.kind", "none", *overrides]  # fmt: skip
        subprocess.run(command, check=True)
        run = Path(folder, "soak")
        rows = [row for _, row in read_run_rows(run / "metrics.jsonl", "") if row["kind"] == "step"]
        sizes = {name: sum(file.stat().st_size for file in pieces(run / f"{name}.jsonl")) for name in
                 ("metrics", "rollouts")}  # fmt: skip
        logs = sum(file.stat().st_size for file in (run / "logs").iterdir())
    after, steps = shared(), np.array([row["step"] for row in rows], float)
    names = sorted(name.split(".", 2)[2] for name in rows[-1] if name.startswith("extra.rss_bytes."))
    found = {
        name: {
            kind: growth(steps, np.array([row[f"extra.{kind}.{name}"] for row in rows], float) / unit)
            for kind, unit in KINDS.items()
        }
        for name in names
    }
    seconds = np.array([row["step_s"] for row in rows])
    figures = {
        "processes": found,
        "step_s": {"first_half": float(np.median(seconds[: len(rows) // 2])),
                   "second_half": float(np.median(seconds[len(rows) // 2 :]))},
        "bytes_per_step": {name: size / len(rows) for name, size in {**sizes, "logs": logs}.items()},
        "before": before,
        "after": after,
    }  # fmt: skip
    notes = ["rss_bytes in MB. Slopes of short runs are those of caches and allocators that still fill."]
    settings = {"config": options.config, "steps": options.steps, "overrides": overrides}
    print(write_result("soak", settings, figures, notes, HERE))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
