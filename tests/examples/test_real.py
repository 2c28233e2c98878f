"""The reward of the real model's task."""

from __future__ import annotations

import pytest

from examples.real.calculation import reward, value_of


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 - 5", 7.0), (" 95 - 64 =", 31.0), ("6 * 4 = 25\nso", 24.0), ("28 / 7", 4.0), ("2 * (3 + 4)", 14.0),
        ("1.5 + 2", 3.5), ("7", None), ("", None), ("x - 5", None), ("__import__('os')", None), ("1 / 0", None),
        ("2 ** 9", None), ("True + 1", None), ("(" * 90, None), ("1e300 * 1e300", float("inf")), ("3 - 1j", None),
    ],
)  # fmt: skip
def test_a_calculation_has_a_value(text: str, value: float | None) -> None:
    assert value_of(text) == value


def test_the_reward_is_for_the_right_value() -> None:
    assert reward("76 - 25 = 5", 51.0) == 1.0 and reward("25 - 76", 51.0) == 0.0 and reward("51", 51.0) == 0.0
    assert reward("1e300 * 1e300", 51.0) == 0.0 and reward("10 / 3", 3.3333) == 1.0
