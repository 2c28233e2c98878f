"""The reward of the real model's task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the package `gguf` is not installed")
from examples.real import demo
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


def test_the_curve_has_a_bar_for_each_evaluation(tmp_path: Path) -> None:
    found = [{"kind": "eval", "step": step, "accuracy": value} for step, value in ((0, 0.1), (25, 0.2))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*found, {"kind": "step"})))
    _, first, last = demo.curve(tmp_path).splitlines()
    assert "10.0%" in first and "20.0%" in last and last.count("█") == 2 * first.count("█") == demo.BAR
