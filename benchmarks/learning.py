"""Do asynchronous runs learn what synchronous ones learn? Paired by seed, judged on fresh problems.

    python benchmarks/learning.py [--more RESULT] [--minutes 170] [--ways "S=2" "S=4"] [--tasks calculator]

Fixed before the first run: the demo for 60 steps, and its final weights judged greedily on 4,096 problems that nobody
trained on; 20 seeds with `rollout.max_staleness` 0 and 1, ten with 2 and 4; at 1, ten seeds each with segments, with
caches that are computed again for new weights, and with int8 generators; three seeds of the calculator (200 steps,
1,024 problems) at 0 and 1. A pair is two runs of the same seed, which means the same prompts, of which the first has
staleness 0. **Equal** means that the interval of 95 % (Student's t) of the mean paired difference in accuracy lies
within 2 points either way; an interval that reaches beyond is not equal, wherever its middle is.

`--why` looks for what holds staleness 4 back: half as many steps, three seeds, with another cap of the importance
ratio, a narrower window, a lower learning rate, and less momentum of the optimizer, as gradients that come late act
like more of it (Mitliagkas et al., "Asynchrony begets Momentum", arXiv 1605.09774); then ten whole pairs of what has
helped. It was not fixed in advance.

`--early` compares on the way instead of on the plateau, fixed before its first run: the demo for 30 steps, judged on
4,096 fresh problems, ten seeds with staleness 0, 1 and 2; and the real model (`examples/real/svamp.toml`; make it with
`examples/real/make_model.py`) for 40 steps, judged on 200 held-out problems, three seeds with staleness 0 and 1.
`--curves RESULT` compares the whole training curves of a result's runs.

The result is written after each run, so a stopped one goes on with `--more` of its own file. By time: the share of
sampled responses that are right, a mean of five steps, beside the seconds since the first step began.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _learning_picture import PICTURE, draw
from _record import write_result

ROOT = Path(__file__).parents[1]
REAL = ROOT / "examples/real/svamp.toml"
FRESH = "{{name = 'running_total', count = {count}, first = 91000{more}}}"
AT = {f"S={staleness}": ["--rollout.max_staleness", str(staleness)] for staleness in (0, 1, 2, 4)}
WAYS = AT | {
    "S=1 segments": [*AT["S=1"], "--rollout.segment_tokens", "16"],
    "S=1 recompute": [*AT["S=1"], "--generator.kv_on_update", "recompute"],
    "S=1 int8": [*AT["S=1"], "--generator.dtype", "int8"],
}
HALF_RATE = ["--trainer.learning_rate", "7.5e-5"]
WHY = {
    "S=0": AT["S=0"],
    "S=4": AT["S=4"],
    "S=4 rho 1": [*AT["S=4"], "--trainer.loss", "{name = 'aipo', rho = 1.0}"],
    "S=4 window 1": [*AT["S=4"], "--rollout.window", "1"],
    "S=0 half rate": [*AT["S=0"], *HALF_RATE],
    "S=4 half rate": [*AT["S=4"], *HALF_RATE],
    "S=4 beta1 0.5": [*AT["S=4"], "--trainer.beta1", "0.5"],
    "S=4 beta1 0": [*AT["S=4"], "--trainer.beta1", "0"],
    "S=0 beta1 0": [*AT["S=0"], "--trainer.beta1", "0"],
}
PLAN = [
    ("demo", ("S=0", "S=1"), 20), ("demo", ("S=0", "S=2", "S=4"), 10),
    ("demo", ("S=1 segments", "S=1 recompute", "S=1 int8"), 10), ("calculator", ("S=0", "S=1"), 3),
]  # fmt: skip
"""Task, ways that take turns, seeds."""
LOOKED_INTO = [("half demo", tuple(WHY), 3), ("demo", ("S=4 beta1 0",), 10)]
EARLY = [("early demo", ("S=0", "S=1", "S=2"), 10), ("early real", ("S=0", "S=1"), 3)]
TASKS: dict[str, tuple[int, int, str | None]] = {
    "demo": (60, 4096, ""),
    "half demo": (30, 512, ""),
    "early demo": (30, 4096, ""),
    "early real": (40, 200, None),
    "calculator": (200, 1024, ", largest_gain = 99"),
}
"""Steps, fresh problems, and what these are beside; None if the run file's own held-out problems serve."""
BAR_POINTS = 2.0
NOTES = [
    "accuracy: greedy, of the final weights, on fresh problems; points: percent of them.",
    "gap_points: mean over seeds of the accuracy less that of staleness 0 with the same seed; interval: its 95 %.",
    "equal: the whole interval lies within 2 points either way; a task's way is listed with its number of pairs.",
    "solve_rate: of sampled responses, means of five steps; seconds: from the first step's begin, beside other work.",
]  # fmt: skip


