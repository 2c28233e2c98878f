"""Plans and simulations as pictures. PNGs need `matplotlib`, the extra `plot`; the HTML page needs nothing."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.config import ConfigError
from llamarl.observability.files import write_atomically
from llamarl.observability.spans import Span
from llamarl.parts.forecast.hardware import Pool
from llamarl.parts.forecast.report import render_simulation
from llamarl.parts.forecast.request import ASYNCHRONOUS, Request
from llamarl.parts.forecast.simulator.result import Simulation
from llamarl.parts.forecast.solver import fastest_phases, solve

SHARES = 24
"""Points of a split sweep."""
COLORS = {
    "generate": "#4c78a8",
    "score": "#54a24b",
    "train": "#f58518",
    "weight_sync": "#e45756",
    "checkpoint": "#b279a2",
}
NUM_GENERATORS, NUM_STEPS = 12, 8
"""Generators and steps that a timeline shows; the steps are from the middle of the run."""
TRACE_GENERATORS = 64
"""Generators in the trace: a viewer cannot hold thousands."""


def new_figure(width: float = 6.4, height: float = 4.2) -> Any:
    """An empty figure, sizes in inches. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib; install it with pip install 'llamarl[plot]'") from None
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def plot_request(folder: Path, request: Request, staleness: int) -> list[Path]:
    """Split sweep and staleness of one request as PNG files in `folder`. Raises ConfigError: nothing fits."""
    pool = request.pools[0]
    plans = [solve(request, (pool, pool), ASYNCHRONOUS, bound) for bound in range(1, request.max_staleness + 1)]
    rates = {plan.staleness: plan.samples_per_s for plan in plans if plan}
    sweep = split_sweep(request, staleness)
    if not rates or not sweep:
        raise ConfigError("no split of the GPUs fits trainer and generators; there is nothing to plot")
    folder.mkdir(parents=True, exist_ok=True)
    figures = {folder / f"{name}.png": new_figure() for name in ("split", "staleness")}
    title = f"{request.model.name}, {pool.count} x {pool.gpu.name}"
    times, speed = (figure.add_subplot(title=title) for figure in figures.values())
    for column, (name, style) in enumerate((("step", "k-"), ("trainer", "C0--"), ("generators", "C1--")), start=1):
        times.plot([point[0] for point in sweep], [point[column] for point in sweep], style, label=name)
    times.set(xlabel="trainer's share of the GPUs", ylabel="seconds per step", yscale="log")
    times.legend()
    speed.plot(list(rates), list(rates.values()), "o-")
    speed.set(xlabel="staleness bound S, optimizer steps", ylabel="samples per second", xticks=list(rates))
    speed.set_ylim(bottom=0)
    for path, figure in figures.items():
        figure.axes[0].grid(visible=True, alpha=0.3)
        figure.savefig(path)
    return list(figures)


def split_sweep(request: Request, staleness: int) -> list[tuple[float, float, float, float]]:
    """(trainer's share of the GPUs, step, trainer and generators at their fastest, in seconds), the pool cut in two."""
    pool, points = request.pools[0], []
    for count in sorted({round(pool.count * index / SHARES) for index in range(1, SHARES)} - {0, pool.count}):
        halves = (Pool(gpu=pool.gpu, count=count), Pool(gpu=pool.gpu, count=pool.count - count))
        plan, phases = solve(request, halves, ASYNCHRONOUS, staleness), fastest_phases(request, halves, staleness)
        if plan and phases:
            points.append((count / pool.count, plan.step_s, *phases))
    return points


def chosen(spans: Mapping[str, list[Span]], num_generators: int) -> dict[str, list[Span]]:
    """Trainer, reward and some of the generators that did something, evenly spread, the first and the last included."""
    generators = [name for name, work in spans.items() if name.startswith("generator-") and work]
    places = np.linspace(0, len(generators) - 1, min(num_generators, len(generators))).astype(int)
    return {name: list(spans[name]) for name in ("trainer", "reward", *(generators[place] for place in places))}


