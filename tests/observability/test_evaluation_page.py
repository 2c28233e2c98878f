"""Figures of docs/evaluation.md, computed from their formulas."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import fields
from statistics import NormalDist

import numpy as np
import pytest

from llamarl.config import load_config
from llamarl.observability.metrics import EvalMetrics, wilson
from tests.architecture.repository import ROOT
from tests.nightly import nightly
from tests.observability.test_intervals import DIFFICULTIES, coverage

PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
HALF, POWER = (NormalDist().inv_cdf(one) for one in (0.975, 0.8))


def table(head: str) -> list[list[str]]:
    """Cells of the rows below a head."""
    _, _, below = PAGE.partition(head)
    rows = below.partition("\n\n")[0].strip().splitlines()[1:]
    assert rows, head
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_settings_that_are_shown() -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    settings = tomllib.loads(shown)
    sets = load_config(settings | {"model": {"path": "m"}, "data": settings["data"] | {"train": "jsonl"}}).by_eval_set
    told = {name: (one.eval.samples, one.eval.temperature, one.eval.every_steps) for name, one in sets.items()}
    assert told == {"gsm8k": (1, 0.0, 20), "competition": (16, 1.0, 100)}


def test_every_metric_is_named() -> None:
    known = {one.name for one in fields(EvalMetrics)} - {"pass_at"} | {"pass_at.N"}
    named = {name for row in table("| name | what it is |") for name in re.findall(r"`([\w.]+)`", row[0])}
    assert named == known


def test_widths() -> None:
    for num, at_half, at_90 in table("| problems | at 50 % | at 90 % |"):
        count = int(num.replace(",", ""))
        low, high = wilson(0.5, count)
        assert at_half == f"± {50 * (high - low):.1f} points"
        low, high = wilson(0.9, count)
        assert at_90 == f"{100 * low:.1f} to {100 * high:.1f} %"


def test_problems_that_a_difference_needs() -> None:
    def apart(share: float, gain: float) -> int:
        spread = share * (1 - share) + (share + gain) * (1 - share - gain)
        return math.ceil((HALF + POWER) ** 2 * spread / gain**2)

    def paired(gain: float, changed: float) -> int:
        return math.ceil((HALF * math.sqrt(changed) + POWER * math.sqrt(changed - gain**2)) ** 2 / gain**2)

    head = "| difference | from 50 % | from 80 % | same problems, 20 % change | same problems, 10 % change |"
    for points, *cells in table(head):
        gain = int(points.split()[0]) / 100
        assert cells == [
            f"{num:,}" for num in (apart(0.5, gain), apart(0.8, gain), paired(gain, 0.2), paired(gain, 0.1))
        ]


def test_two_points_are_seen_in_four_of_five_cases() -> None:
    """The formula of pairs, by simulation: one in ten answers changes, 2 points more for the better."""
    rng, (num, *_) = np.random.default_rng(0), [1960]
    better, worse = rng.binomial(num, [[0.06]] * 4000)[:, 0], rng.binomial(num, [[0.04]] * 4000)[:, 0]
    seen = np.abs(better - worse) > HALF * np.sqrt(better + worse)
    assert np.mean(seen) == pytest.approx(0.8, abs=0.03)


@nightly("a minute of simulation; test_intervals.py has smaller ones")
def test_coverage() -> None:
    for place, own, naive in table("| problems, samples | this interval | all samples as if independent |"):
        num, k = map(int, place.split(", "))
        for told, as_if_independent in ((own, False), (naive, True)):
            found = [100 * coverage(kind, num, k, as_if_independent=as_if_independent) for kind in DIFFICULTIES]
            low, high = map(float, re.findall(r"\d+", told))
            assert (min(found), max(found)) == (pytest.approx(low, abs=1.0), pytest.approx(high, abs=1.0)), place
