"""The picture of docs/staleness.md: what runs of the demo learn by staleness, and how far from the synchronous ones."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from _moe_picture import HEAD

PICTURE = Path(__file__).parents[1] / "docs/pictures/learning.svg"
COLORS = {"S=0": "#57606a", "S=1": "#3b7dd8", "S=2": "#2f9e58", "S=4": "#e07b28"}
LEFT, RIGHT, TOP, LOW = 48, 400, 60, 250
"""Edges of the curves."""
GAPS, ZERO, POINT = 420, 650, 11
"""Where names of ways begin, where no gap is, and the width of a point."""


def draw(figures: dict[str, Any]) -> str:
    """SVG of a result: left the courses by step, right the paired differences with their intervals."""
    keys = "seeds", "gap_points", "interval", "equal"
    pairs = {way: {key: figures[key][way] for key in keys} for way in figures["seeds"] if way.startswith("demo ")}
    title = "Accuracy less that of staleness 0, points: " + "; ".join(
        f"{way} {one['gap_points']:+.1f} ({one['interval'][0]:+.1f} to {one['interval'][1]:+.1f})"
        for way, one in pairs.items()
    )
    height = max(290, TOP + 34 * len(pairs) + 30)
    return "".join(
        [HEAD.format(height=height, below=height - 1, title=title), *_courses(figures), *_gaps(pairs), "</svg>\n"]
    )


def _courses(figures: dict[str, Any]) -> list[str]:
    lines = ['  <text x="20" y="26">Right of the sampled responses, by step</text>\n']
    for share in (0.4, 0.6, 0.8):
        y = LOW - (share - 0.3) / 0.6 * (LOW - TOP)
        lines.append(f'  <path class="axis" stroke-width="0.4" d="M {LEFT} {y:.0f} H {RIGHT - 20}"/>')
        lines.append(f'<text class="quiet" x="18" y="{y + 4:.0f}">{share:.0%}</text>\n')
    runs = {(one["way"], one["seed"]): one["solve_rate"] for one in figures["runs"] if one["task"] == "demo"}
    seeds = [seed for way, seed in runs if way == "S=0" and all((way, seed) in runs for way in COLORS)]
    for place, (way, color) in enumerate(COLORS.items() if seeds else ()):
        own = [runs[way, seed] for seed in seeds]
        means = [statistics.mean(column) for column in zip(*own, strict=True)]
        step = (RIGHT - 20 - LEFT) / (len(means) - 1)
        points = " ".join(
            f"{LEFT + step * x:.1f},{LOW - (y - 0.3) / 0.6 * (LOW - TOP):.1f}" for x, y in enumerate(means)
        )
        lines.append(f'  <polyline fill="none" stroke="{color}" stroke-width="2" points="{points}"/>')
        lines.append(f'<text class="quiet" x="{LEFT + 80 * place}" y="{LOW + 26}">')
        lines.append(f'<tspan style="fill: {color}">■</tspan> {way}</text>\n')
    return lines


def _gaps(pairs: dict[str, dict[str, Any]]) -> list[str]:
    low = TOP + 34 * len(pairs)
    lines = [f'  <text x="{GAPS}" y="26">Accuracy at the end less that of S=0, points</text>\n']
    lines.append(f'  <rect x="{ZERO - 2 * POINT}" y="{TOP - 12}" width="{4 * POINT}" height="{low - TOP}" ')
    lines.append('fill="#2f9e58" opacity="0.15"/>\n')
    lines.append(f'  <path class="axis" d="M {ZERO} {TOP - 12} V {low - 12}"/>\n')
    for row, (way, one) in enumerate(pairs.items()):
        y, (begin, end) = TOP + 34 * row + 4, [ZERO + POINT * max(-7.0, min(7.0, x)) for x in one["interval"]]
        middle, color = ZERO + POINT * one["gap_points"], "#2f9e58" if one["equal"] else "#e07b28"
        lines.append(
            f'  <text class="quiet" x="{GAPS}" y="{y + 4}">{way.removeprefix("demo ")}, {one["seeds"]} pairs</text>'
        )
        lines.append(f'<path stroke="{color}" stroke-width="2" d="M {begin:.1f} {y} H {end:.1f}"/>')
        lines.append(f'<circle cx="{middle:.1f}" cy="{y}" r="4" fill="{color}"/>\n')
    lines.append(f'  <text class="quiet" x="{ZERO - 2 * POINT - 8}" y="{low + 6}">−2 … +2: equal</text>\n')
    return lines
