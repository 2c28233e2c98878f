"""Moments of the length distribution against samples, and the lengths of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llamarl.config import ConfigError
from llamarl.parts.forecast.lengths import Lengths


@pytest.mark.parametrize(("mean", "sigma"), [(300.0, 0.3), (900.0, 0.7), (1500.0, 1.2)])
def test_moments_equal_those_of_samples(mean: float, sigma: float) -> None:
    lengths = Lengths.lognormal(mean_tokens=mean, sigma=sigma, limit_tokens=4096)
    assert lengths.mean_tokens == pytest.approx(mean, rel=2e-3)
    rng = np.random.default_rng(0)
    low, high = 0.0, 12.0
    for _ in range(60):  # the shift for which the cut lognormal has this mean
        middle = (low + high) / 2
        samples = np.minimum(np.exp(middle + sigma * rng.standard_normal(200_000)), 4096)
        low, high = (low, middle) if samples.mean() > mean else (middle, high)
        rng = np.random.default_rng(0)
    assert lengths.square_tokens == pytest.approx((samples**2).mean(), rel=0.02)
    longest = samples.reshape(-1, 64).max(axis=1).mean()
    assert lengths.longest_tokens(64) == pytest.approx(longest, rel=0.02)


def test_one_length() -> None:
    lengths = Lengths.lognormal(mean_tokens=640, sigma=0.0, limit_tokens=1000)
    assert lengths.mean_tokens == pytest.approx(640)
    assert lengths.longest_tokens(1000) == pytest.approx(640, rel=0.02)
    assert lengths.held_tokens >= 630


def test_lengths_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps({"token_ids": [0] * count}) + "\n" for count in (10, 20, 30, 100)))
    lengths = Lengths.from_rollouts(path)
    assert lengths.limit_tokens == 100
    assert lengths.mean_tokens == pytest.approx(40, rel=0.02)
    assert lengths.longest_tokens(1000) == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", '{"token_ids": []}\n'])
def test_a_file_without_lengths_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="rollouts"):
        Lengths.from_rollouts(path)


def test_an_impossible_mean_is_refused() -> None:
    with pytest.raises(ConfigError, match="limit of 100"):
        Lengths.lognormal(mean_tokens=200, sigma=0.5, limit_tokens=100)
