"""Pictures of plans. `matplotlib` is the extra `plot`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarl.config import ConfigError
from llamarl.forecast.hardware import Pool
from llamarl.forecast.request import ASYNCHRONOUS, Request
from llamarl.forecast.solver import fastest_phases, solve

SHARES = 24
"""Points of a split sweep."""


def new_figure() -> tuple[Any, Any]:
    """A figure with one pair of axes. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib; install it with pip install 'llamarl[plot]'") from None
    figure = Figure(figsize=(6.4, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def split_sweep(request: Request, staleness: int) -> list[tuple[float, float, float, float]]:
    """(trainer's share of the GPUs, step, trainer and generators at their fastest, in seconds), the pool cut in two."""
    pool = request.pools[0]
    points = []
    for index in range(1, SHARES):
        count = round(pool.count * index / SHARES)
        if not 0 < count < pool.count:
            continue
        halves = (Pool(gpu=pool.gpu, count=count), Pool(gpu=pool.gpu, count=pool.count - count))
        plan = solve(request, halves, ASYNCHRONOUS, staleness)
        phases = fastest_phases(request, halves, staleness)
        if plan and phases:
            points.append((count / pool.count, plan.step_s, *phases))
    return points


def split_plot(path: Path, request: Request, staleness: int) -> None:
    """Step time against the trainer's share. Raises ConfigError: no split fits."""
    points = split_sweep(request, staleness)
    if not points:
        raise ConfigError("no split of the GPUs fits trainer and generators; there is nothing to plot")
    figure, axes = new_figure()
    shares = [point[0] for point in points]
    for column, (name, style) in enumerate((("step", "k-"), ("trainer", "C0--"), ("generators", "C1--")), start=1):
        axes.plot(shares, [point[column] for point in points], style, label=name)
    axes.set(xlabel="trainer's share of the GPUs", ylabel="seconds per step", yscale="log")
    axes.set_title(f"{request.model.name}, {request.pools[0].count} x {request.pools[0].gpu.name}")
    axes.legend()
    figure.savefig(path)


def staleness_plot(path: Path, request: Request) -> None:
    """Samples per second against staleness, 1 to `max_staleness`. Raises ConfigError: nothing fits."""
    pool = request.pools[0]
    plans = [solve(request, (pool, pool), ASYNCHRONOUS, bound) for bound in range(1, request.max_staleness + 1)]
    points = [(plan.staleness, plan.samples_per_s) for plan in plans if plan]
    if not points:
        raise ConfigError("trainer and generators do not fit on GPUs of their own; there is nothing to plot")
    figure, axes = new_figure()
    axes.plot([bound for bound, _ in points], [rate for _, rate in points], "o-")
    axes.set(xlabel="staleness bound S, optimizer steps", ylabel="samples per second")
    axes.set_ylim(bottom=0)
    axes.set_xticks([bound for bound, _ in points])
    axes.set_title(f"{request.model.name}, {pool.count} x {pool.gpu.name}")
    figure.savefig(path)


def plot_request(folder: Path, request: Request, staleness: int) -> list[Path]:
    """Split sweep and staleness of one request as PNG files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    split, bound = folder / "split.png", folder / "staleness.png"
    split_plot(split, replace(request, pools=request.pools[:1]), staleness)
    staleness_plot(bound, request)
    return [split, bound]
