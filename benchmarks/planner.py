"""The published step times against this model, and how fast the planner answers.

    python benchmarks/planner.py --date 2026-11-21

writes `benchmarks/results/planner-DATE.json`; with `--plots FOLDER` also the picture of speed-up against model size,
which needs the extra `dev`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from _paper import (
    MAX_STALENESS,
    PAPER_ROWS,
    PAPER_WORKLOAD,
    Workload,
    calibrate,
    decompose,
    paper_request,
    peer_errors,
    predict,
)

from llamarl.parts.forecast.constants import Constants
from llamarl.parts.forecast.request import ASYNCHRONOUS, BASELINE
from llamarl.parts.forecast.solver import synchronous_plan

RESULTS = Path(__file__).parent / "results"
SIZES = {"llama3-8b": "8b", "llama3-70b": "70b", "llama3-405b": "405b"}
PLAN = ["--model", "llama3-405b", "--gpu", "h100-80g", "--rollout.max_new_tokens", "4096", "--gpus"]
OTHER_WORKLOADS = (
    replace(PAPER_WORKLOAD, mean_response_tokens=500),
    replace(PAPER_WORKLOAD, mean_response_tokens=1800),
    replace(PAPER_WORKLOAD, sigma=0.4),
    replace(PAPER_WORKLOAD, prompts_per_step=128),
)
NOTES = """\
paper_error is predicted / published - 1 of the asynchronous step time. Calibrated on the two 8B rows: step_overhead_s
and decode_overhead_s; the 70B and 405B rows are predictions.
The paper's batch and lengths could not be looked up: the workload is an assumption, the same for all rows, and
`sensitivity` repeats calibration and prediction under others. 256 GPUs for the 70B row is an assumption too.
A first choice of constants, train_efficiency with decode_overhead_s, met the 8B rows only at 7 % of peak and missed the
70B asynchronous row by +287 % and the 405B one by +96 %; it was given up for that reason, so the choice of constants,
though not their values, has seen the other rows.
peer_error is for NeMo RL, whose workload is published, with default constants; what fits in no layout is left out.
"""


def _speedup_plot(path: Path, series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Speed-up over synchronous against model size.

    Args:
        series: name -> points (parameters in billions, speed-up).
    """
    from matplotlib.figure import Figure  # the one picture here, of those who ask for it

    figure = Figure(figsize=(6.4, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(visible=True, alpha=0.3)
    for name, points in series.items():
        axes.plot([size for size, _ in points], [gain for _, gain in points], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="parameters, billions", ylabel="synchronous / asynchronous step time")
    sizes = sorted({size for points in series.values() for size, _ in points})
    axes.set_xticks(sizes, [f"{size:.0f}" for size in sizes], minor=False)
    axes.set_xticks([], minor=True)
    ticks = (1, 2, 3, 5, 10)
    axes.set_yticks(ticks, [f"{tick}x" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.legend()
    axes.set_title("Speed-up of asynchronous training")
    figure.savefig(path)


def main() -> None:
    """Runs everything and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat())
    parser.add_argument("--plots", type=Path)
    options = parser.parse_args()
    constants = calibrate()
    rows = _rows(constants, PAPER_WORKLOAD)
    result = {
        "date": options.date,
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}, {_cores()} cores",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "command": " ".join(["python", *sys.argv]),
        "settings": {
            "workload": asdict(PAPER_WORKLOAD),
            "max_staleness": MAX_STALENESS,
            "gpu": "h100-80g",
            "constants": asdict(constants),
        },
        "paper_error": {SIZES[name]: row["asynchronous_error"] for name, row in rows.items() if name != "llama3-8b"},
        "paper_error_synchronous": {
            SIZES[name]: row["synchronous_error"] for name, row in rows.items() if name != "llama3-8b"
        },
        "rows": rows,
        "sensitivity": [_sensitivity(workload) for workload in OTHER_WORKLOADS],
        "peer_error": peer_errors(Constants()),
        "own_machine": _own_machine(),
        "plan_wall_s": {str(gpus): _plan_wall_s(gpus) for gpus in (1024, 16_384)},
        "notes": NOTES.splitlines(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"planner-{options.date}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        _speedup_plot(options.plots / "speedup.png", _series(rows))


def _own_machine() -> dict[str, Any] | None:
    """What the newest run of `benchmarks/prediction.py` found; None before the first."""
    newest = max(RESULTS.glob("prediction-*.json"), default=None)
    if newest is None:
        return None
    found = json.loads(newest.read_text(encoding="utf-8"))["own_machine"]
    return {"median_error": found["median_error"], "source": newest.name}


def _rows(constants: Constants, workload: Workload) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for row in PAPER_ROWS:
        request = paper_request(row, constants, workload)
        baseline, asynchronous = predict(request, BASELINE), predict(request, ASYNCHRONOUS)
        best = synchronous_plan(request)
        rows[row.model] = {
            "gpus": row.gpus,
            "parameters": request.model.num_parameters,
            "published_synchronous_s": row.synchronous_s,
            "predicted_synchronous_s": baseline.step_s,
            "synchronous_error": baseline.step_s / row.synchronous_s - 1,
            "published_asynchronous_s": row.asynchronous_s,
            "predicted_asynchronous_s": asynchronous.step_s,
            "asynchronous_error": asynchronous.step_s / row.asynchronous_s - 1,
            "predicted_best_synchronous_s": best.step_s if best else None,
            "speedup_parts": decompose(request),
        }
    return rows


def _sensitivity(workload: Workload) -> dict[str, Any]:
    try:
        constants = calibrate(workload)
    except ValueError as error:
        return {"workload": asdict(workload), "error": str(error)}
    rows = _rows(constants, workload)
    return {
        "workload": asdict(workload),
        "step_overhead_s": constants.step_overhead_s,
        "decode_overhead_s": constants.decode_overhead_s,
        "asynchronous_error": {SIZES[name]: row["asynchronous_error"] for name, row in rows.items()},
        "synchronous_error": {SIZES[name]: row["synchronous_error"] for name, row in rows.items()},
    }


def _series(rows: dict[str, dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    def points(kind: str) -> list[tuple[float, float]]:
        return [
            (row["parameters"] / 1e9, row[f"{kind}_synchronous_s"] / row[f"{kind}_asynchronous_s"])
            for row in rows.values()
        ]

    best = [
        (row["parameters"] / 1e9, row["predicted_best_synchronous_s"] / row["predicted_asynchronous_s"])
        for row in rows.values()
    ]
    return {
        "published": points("published"),
        "predicted, over the shared baseline": points("predicted"),
        "predicted, over the best synchronous plan": best,
    }


def _plan_wall_s(gpus: int) -> float:
    """Wall seconds of the command, start of Python included; the best of three."""
    times = []
    for _ in range(3):
        start_s = time.perf_counter()
        subprocess.run([sys.executable, "-m", "llamarl", "plan", *PLAN, str(gpus)], check=True, capture_output=True)
        times.append(time.perf_counter() - start_s)
    return min(times)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
