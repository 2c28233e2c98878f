from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.observability.formats import chart, duration, number, percent, plain, remaining_s, resample

NAN = math.nan


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (NAN, "–"),
        (math.inf, "–"),
        (-1, "0ms"),
        (0.0043, "4ms"),
        (0.0994, "99ms"),
        (0.4, "0.4s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (102, "1m 42s"),
        (3599.6, "1h 00m"),
        (7500, "2h 05m"),
        (273600, "3d 04h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_remaining_time_is_unknown_before_the_first_step():
    assert remaining_s(10, 2.0) == 20
    assert remaining_s(-1, 2.0) == 0
    assert duration(remaining_s(10, NAN)) == "–"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (NAN, "nan"),
        (math.inf, "inf"),
        (0, "0"),
        (0.00312, "0.00312"),
        (0.834, "0.834"),
        (-0.0123, "-0.0123"),
        (31.44, "31.4"),
        (3240.4, "3,240"),
        (3e-5, "3.00e-05"),
        (12_345_678, "1.23e+07"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_percent_keeps_nan_visible():
    assert [percent(0.184, 1), percent(NAN), percent(None)] == ["18.4%", "nan", "–"]


@given(st.text())
def test_plain_is_one_printable_line(text):
    assert all(unicodedata.category(letter)[0] != "C" for letter in plain(text))
    assert "\n" not in plain(text)


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
