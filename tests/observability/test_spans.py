"""Many spans in little memory."""

from __future__ import annotations

from llamarl.observability.spans import Span, SpanTable


def test_a_table_keeps_the_newest_in_order() -> None:
    table = SpanTable(max_spans=100)
    spans = [Span(f"kind {number % 3}", number, number + 0.5) for number in range(1000)]
    for start in range(0, 1000, 7):
        table.extend(spans[start : start + 7])
        kept = list(table)
        assert kept == spans[: start + 7][-len(kept) :]
        assert min(start + 7, 100) <= len(kept) <= 125
    assert list(reversed(table))[:3] == spans[:-4:-1]
    assert table[-1] == spans[-1] and table[-3:] == spans[-3:]
