"""Generalized advantage estimation against its definition, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.algorithms.advantages._base import GroupRewards
from llamarl.algorithms.advantages.gae import Gae
from llamarl.config import ConfigError
from llamarl.config.ref import Ref, build

RAW = {"normalize": False}


def group(rewards: list[list[float]], values: list[list[float]], valid: list[bool] | None = None) -> GroupRewards:
    return GroupRewards(
        token_rewards=tuple(np.array(one, np.float64) for one in rewards),
        valid_G=np.array(valid or [True] * len(rewards), bool),
        values=tuple(np.array(one, np.float64) for one in values),
    )


def by_definition(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> list[float]:
    after = [*values, 0.0][1:]
    deltas = [reward + gamma * later - value for reward, later, value in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(rewards))
    ]  # fmt: skip


SEQUENCES = st.lists(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), max_size=9), min_size=1, max_size=5)


@given(SEQUENCES, st.floats(0, 1), st.floats(0, 1))
def test_it_is_its_definition(sequences, gamma, lam) -> None:
    """Ragged rollouts, empty ones among them, over two groups."""
    rewards, values = [[r for r, _ in one] for one in sequences], [[v for _, v in one] for one in sequences]
    groups = [group(rewards, values), group(rewards[::-1], values[::-1])]
    found = Gae(gamma=gamma, lam=lam, **RAW).of_batch(groups)
    for parts, one in zip(found, groups, strict=True):
        for advantages, reward, value in zip(parts, one.token_rewards, one.values, strict=True):
            np.testing.assert_allclose(advantages, by_definition(reward, value, gamma, lam), atol=1e-12)


def test_what_an_environment_wrote_is_passed_over() -> None:
    """The token before is followed by the token after; values that were said of it are not looked at."""
    mask = np.array([True, False, False, True, True, False, True])
    rewards, values = np.array([-1.0, 0, 0, 2, 0, 0, 5]), np.array([0.5, 1e9, -1e9, 1, 2, 1e9, 3])
    one = replace(group([rewards, [1.0, 2.0]], [values, [0.0, 0.0]]), is_sampled=(mask, np.ones(2, bool)))
    ((raw, _),) = Gae(gamma=0.9, lam=0.5, **RAW).of_batch([one])
    np.testing.assert_allclose(raw[mask], by_definition(rewards[mask], values[mask], 0.9, 0.5), atol=1e-12)
    (found,) = Gae(gamma=0.9, lam=0.5).of_batch([one])
    tokens = np.concatenate([found[0][mask], found[1]])
    np.testing.assert_allclose([tokens.mean(), tokens.std(ddof=1)], [0, 1], atol=1e-7)
    assert not raw[~mask].any()


def test_lambda_one_is_the_return_less_the_value() -> None:
    (parts,) = Gae(**RAW).of_batch([group([[0, -1, 3]], [[0.5, 1, 2]])])
    np.testing.assert_allclose(parts[0], [1.5, 1, 1])


def test_lambda_zero_is_one_step() -> None:
    (parts,) = Gae(gamma=0.5, lam=0, **RAW).of_batch([group([[0, -1, 3]], [[0.5, 1, 2]])])
    np.testing.assert_allclose(parts[0], [0, -1, 1])


def test_a_normalized_batch_has_mean_0_and_deviation_1_over_valid_tokens() -> None:
    groups = [
        group([[0, 1], [0, 0, 5]], [[0.1, 0.2], [0, 0, 0]], [True, False]),
        group([[2.0], [0.0, 0.0]], [[0.3], [1, 1]]),
    ]
    found = Gae().of_batch(groups)
    np.testing.assert_array_equal(found[0][1], np.zeros(3))
    kept = np.concatenate([found[0][0], *found[1]])
    assert kept.mean() == pytest.approx(0, abs=1e-12)
    assert kept.std(ddof=1) == pytest.approx(1, rel=1e-6)
    raw = Gae(**RAW).of_batch(groups)
    before = np.concatenate([raw[0][0], *raw[1]])
    np.testing.assert_allclose(kept, (before - before.mean()) / (before.std(ddof=1) + 1e-8))


def test_returns_are_not_normalized() -> None:
    groups = [group([[0, 1], [0, 0]], [[0.25, 0.5], [0.5, 0.5]])]
    (parts,) = Gae().estimate(groups)
    np.testing.assert_allclose(parts[0] + groups[0].values[0], [1, 1])
    np.testing.assert_allclose(parts[1] + groups[0].values[1], [0, 0])


@pytest.mark.parametrize("groups", [[], [group([[]], [[]])], [group([[1.0]], [[0.5]])]], ids=["none", "empty", "one"])
def test_nothing_to_normalize(groups: list[GroupRewards]) -> None:
    for parts in Gae().of_batch(groups):
        assert all(np.isfinite(one).all() for one in parts)


def test_an_impossible_option() -> None:
    with pytest.raises(ConfigError, match=r"lam = 1.5 must be between 0 and 1"):
        build(Ref(name="gae", lam=1.5), "llamarl.algorithms.advantages", "trainer.advantage")