def planned(plan: list[tuple[str, tuple[str, ...], int]], only: list[str]) -> Iterator[tuple[str, str, int]]:
    """Task, way and seed of each run, in order; with `only`, of some ways and what they are compared with."""
    for task, ways, seeds in plan:
        wanted = [way for way in ways if not only or way == "S=0" or way in only]
        for seed in range(seeds if wanted != ["S=0"] else 0):
            for way in wanted:
                yield task, way, seed


def run(task: str, way: str, seed: int, output: Path) -> dict[str, Any]:
    """One run's accuracy on fresh problems, and its course."""
    (steps, count, more), name = TASKS[task], f"{task}-{way}-{seed}".replace(" ", "-").replace("=", "")
    config = REAL if task == "early real" else ROOT / f"configs/{task.rsplit(maxsplit=1)[-1]}.toml"
    fresh = [] if more is None else ["--data.eval", FRESH.format(count=count, more=more)]
    command = [
        sys.executable, "-m", "llamarl", "train", str(config), "--name", name, "--output", str(output), "--seed",
        str(seed), "--steps", str(steps), "--eval.every_steps", "0", "--eval.max_prompts", str(count), *fresh,
        "--checkpoint.every_steps", "0", "--screen.kind", "lines",
        *(WAYS | WHY)[way],
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=3600)
    summary = json.loads((output / name / "summary.json").read_text())
    lines = (output / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "step"]
    fives = [rows[first : first + 5] for first in range(0, len(rows), 5)]
    return {
        "task": task,
        "way": way,
        "seed": seed,
        **{key: summary[key] for key in ("accuracy_before", "accuracy_after", "staleness_max")},
        "staleness_mean": round(mean_of(rows, "staleness_mean"), 4),
        "kl_to_behavior": mean_of(rows, "kl_to_behavior"),
        "solve_rate": [round(mean_of(five, "solve_rate"), 4) for five in fives],
        "seconds": [round(five[-1]["wall_s"], 2) for five in fives],
        "load_average": os.getloadavg()[0],
    }


def mean_of(rows: list[dict[str, Any]], key: str) -> float:
    """Mean over the steps that tell it; one that nothing was to be learnt from does not."""
    return statistics.mean(row[key] for row in rows if row[key] is not None)


