"""Asynchronous against synchronous against colocated, on the demo, with the same seeds and the same two cores.

    python benchmarks/asynchrony.py [--seeds 0 1 2] [--steps 100]

Modes take turns seed by seed, so that a slow spell of a shared machine hits all of them. Each run is a command of its
own (`llamarl train`), and its figures are those that it reports itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import write_result

ROOT = Path(__file__).parents[1]
MODES = {
    # One core decodes, one trains.
    "max_staleness_1": ["--rollout.max_staleness", "1"],
    # The same, but generation and training wait for each other: exactly synchronous.
    "max_staleness_0": ["--rollout.max_staleness", "0", "--rollout.window", "1"],
    # The paper's baseline: one pool for both phases, each of them on both cores.
    "colocated": [
        "--rollout.max_staleness", "0", "--rollout.window", "1", "--cluster.placement", "colocated",
        "--generator.replicas", "2", "--trainer.threads", "2",
    ],
}  # fmt: skip


def run(mode: str, seed: int, steps: int, output: Path) -> dict[str, Any]:
    """One training run; its figures."""
    name = f"{mode}-{seed}"
    command = [
        sys.executable, "-m", "llamarl", "train", str(ROOT / "configs/demo.toml"), "--name", name, "--output",
        str(output), "--seed", str(seed), "--steps", str(steps), "--eval.every_steps", "0", "--screen.kind", "lines",
        "--checkpoint.every_steps", "0", *MODES[mode],
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=1200)
    summary = json.loads((output / name / "summary.json").read_text())
    rows = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    step_s = [row["step_s"] for row in rows if row["kind"] == "step"]
    busy = {key.removeprefix("busy_share."): value for key, value in summary.items() if key.startswith("busy_share.")}
    generators = [share for key, share in busy.items() if key.startswith("generator")]
    return {
        "mode": mode,
        "seed": seed,
        "step_s_median": statistics.median(step_s),
        "step_s_mean": statistics.mean(step_s),
        "wall_s": summary["wall_s"],
        "samples_per_s": summary["samples_per_s"],
        "trainer_idle_share": 1 - busy["trainer"],
        "generator_idle_share": 1 - statistics.mean(generators),
        "unaccounted_share": summary["unaccounted_share"],
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "staleness_max": summary["staleness_max"],
        "first_step_s": summary["extra.first_step_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for mode in MODES:
                rows.append(run(mode, seed, options.steps, Path(folder)))
                print(json.dumps(rows[-1]), flush=True)

    def median(mode: str, key: str) -> float:
        return statistics.median(row[key] for row in rows if row["mode"] == mode)

    keys = [key for key in rows[0] if key not in ("mode", "seed")]
    medians = {mode: {key: median(mode, key) for key in keys} for mode in MODES}
    paired = {
        f"speedup_vs_{other}": statistics.median(
            row["samples_per_s"] / base["samples_per_s"]
            for row in rows
            for base in rows
            if row["mode"] == "max_staleness_1" and base["mode"] == other and base["seed"] == row["seed"]
        )
        for other in MODES
        if other != "max_staleness_1"
    }
    notes = [
        "speedup_vs_MODE: samples/s of max_staleness 1 over MODE, median of the ratios of runs with the same seed.",
        "The base model is cached; accuracy is greedy on 256 held-out problems before and after the steps.",
    ]
    figures = {**paired, "medians": medians, "rows": rows}
    print(write_result("asynchrony", vars(options) | {"modes": MODES}, figures, notes))


if __name__ == "__main__":
    main()
