"""How fast is the demo, beside the same demo of another checkout of this repository?

    python benchmarks/loop.py --base FOLDER [--seeds 3] [--steps 200] [--avx2]

Runs of one seed take turns, each in the checkout it is of, with the same base model and settings; who is first changes
with each seed. Speed is samples trained per second from the fifth step's end to the last one's: processes start and
kernels are compiled before. Accuracy is that of the final weights, greedily, on 4,096 problems that nobody trained on.
Measure on a machine that does nothing else. With `--avx2` both take what a processor without AVX-512 has, in their own
kernels and in libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import write_result

ROOT = Path(__file__).parents[1]
SKIPPED_STEPS = 5
FRESH = "{name = 'running_total', count = 4096, first = 91000}"
MODEL = "runs/base/demo"
AVX2 = {
    "LLAMARL_KERNELS": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}  # fmt: skip
"""Variables that hold llamarl, MKL, oneDNN and torch to those instructions."""
NOTES = [
    "samples_per_s: rollouts trained per second, from the fifth step's end to the last one's.",
    "ratio: this tree's samples per second over the other's of the same seed.",
    "gap_points: accuracy after training on fresh problems less the other's, percent of them.",
]


def run(tree: Path, seed: int, steps: int, output: Path, variables: dict[str, str]) -> dict[str, float]:
    """One run's speed and accuracy, with these variables set."""
    command = [
        sys.executable, "-m", "llamarl", "train", "configs/demo.toml", "--output", str(output), "--seed", str(seed),
        "--steps", str(steps), "--eval.every_steps", "0", "--eval.max_prompts", "4096", "--data.eval", FRESH,
        "--checkpoint.every_steps", "0",
    ]  # fmt: skip
    environment = os.environ | variables | {"PYTHONPATH": str(tree)}
    subprocess.run(command, check=True, cwd=tree, env=environment, stdout=subprocess.DEVNULL, timeout=1800)
    rows = [json.loads(line) for line in (output / "demo/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "step"]
    samples = json.loads((output / "demo/summary.json").read_text())
    seconds = rows[-1]["wall_s"] - rows[SKIPPED_STEPS - 1]["wall_s"]
    return {
        "samples_per_s": round((len(rows) - SKIPPED_STEPS) * rollouts_of(rows) / seconds, 1),
        "calls": round(statistics.mean(row["extra.calls"] for row in rows), 2),
        "controller_cpu_s": round(statistics.mean(row["extra.controller_cpu_s"] for row in rows), 4),
        "accuracy_after": samples["accuracy_after"],
    }


def rollouts_of(rows: list[dict[str, Any]]) -> float:
    """Rollouts of a step, as the first one tells."""
    return round(rows[0]["samples_per_s"] * rows[0]["step_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="another checkout of this repository")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--avx2", action="store_true", help="no AVX-512, though the processor has it")
    asked = parser.parse_args()
    trees = {"base": asked.base.resolve(), "ours": ROOT}
    if not (ROOT / MODEL).exists():
        parser.error(f"{ROOT / MODEL} is missing: `llamarl train configs/demo.toml --steps 1` makes it")
    shutil.copytree(ROOT / MODEL, trees["base"] / MODEL, dirs_exist_ok=True)
    commits = {
        name: subprocess.run(
            ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name, tree in trees.items()
    }
    found = dict[str, list[dict[str, float]]](base=[], ours=[])
    for seed in range(asked.seeds):
        for name in list(trees)[:: -1 if seed % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                variables = AVX2 if asked.avx2 else {}
                found[name].append(run(trees[name], seed, asked.steps, Path(folder), variables))
            print(seed, name, found[name][-1], flush=True)
    ratios, gaps = (
        [round(of(ours, base), 3) for ours, base in zip(found["ours"], found["base"], strict=True)]
        for of in (
            lambda ours, base: ours["samples_per_s"] / base["samples_per_s"],
            lambda ours, base: 100 * (ours["accuracy_after"] - base["accuracy_after"]),
        )
    )
    figures = {
        "commits": commits, "ratio": ratios, "median_ratio": statistics.median(ratios), "gap_points": gaps,
        "mean_gap_points": round(statistics.mean(gaps), 2), "runs": found,
    }  # fmt: skip
    print(ratios, gaps)
    settings = {"steps": asked.steps, "seeds": asked.seeds, "skipped_steps": SKIPPED_STEPS, "avx2": asked.avx2}
    print(write_result("loop-avx2" if asked.avx2 else "loop", settings, figures, NOTES))


if __name__ == "__main__":
    main()
