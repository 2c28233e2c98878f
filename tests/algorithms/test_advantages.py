"""The contract of every advantage in the folder, and closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.algorithms.advantages._base import Advantage, GroupAdvantage, GroupRewards, ValueAdvantage
from llamarl.algorithms.advantages.distillation import Distillation
from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.advantages.group_normalized import GroupNormalized
from llamarl.algorithms.advantages.leave_one_out import LeaveOneOut
from llamarl.algorithms.advantages.maximum_likelihood import MaximumLikelihood
from llamarl.algorithms.advantages.reinforce_plus_plus import ReinforcePlusPlus
from llamarl.algorithms.advantages.remax import Remax
from llamarl.config.ref import Ref, build, members

FAMILY = "llamarl.algorithms.advantages"


def every_advantage() -> list[Advantage]:
    """Those without a critic; `gae` has tests of its own."""
    made: list[Advantage] = [build(Ref(name=name), FAMILY, "trainer.advantage") for name in members(FAMILY)]
    return [one for one in made if not isinstance(one, ValueAdvantage)]


def valid(*flags: int) -> np.ndarray:
    return np.array(flags, bool)


def earned(rewards_G, valid_G, lengths=None, baseline: float = np.nan) -> GroupRewards:
    """Each reward at the last of so many tokens."""
    token_rewards = [np.zeros(length) for length in lengths or [2] * len(rewards_G)]
    for rewards_T, reward in zip(token_rewards, rewards_G, strict=True):
        rewards_T[-1:] = reward
    scores_G = np.asarray(rewards_G, np.float64)
    return GroupRewards(token_rewards=tuple(token_rewards), valid_G=valid_G, scores_G=scores_G, baseline=baseline)


def of_one_group(advantage: Advantage, rewards_G, valid_G, **options) -> np.ndarray:
    """Of a batch that is one group, float64 [G]; all tokens of a rollout have the same advantage."""
    (of_tokens,) = advantage.of_batch([earned(rewards_G, valid_G, **options)])
    assert all(one.dtype == np.float64 and (one == one[:1]).all() for one in of_tokens)
    return np.array([one[0] for one in of_tokens])


REWARDS = st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=16)


class TestContract:
    @given(REWARDS, st.randoms(use_true_random=False))
    def test_any_group(self, group, random) -> None:
        """One float64 per rollout; 0 and no influence where invalid; the order of the rollouts does not matter."""
        rewards_G, valid_G = np.array([reward for reward, _ in group]), valid(*(flag for _, flag in group))
        order_G = list(range(len(group)))
        random.shuffle(order_G)
        for advantage in every_advantage():
            clean_G = of_one_group(advantage, rewards_G, valid_G, baseline=0.5)
            assert clean_G.shape == rewards_G.shape
            assert clean_G.dtype == np.float64
            assert np.isfinite(clean_G).all()
            assert (clean_G[~valid_G] == 0).all()
            for poison in (np.nan, np.inf, -np.inf, 1e300):
                poisoned_G = of_one_group(advantage, np.where(valid_G, rewards_G, poison), valid_G, baseline=0.5)
                np.testing.assert_array_equal(poisoned_G, clean_G)
            shuffled_G = of_one_group(advantage, rewards_G[order_G], valid_G[order_G], baseline=0.5)
            np.testing.assert_allclose(shuffled_G, clean_G[order_G], atol=1e-9)

    @given(REWARDS)
    def test_group_relative_ones_balance(self, group) -> None:
        rewards_G, valid_G = np.array([reward for reward, _ in group]), valid(*(flag for _, flag in group))
        for advantage in (GroupMean(), GroupNormalized(), LeaveOneOut()):
            assert advantage(rewards_G, valid_G).sum() == pytest.approx(0, abs=1e-9)
            np.testing.assert_allclose(advantage(rewards_G + 3, valid_G), advantage(rewards_G, valid_G), atol=1e-6)

    def test_inputs_are_not_changed(self) -> None:
        rewards_G, valid_G = np.array([1.0, np.nan, 0.0]), valid(1, 0, 1)
        rewards_G.flags.writeable = valid_G.flags.writeable = False
        for advantage in every_advantage():
            of_one_group(advantage, rewards_G, valid_G, baseline=0.5)

    def test_groups_are_compared_by_themselves(self) -> None:
        """What another group of the batch earned changes nothing, except where the batch is the baseline."""
        first, second = np.array([1.0, 0.0, 0.5]), np.array([3.0, -2.0])
        for advantage in every_advantage():
            both = advantage.of_batch([earned(first, valid(1, 1, 1)), earned(second, valid(1, 1))])
            alone = advantage.of_batch([earned(first, valid(1, 1, 1))])
            assert np.allclose(both[0], alone[0]) != isinstance(advantage, ReinforcePlusPlus)


@pytest.mark.parametrize("advantage", every_advantage(), ids=str)
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
        np.testing.assert_array_equal(of_one_group(advantage, np.array(rewards), valid(*flags)), np.zeros(len(rewards)))

    @pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.3])
    def test_equal_rewards(self, advantage: Advantage, reward: float) -> None:
        """Exactly 0, so that the trainer need not compute such groups; the rounded mean of 0.1, 0.1, 0.1 is not 0.1."""
        rewards_G = np.array([reward, reward, np.nan, reward])
        advantages_G = of_one_group(advantage, rewards_G, valid(1, 1, 0, 1), baseline=reward)
        np.testing.assert_array_equal(advantages_G, np.zeros(4))


def test_group_mean_closed_form() -> None:
    advantages_G = GroupMean()(np.array([1.0, 0.0, 99.0, 0.0, 1.0]), valid(1, 1, 0, 1, 1))
    np.testing.assert_allclose(advantages_G, [0.5, -0.5, 0, -0.5, 0.5])


def test_group_normalized_closed_form() -> None:
    """Sample standard deviation of 1, 0, 0, 1: sqrt(4 * 0.25 / 3)."""
    advantages_G = GroupNormalized(epsilon=1e-4)(np.array([1.0, 0.0, 99.0, 0.0, 1.0]), valid(1, 1, 0, 1, 1))
    size = 0.5 / (np.sqrt(1 / 3) + 1e-4)
    np.testing.assert_allclose(advantages_G, [size, -size, 0, -size, size])


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12))
def test_leave_one_out_is_the_mean_of_the_others(rewards) -> None:
    rewards_G = np.array([*rewards, 77.0])
    advantages_G = LeaveOneOut()(rewards_G, valid(*[1] * len(rewards), 0))
    others = [reward - np.mean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]
    np.testing.assert_allclose(advantages_G, [*others, 0.0], atol=1e-12)


@pytest.mark.parametrize("num_right", [1, 2, 7])
def test_maximum_likelihood_averages_the_right_ones(num_right) -> None:
    """sum_i A_i s_i = mean score of the right rollouts minus mean of all, times n: the paper's estimator."""
    rewards_G = np.array([1.0] * num_right + [0.0] * (8 - num_right))
    scores_G = np.random.default_rng(0).normal(size=8)
    pull = (MaximumLikelihood()(rewards_G, np.ones(8, bool)) * scores_G).mean()
    assert pull == pytest.approx(scores_G[:num_right].mean() - scores_G.mean())


