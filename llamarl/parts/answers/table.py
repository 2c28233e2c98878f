"""Formats several sets of held-out problems as a table."""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.observability.metrics import ABSENT, EvalMetrics, duration, number, percent, plain, unjudged
from llamarl.observability.screen import interval


def eval_table(entries: Sequence[EvalMetrics]) -> str:
    """Returns lines: a header, a line per set, and a line for each set that has responses without a verdict."""
    head = "set", "accuracy", "95% interval", "pass@k", "invalid", "cut", "tokens", "prompts", "time"
    rows = [head, *map(_cells, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    for entry in entries:
        if entry.num_invalid:
            said = unjudged(entry.num_invalid, entry.num_prompts * entry.k, entry.invalid_reason)
            lines.append(f"{plain(entry.name or '')}: {said}")
    return "\n".join(lines)


def _cells(entry: EvalMetrics) -> tuple[str, ...]:
    found = interval(entry).removeprefix(" (95%: ").removesuffix(")")
    best = max(entry.chances, default=0)
    return (
        plain(entry.name or ""), percent(entry.accuracy, 1), found or ABSENT,
        f"@{best} {percent(entry.chances[best], 1)}" if best else ABSENT, f"{entry.num_invalid:,}",
        percent(entry.truncated_share), number(entry.mean_response_tokens),
        f"{entry.num_prompts:,}" + (f" x {entry.k}" if entry.k > 1 else ""), duration(entry.wall_s),
    )  # fmt: skip