def _timeline(simulation: Simulation) -> tuple[dict[str, list[Span]], float, str]:
    """Work of some steps by executor, in seconds from their start; how long they took; which they are."""
    start_s, stop_s = simulation.loop_s
    ends_s = [start_s + step.wall_s for step in simulation.steps]
    first = max(0, (len(ends_s) - NUM_STEPS) // 2)
    last = min(first + NUM_STEPS, len(ends_s))
    if len(ends_s) > 1:
        start_s, stop_s = ends_s[first - 1] if first else start_s, ends_s[last - 1]
    clipped = {
        name: [
            Span(span.name, max(span.start_s, start_s) - start_s, min(span.end_s, stop_s) - start_s)
            for span in spans
            if span.end_s > start_s and span.start_s < stop_s
        ]
        for name, spans in simulation.spans.items()
    }
    split = simulation.split
    title = f"{split.gpus:,} GPUs: trainer {split.trainer_gpus:,}, {split.replicas:,} generators of "
    title += f"{split.generator_gpus}. Steps {first + 1} to {last} of {len(ends_s)}, white is waiting"
    return chosen(clipped, NUM_GENERATORS), stop_s - start_s, title


def write_html(path: Path, simulation: Simulation) -> None:
    """Summary and timeline as one page without scripts. Raises OSError."""
    rows, length_s, title = _timeline(simulation)
    scale, parts = 1060 / max(length_s, 1e-9), []
    for row, (name, spans) in enumerate(rows.items()):
        parts.append(f'<text x="122" y="{row * 22 + 15}" text-anchor="end">{html.escape(name)}</text>')
        parts += [
            f'<rect x="{130 + span.start_s * scale:.1f}" y="{row * 22 + 3}" height="16" '
            f'width="{max((span.end_s - span.start_s) * scale, 0.5):.1f}" fill="{COLORS[span.name]}">'
            f"<title>{span.name} {span.end_s - span.start_s:.2f} s</title></rect>"
            for span in spans
        ]
    legend = " ".join(f'<span style="color:{color}">■</span> {kind}' for kind, color in COLORS.items())
    page = (
        '<!doctype html><meta charset="utf-8"><title>llamarl simulate</title>'
        "<style>body{font:14px system-ui;margin:24px}svg{font:12px system-ui}</style>"
        f"<pre>{html.escape(render_simulation(simulation))}</pre><p>{title}: {length_s:.1f} s. {legend}</p>"
        f'<svg width="1200" height="{len(rows) * 22 + 6}">{"".join(parts)}</svg>\n'
    )
    write_atomically(path, page)


def write_png(path: Path, simulation: Simulation) -> None:
    """Timeline, step times and staleness. Raises ConfigError without matplotlib or where it cannot be written."""
    rows, length_s, title = _timeline(simulation)
    figure = new_figure(12, 4 + 0.28 * len(rows))
    places = figure.add_gridspec(2, 2, height_ratios=(0.4 + 0.28 * len(rows), 2))
    axes = figure.add_subplot(places[0, :])
    for row, spans in enumerate(rows.values()):
        for kind, color in COLORS.items():
            bars = [(span.start_s, span.end_s - span.start_s) for span in spans if span.name == kind]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, label=None if row else kind)
    axes.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel="virtual seconds", xlim=(0, max(length_s, 1e-9)))
    axes.invert_yaxis()
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
    axes.legend(ncols=len(COLORS), loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0.2)
    axes = figure.add_subplot(places[1, 0], title="Step times", xlabel="seconds per step", ylabel="steps")
    axes.hist(simulation.step_s, bins=30, color=COLORS["train"])
    bound = simulation.staleness_bound
    title = f"Staleness, proved to be at most {bound} (dashed)"
    axes = figure.add_subplot(places[1, 1], title=title, xlabel="optimizer steps", ylabel="rollouts")
    axes.bar(list(simulation.staleness), list(simulation.staleness.values()), color=COLORS["generate"])
    axes.axvline(bound + 0.5, color=COLORS["weight_sync"], linestyle="--")
    axes.set_xticks(range(bound + 1))
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw {path}: {error}; give a path that ends in .png") from None
