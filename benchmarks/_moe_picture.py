"""The picture of docs/layouts.md: KL of generators to the trained policy, by cause, with router replay and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parents[1] / "docs/pictures/kl_by_cause.svg"
COLORS = {"staleness": "#3b7dd8", "quantization": "#e07b28", "kernels": "#2f9e58", "routing": "#b459c4"}
LEFT, TOP, WIDTH, ROW, BAR = 190, 64, 500, 30, 20
"""Where the bars begin, how long the longest may be, how far they are from each other, and how high one is."""
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" aria-labelledby="title" \
font-family="system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="13">
  <title id="title">{title}</title>
  <style>
    .paper {{ fill: #ffffff; stroke: #d0d7de }}
    .axis {{ stroke: #8c959f }}
    text {{ fill: #1f2328 }}
    .quiet {{ fill: #57606a; font-size: 12px }}
    @media (prefers-color-scheme: dark) {{
      .paper {{ fill: #0d1117; stroke: #30363d }}
      .axis {{ stroke: #6e7681 }}
      text {{ fill: #e6edf3 }}
      .quiet {{ fill: #9198a1 }}
    }}
  </style>
  <rect class="paper" x="0.5" y="0.5" width="759" height="{below}" rx="6"/>
"""


def draw(figures: dict[str, Any]) -> str:
    """SVG of `kl_by_cause`: a bar for each type and mode. A part below 0 shortens the bar and has no color."""
    bars = [
        (f"{kind}, replay {mode}", figures["kl_by_cause"][kind][mode])
        for kind in figures["kl_by_cause"]
        for mode in ("on", "off")
    ]
    longest = max(sum(parts.values()) for _, parts in bars)
    height = TOP + ROW * len(bars) + 16
    title = "KL of the demo's generators to the policy a step later: " + "; ".join(
        f"{name} {sum(parts.values()):.1e}" for name, parts in bars
    )
    lines = [HEAD.format(height=height, below=height - 1, title=title)]
    lines.append('  <text x="20" y="26">KL per token to the policy one step later, 10⁻⁶ nats</text>\n')
    x = 20.0
    for name, color in COLORS.items():
        lines.append(f'  <rect x="{x:.0f}" y="38" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text class="quiet" x="{x + 18:.0f}" y="48">{name}</text>\n')
        x += 40 + 7 * len(name)
    for number, (name, parts) in enumerate(bars):
        y, x, total = TOP + ROW * number, float(LEFT), sum(parts.values())
        lines.append(f'  <text x="20" y="{y + 15}">{name}</text>')
        scale = WIDTH / longest * min(1.0, total / sum(max(part, 0.0) for part in parts.values()))
        for cause, part in parts.items():
            size = max(part, 0.0) * scale
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="{BAR}" fill="{COLORS[cause]}">'
                f"<title>{cause} {part:.2e}</title></rect>"
            )
            x += size
        lines.append(f'<text class="quiet" x="{x + 6:.0f}" y="{y + 15}">{1e6 * total:.0f}</text>\n')
    lines.append(f'  <path class="axis" d="M {LEFT} {TOP - 4} V {height - 12}"/>\n</svg>\n')
    return "".join(lines)
