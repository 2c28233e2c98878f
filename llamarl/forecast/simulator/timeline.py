"""Who worked when, as a picture: an HTML page that needs nothing, and a PNG that needs matplotlib."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llamarl.config import ConfigError
from llamarl.forecast.simulator.report import render
from llamarl.forecast.simulator.result import Simulation
from llamarl.observability.files import write_atomically
from llamarl.observability.spans import Span

COLORS = {
    "generate": "#4c78a8",
    "score": "#54a24b",
    "train": "#f58518",
    "weight_sync": "#e45756",
    "checkpoint": "#b279a2",
}
NUM_GENERATORS = 12
"""Generators that a picture shows."""
NUM_STEPS = 8
"""Steps that a picture shows, from the middle of the run."""
TRACE_GENERATORS = 64
"""Generators in the trace: a viewer cannot hold thousands."""


def chosen(spans: Mapping[str, list[Span]], num_generators: int) -> dict[str, list[Span]]:
    """Trainer, reward and some of the generators that did something, evenly spread, the first and the last included."""
    generators = [name for name, work in spans.items() if name.startswith("generator-") and work]
    places = np.linspace(0, len(generators) - 1, min(num_generators, len(generators))).astype(int)
    return {name: list(spans[name]) for name in ("trainer", "reward", *(generators[place] for place in places))}


def _window(simulation: Simulation) -> tuple[float, float]:
    """Virtual seconds that a picture shows."""
    ends_s = [simulation.loop_s[0] + step.wall_s for step in simulation.steps]
    if len(ends_s) < 2:
        return simulation.loop_s
    first = max(0, (len(ends_s) - NUM_STEPS) // 2)
    return (ends_s[first - 1] if first else simulation.loop_s[0]), ends_s[min(first + NUM_STEPS, len(ends_s)) - 1]


def _rows(simulation: Simulation, start_s: float, end_s: float) -> dict[str, list[Span]]:
    """What lies in the window, in seconds from its start."""
    clipped = {
        name: [
            Span(span.name, max(span.start_s, start_s) - start_s, min(span.end_s, end_s) - start_s)
            for span in spans
            if span.end_s > start_s and span.start_s < end_s
        ]
        for name, spans in simulation.spans.items()
    }
    return chosen(clipped, NUM_GENERATORS)


def write_html(path: Path, simulation: Simulation) -> None:
    """Summary and timeline as one page without scripts. Raises OSError."""
    start_s, end_s = _window(simulation)
    rows = _rows(simulation, start_s, end_s)
    width, height, left = 1200, 22, 130
    scale = (width - left - 10) / max(end_s - start_s, 1e-9)
    parts = []
    for row, (name, spans) in enumerate(rows.items()):
        parts.append(f'<text x="{left - 8}" y="{row * height + 15}" text-anchor="end">{html.escape(name)}</text>')
        parts += [
            f'<rect x="{left + span.start_s * scale:.1f}" y="{row * height + 3}" height="{height - 6}" '
            f'width="{max((span.end_s - span.start_s) * scale, 0.5):.1f}" fill="{COLORS[span.name]}">'
            f"<title>{span.name} {span.end_s - span.start_s:.2f} s</title></rect>"
            for span in spans
        ]
    legend = " ".join(f'<span style="color:{color}">■</span> {kind}' for kind, color in COLORS.items())
    page = (
        '<!doctype html><meta charset="utf-8"><title>llamarl simulate</title>'
        "<style>body{font:14px system-ui;margin:24px}svg{font:12px system-ui}</style>"
        f"<pre>{html.escape(render(simulation))}</pre>"
        f"<p>{start_s - simulation.loop_s[0]:.0f} s to {end_s - simulation.loop_s[0]:.0f} s of the loop. {legend}</p>"
        f'<svg width="{width}" height="{len(rows) * height + 6}">{"".join(parts)}</svg>\n'
    )
    write_atomically(path, page)


def write_png(path: Path, simulation: Simulation) -> None:
    """Timeline, step times and staleness. Raises ConfigError without matplotlib, OSError."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError("the PNG timeline needs matplotlib; pip install 'llamarl[plot]'") from None
    start_s, end_s = _window(simulation)
    rows = _rows(simulation, start_s, end_s)
    figure = Figure(figsize=(12, 3 + 0.28 * len(rows)), layout="constrained")
    places = figure.add_gridspec(2, 2, height_ratios=(0.28 * len(rows), 2))
    time_axes = figure.add_subplot(places[0, :])
    step_axes, stale_axes = figure.add_subplot(places[1, 0]), figure.add_subplot(places[1, 1])
    for row, spans in enumerate(rows.values()):
        bars = [(span.start_s, span.end_s - span.start_s) for span in spans]
        time_axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=[COLORS[span.name] for span in spans])
    time_axes.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel="virtual seconds", xlim=(0, end_s - start_s))
    time_axes.invert_yaxis()
    time_axes.set_title(f"{simulation.split.gpus:,} GPUs, steps in the middle of the run", loc="left")
    patches = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    time_axes.legend(handles=patches, ncols=len(patches), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    step_axes.hist(simulation.step_s, bins=30, color="#4c78a8")
    step_axes.set(xlabel="step time, s", ylabel="steps")
    stale_axes.bar(list(simulation.staleness), list(simulation.staleness.values()), color="#4c78a8")
    stale_axes.axvline(simulation.staleness_bound + 0.5, color="#e45756", linestyle="--")
    stale_axes.set(xlabel=f"staleness, steps (proved bound {simulation.staleness_bound})", ylabel="rollouts")
    stale_axes.set_xticks(range(simulation.staleness_bound + 1))
    figure.savefig(path, dpi=110)
