"""Charts of characters."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from llamarl.parts.page.chart import chart, resample

NAN = math.nan


def test_a_chart_of_one_line():
    assert chart([0, 1, 2, 3, 4, 5, 6, 7], 8, 1)[0] == "▁▂▃▄▅▆▇█"
    assert chart([1, NAN, 2], 8, 1)[0] == "▁ █"
    assert chart([3, 3], 8, 1)[0] == "▁▁"
    assert chart([NAN], 8, 1)[0] == " "
    assert chart([], 8, 1)[0] == ""


values = st.lists(st.floats(-1e6, 1e6) | st.just(NAN), max_size=50)


@given(values, st.integers(-3, 30), st.integers(1, 6))
def test_charts_fit(history, width, height):
    rows = chart(history, width, height)
    assert len(rows) == height
    assert {len(row) for row in rows} == {min(len(history), max(width, 0))}


def test_resample_averages_neighbors():
    assert resample([0, 2, 4, NAN, 6, 6], 3) == [1, 4, 6]
