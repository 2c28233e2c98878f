"""On-policy distillation against reinforcement learning on the demo: steps and seconds until the teacher's accuracy.

    python benchmarks/distillation.py [--seeds 3] [--more RESULT]

Fixed before the first run: the teacher is the demo after 120 steps with seed 100. Each seed trains the demo's base
model twice for 48 steps, with the reward and with the teacher alone, and evaluates greedily on 256 held-out problems
every four steps. A run is there at the first evaluation within 3 points of the teacher. The result is written after
each seed, so a stopped script continues with `--more` of its own file.
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
STEPS, EVERY, TEACHER_STEPS, TEACHER_SEED, GAP_POINTS = 48, 4, 120, 100, 3.0
NOTES = [
    "accuracy: greedy, of 256 held-out problems.  distill_gap: points below the teacher after 48 steps, median.",
    "steps_to: first evaluation within 3 points of the teacher; the number of steps if there is none.",
    "distill_steps_ratio: median over seeds of the steps of distillation over those with the reward.",
    "distill_seconds_ratio: the same of seconds since the first step, evaluations included.",
]


def llamarl(*arguments: object) -> None:
    command = [sys.executable, "-m", "llamarl", *map(str, arguments)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=3600)


def train(output: Path, name: str, seed: int, steps: int, *options: object) -> dict[str, Any]:
    """Returns the course of a run of the demo."""
    llamarl(
        "train", "configs/demo.toml", "--name", name, "--output", output, "--seed", seed, "--steps", steps,
        "--eval.every_steps", EVERY, "--checkpoint.every_steps", 0, "--screen.kind", "lines", *options,
    )  # fmt: skip
    rows = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    walls = {row["step"]: row["wall_s"] for row in rows if row["kind"] == "step"}
    accuracy = {row["step"]: row["accuracy"] for row in rows if row["kind"] == "eval"}
    return {"accuracy": accuracy, "seconds": {step: round(walls[step], 2) for step in accuracy if step in walls}}


def reached(run: dict[str, Any], goal: float) -> tuple[int, float]:
    """Returns step and seconds of the first evaluation with an accuracy of `goal`, else the last."""
    found = [int(step) for step, accuracy in run["accuracy"].items() if accuracy >= goal and int(step)]
    step = min(found, default=STEPS)
    return step, next(seconds for at, seconds in run["seconds"].items() if int(at) >= step)


def figures(runs: list[dict[str, Any]], teacher: float) -> dict[str, Any]:
    for one in runs:
        one["steps_to"], one["seconds_to"] = reached(one, teacher - GAP_POINTS / 100)
    ways = {way: [one for one in runs if one["way"] == way] for way in ("reward", "teacher")}
    pairs = list(zip(ways["teacher"], ways["reward"], strict=True))
    last = [100 * (teacher - list(one["accuracy"].values())[-1]) for one in ways["teacher"]]
    return {
        "teacher_accuracy": teacher,
        "distill_gap": round(statistics.median(last), 2),
        "distill_steps_ratio": statistics.median(ours["steps_to"] / theirs["steps_to"] for ours, theirs in pairs),
        "distill_seconds_ratio": statistics.median(ours["seconds_to"] / theirs["seconds_to"] for ours, theirs in pairs),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--more", type=Path, help="a result whose runs are taken over")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = json.loads(options.more.read_text(encoding="utf-8"))["runs"] if options.more else []
    settings = {"steps": STEPS, "teacher_steps": TEACHER_STEPS, "teacher_seed": TEACHER_SEED, "gap_points": GAP_POINTS}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        course = train(output, "teacher", TEACHER_SEED, TEACHER_STEPS, "--eval.every_steps", TEACHER_STEPS)
        llamarl("export", output / "teacher", output / "model")
        for seed in range(len(runs) // 2, options.seeds):
            for way in ("reward", "teacher"):
                taught = ("--recipe", "distillation", "--reference.path", output / "model") if way == "teacher" else ()
                runs.append({"way": way, "seed": seed} | train(output, f"{way}-{seed}", seed, STEPS, *taught))
            found = figures(runs, list(course["accuracy"].values())[-1])
            print(json.dumps({key: value for key, value in found.items() if key != "runs"}), flush=True)
            write_result("distillation", settings, found, NOTES)


if __name__ == "__main__":
    main()