def quantile_t(freedom: int) -> float:
    """97.5 % of Student's t distribution lie below."""
    x = np.linspace(0.0, 20.0, 400_001)
    density = (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    below = np.cumsum(density[1:] + density[:-1]) * scale * (x[1] - x[0]) / 2
    return float(x[1:][np.searchsorted(below, 0.475)])


def compared(runs: list[dict[str, Any]], key: str = "accuracy_after") -> dict[str, dict[str, Any]]:
    """The paired difference to staleness 0 of each task's ways, in points."""
    by = {(one["task"], one["way"], one["seed"]): 100 * one[key] for one in runs}
    found = dict[str, dict[str, Any]]()
    for task, way in dict.fromkeys((one["task"], one["way"]) for one in runs if one["way"] != "S=0"):
        gaps = [by[task, way, seed] - by[task, "S=0", seed] for t, w, seed in by if (t, w) == (task, way)
                if (task, "S=0", seed) in by]  # fmt: skip
        if len(gaps) < 2:
            continue
        mean, half = statistics.mean(gaps), quantile_t(len(gaps) - 1) * statistics.stdev(gaps) / math.sqrt(len(gaps))
        found[f"{task} {way}"] = {
            "seeds": len(gaps),
            "gap_points": round(mean, 3),
            "interval": [round(mean - half, 3), round(mean + half, 3)],
            "equal": abs(mean) + half <= BAR_POINTS,
        }
    return found


def by_time(runs: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Mean course of each task's ways over seeds."""
    found = dict[str, dict[str, list[float]]]()
    for task, way in dict.fromkeys((one["task"], one["way"]) for one in runs):
        own = [one for one in runs if (one["task"], one["way"]) == (task, way)]
        found[f"{task} {way}"] = {
            key: [round(statistics.median(one[key][place] for one in own), 4) for place in range(len(own[0][key]))]
            for key in ("solve_rate", "seconds")
        }
    return found


def curve_gaps(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the difference to staleness 0 over the whole training curve, in points, less the lag of the measure.

    Rollouts of a run with staleness d show weights that are d steps old, so they are compared with the synchronous
    curve d steps earlier.
    """
    by = {(one["way"], one["seed"]): one for one in runs if one["task"] == "demo"}
    found = dict[str, dict[str, Any]]()
    for way in dict.fromkeys(way for way, _ in by if way != "S=0"):
        gaps = list[float]()
        for seed in (seed for other, seed in by if other == way and ("S=0", seed) in by):
            late, synchronous = by[way, seed], np.array(by["S=0", seed]["solve_rate"])
            steps = 5 * np.arange(len(synchronous)) + 2
            expected = np.interp(steps - late["staleness_mean"], steps, synchronous)
            gaps.append(100 * float((np.array(late["solve_rate"]) - expected)[1:].mean()))
        if len(gaps) > 1:
            half = quantile_t(len(gaps) - 1) * statistics.stdev(gaps) / math.sqrt(len(gaps))
            means = {"gap_points": round(statistics.mean(gaps), 2), "half": round(half, 2)}
            found[way] = {"pairs": len(gaps), "below": sum(gap < 0 for gap in gaps)} | means
    return found


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the result holds."""
    pairs = compared(runs)
    of = {key: {way: one[key] for way, one in pairs.items()} for key in ("seeds", "gap_points", "interval", "equal")}
    return of | {"by_time": by_time(runs), "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--more", type=Path, help="a result whose runs are taken over")
    parser.add_argument(
        "--why", action="store_true", help="the runs that look for what holds staleness 4 back, instead"
    )
    parser.add_argument(
        "--ways", nargs="+", default=[], help="of the planned runs only these, and what they are compared with"
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="of the planned runs only these")
    parser.add_argument("--early", action="store_true", help="the runs that compare on the way, instead")
    parser.add_argument("--curves", type=Path, help="compare the training curves of this result, and run nothing")
    parser.add_argument("--picture", action="store_true", help="draw docs/pictures/learning.svg, too")
    parser.add_argument("--minutes", type=float, default=170.0, help="no run begins later")
    options = parser.parse_args()
    if options.curves:
        print(json.dumps(curve_gaps(json.loads(options.curves.read_text(encoding="utf-8"))["runs"]), indent=2))
        return
    runs: list[dict[str, Any]] = json.loads(options.more.read_text(encoding="utf-8"))["runs"] if options.more else []
    known, end = {(one["task"], one["way"], one["seed"]) for one in runs}, time.monotonic() + 60 * options.minutes
    settings = {"ways": WAYS | WHY, "plan": PLAN, "looked_into": LOOKED_INTO, "tasks": TASKS, "bar_points": BAR_POINTS}
    name = "learning-early" if options.early else "learning"
    with tempfile.TemporaryDirectory() as folder:
        for task, way, seed in planned(EARLY if options.early else LOOKED_INTO if options.why else PLAN, options.ways):
            if (task, way, seed) in known or task not in options.tasks or time.monotonic() > end:
                continue
            known.add((task, way, seed))
            runs.append(run(task, way, seed, Path(folder)))
            print(json.dumps({key: runs[-1][key] for key in ("task", "way", "seed", "accuracy_after")}), flush=True)
            write_result(name, settings, figures(runs), NOTES)
    print(json.dumps(compared(runs), indent=2))
    print(write_result(name, settings, figures(runs), NOTES))
    if options.picture:
        PICTURE.write_text(draw(figures(runs)), encoding="utf-8")


if __name__ == "__main__":
    main()
