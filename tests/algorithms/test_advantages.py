"""The contract of every advantage in the folder, and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.algorithms.advantages._base import Advantage
from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.advantages.group_normalized import GroupNormalized
from llamarl.config.ref import Ref, build, members

FAMILY = "llamarl.algorithms.advantages"


def every_advantage() -> list[Advantage]:
    return [build(Ref(name=name), FAMILY, "trainer.advantage") for name in members(FAMILY)]


def valid(*flags: int) -> np.ndarray:
    return np.array(flags, bool)


REWARDS = st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=16)


class TestContract:
    @given(REWARDS, st.randoms(use_true_random=False))
    def test_any_group(self, group, random) -> None:
        """One float64 per rollout; 0 and no influence where invalid; the order of the rollouts does not matter."""
        rewards_G, valid_G = np.array([reward for reward, _ in group]), valid(*(flag for _, flag in group))
        order_G = list(range(len(group)))
        random.shuffle(order_G)
        for advantage in every_advantage():
            clean_G = advantage(rewards_G, valid_G)
            assert clean_G.shape == rewards_G.shape
            assert clean_G.dtype == np.float64
            assert np.isfinite(clean_G).all()
            assert (clean_G[~valid_G] == 0).all()
            for poison in (np.nan, np.inf, -np.inf, 1e300):
                poisoned_G = advantage(np.where(valid_G, rewards_G, poison), valid_G)
                np.testing.assert_array_equal(poisoned_G, clean_G)
            np.testing.assert_allclose(advantage(rewards_G[order_G], valid_G[order_G]), clean_G[order_G], atol=1e-9)

    @given(REWARDS)
    def test_group_relative_ones_balance(self, group) -> None:
        rewards_G, valid_G = np.array([reward for reward, _ in group]), valid(*(flag for _, flag in group))
        for advantage in (GroupMean(), GroupNormalized()):
            assert advantage(rewards_G, valid_G).sum() == pytest.approx(0, abs=1e-9)
            np.testing.assert_allclose(advantage(rewards_G + 3, valid_G), advantage(rewards_G, valid_G), atol=1e-6)

    def test_inputs_are_not_changed(self) -> None:
        rewards_G, valid_G = np.array([1.0, np.nan, 0.0]), valid(1, 0, 1)
        rewards_G.flags.writeable = valid_G.flags.writeable = False
        for advantage in every_advantage():
            advantage(rewards_G, valid_G)


@pytest.mark.parametrize("advantage", [GroupMean(), GroupNormalized()], ids=str)
class TestDegenerateGroups:
    @pytest.mark.parametrize(
        ("rewards", "flags"),
        [
            ([5.0], [1]),
            ([np.nan, np.nan], [0, 0]),
            ([1.0, np.nan, np.nan], [1, 0, 0]),
            ([], []),
        ],
        ids=["group of one", "all invalid", "one valid", "empty"],
    )
    def test_nothing_to_compare_with(self, advantage: Advantage, rewards: list[float], flags: list[int]) -> None:
        np.testing.assert_array_equal(advantage(np.array(rewards), valid(*flags)), np.zeros(len(rewards)))

    @pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.3])
    def test_equal_rewards(self, advantage: Advantage, reward: float) -> None:
        """Exactly 0, so that the trainer need not compute such groups; the rounded mean of 0.1, 0.1, 0.1 is not 0.1."""
        advantages_G = advantage(np.array([reward, reward, np.nan, reward]), valid(1, 1, 0, 1))
        np.testing.assert_array_equal(advantages_G, np.zeros(4))


def test_group_mean_closed_form() -> None:
    advantages_G = GroupMean()(np.array([1.0, 0.0, 99.0, 0.0, 1.0]), valid(1, 1, 0, 1, 1))
    np.testing.assert_allclose(advantages_G, [0.5, -0.5, 0, -0.5, 0.5])


def test_group_normalized_closed_form() -> None:
    """Sample standard deviation of 1, 0, 0, 1: sqrt(4 * 0.25 / 3)."""
    advantages_G = GroupNormalized(epsilon=1e-4)(np.array([1.0, 0.0, 99.0, 0.0, 1.0]), valid(1, 1, 0, 1, 1))
    size = 0.5 / (np.sqrt(1 / 3) + 1e-4)
    np.testing.assert_allclose(advantages_G, [size, -size, 0, -size, size])
