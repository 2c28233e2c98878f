"""The learning curve of the real model, as SVG: held-out accuracy by step, a line for each seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parents[1] / "docs/pictures/real.svg"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 56, 16, 40, 40
COLORS = ("#3b7dd8", "#e07b28", "#2f9e58", "#b459c4", "#8a6d3b")


def draw(runs: list[dict[str, Any]]) -> str:
    """Returns the picture of the runs of the default way."""
    curves = [
        [(int(step), value) for step, value in run["accuracy"].items()] for run in runs if run["way"] == "bfloat16"
    ]
    last = max(step for curve in curves for step, _ in curve)
    most = max(0.1, -(-max(value for curve in curves for _, value in curve) * 10 // 1) / 10)

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / most, 1)

    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="600">Held-out accuracy of SmolLM2-135M on SVAMP</text>',
    ]
    for number in range(6):
        value = most * number / 5
        (x, y), (end, _) = place(0, value), place(last, value)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end" fill="#555">{value:.0%}</text>')
        step = last * number / 5
        parts.append(
            f'<text x="{place(step, 0)[0]}" y="{HEIGHT - 20}" text-anchor="middle" fill="#555">{step:.0f}</text>'
        )
    for curve, color in zip(curves, COLORS, strict=False):
        points = " ".join(f"{x},{y}" for x, y in (place(step, value) for step, value in curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in (place(*one) for one in curve)]
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end" fill="#555">optimizer steps</text></svg>'
    )
    return "\n".join(parts) + "\n"