def test_remax_closed_form() -> None:
    """Reward minus that of the greedy response, which may be better than all; nothing where nobody judged that."""
    rewards_G, valid_G = np.array([1.0, 0.0, 99.0, 0.25]), valid(1, 1, 0, 1)
    np.testing.assert_array_equal(of_one_group(Remax(), rewards_G, valid_G, baseline=0.75), [0.25, -0.75, 0, -0.5])
    np.testing.assert_array_equal(of_one_group(Remax(), rewards_G[:1], valid_G[:1], baseline=0.75), [0.25])
    np.testing.assert_array_equal(of_one_group(Remax(), rewards_G, valid_G, baseline=np.nan), np.zeros(4))
    assert Remax.NEEDS_GREEDY and not any(one.NEEDS_GREEDY for one in every_advantage() if not isinstance(one, Remax))


def test_reinforce_plus_plus_closed_form() -> None:
    """Over all valid tokens of the batch, long responses count more: 1 for 3 tokens, 0 for 1, 4 for 2."""
    batch = [
        earned(np.array([1.0, 0.0]), valid(1, 1), lengths=[3, 1]),
        earned(np.array([99.0, 4.0]), valid(0, 1), lengths=[5, 2]),
    ]
    mean = (3 * 1 + 0 + 2 * 4) / 6
    scale = np.sqrt((3 * (1 - mean) ** 2 + mean**2 + 2 * (4 - mean) ** 2) / 6) + 1e-3
    first, second = ReinforcePlusPlus(epsilon=1e-3).of_batch(batch)
    for found, expected in zip([*first, *second], [[1] * 3, [0], None, [4] * 2], strict=True):
        wanted = np.zeros(5) if expected is None else (np.array(expected) - mean) / scale
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_reinforce_plus_plus_takes_what_comes_after_a_token() -> None:
    """Penalties of single tokens, -1 and -2, and a reward of 6 at the end: returns 3, 4, 6."""
    rewards = GroupRewards(token_rewards=(np.array([-1.0, -2.0, 6.0]),), valid_G=valid(1))
    ((found,),) = ReinforcePlusPlus(epsilon=0.0).of_batch([rewards])
    returns = np.array([3.0, 4.0, 6.0])
    np.testing.assert_allclose(found, (returns - returns.mean()) / returns.std(), rtol=1e-12)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_distillation_closed_form(weight: float) -> None:
    """Each token has its own log-ratio to the teacher. The reward counts by the group's mean, in all tokens."""
    ratios, scores_G = ([-0.5, 0.25], [1.0, -2.0], [9.0]), np.array([1.0, 0.0, 7.0])
    divergences = tuple(np.array(ratio) for ratio in ratios)
    group = replace(earned(scores_G, valid(1, 1, 0), [2, 2, 1]), divergences=divergences)
    (found,) = Distillation(reward_weight=weight).of_batch([group])
    np.testing.assert_allclose(found[0], np.array(ratios[0]) + weight * 0.5, rtol=0, atol=1e-15)
    np.testing.assert_allclose(found[1], np.array(ratios[1]) - weight * 0.5, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(found[2], [0.0])
    with pytest.raises(ValueError, match="reward_weight = -1"):
        Distillation(reward_weight=-1.0)


def test_all_tokens_of_a_rollout_have_its_advantage() -> None:
    for advantage in (one for one in every_advantage() if isinstance(one, GroupAdvantage)):
        (of_tokens,) = advantage.of_batch([earned(np.array([1.0, 0.0]), valid(1, 1), lengths=[3, 1])])
        whole_G = advantage(np.array([1.0, 0.0]), valid(1, 1))
        assert [one.tolist() for one in of_tokens] == [[whole_G[0]] * 3, [whole_G[1]]]
