"""What training makes of the rewards, and what it leaves out; the groups themselves keep what the reward said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.kl import KlPenalty
from llamarl.config.schema import ShapingConfig
from llamarl.training.packing import UNSHAPED, Shaping, is_flat, to_sample_group, valid_rollouts
from llamarl.types import OBSERVED, FinishReason, Outcome, RewardResult, Rollout, RolloutGroup

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
RESPONSES = [(4, 5), (6,) * 8, (7,) * 10]


def shaping(**settings: object) -> Shaping:
    return Shaping(ShapingConfig(**settings), 10)


def test_penalties_count_with_the_limit_of_the_source(group: RolloutGroup) -> None:
    """Responses of 2, 8 and 10 tokens of at most 20."""
    limits = {"long": 20}
    costly = Shaping(ShapingConfig(length_penalty=1.0, overlong_penalty=1.0), 10, None, limits)
    of_source = replace(group, prompt=replace(group.prompt, source="long"))
    np.testing.assert_allclose(costly.rewards(of_source).rewards_G, [-0.1, 1 - 0.4, 2 - 0.5], rtol=1e-12)
    np.testing.assert_allclose(costly.rewards(group).rewards_G, [-0.2, 1 - 0.8, 2 - 1 - 1], rtol=1e-12)


@pytest.fixture
def group(make_group) -> RolloutGroup:
    """Rewards 0, 1, 2 for responses of 2, 8 and 10 of 10 tokens."""
    return make_group(responses=RESPONSES, finish=[STOP, STOP, LENGTH])


def test_without_shaping_the_last_token_has_the_reward(group: RolloutGroup) -> None:
    earned = UNSHAPED.rewards(group)
    assert [one.tolist() for one in earned.token_rewards] == [[0.0] * 2, [0.0] * 7 + [1.0], [0.0] * 9 + [2.0]]
    assert earned.valid_G.tolist() == [True] * 3 and np.isnan(earned.baseline)
    assert UNSHAPED.metrics([group]) == {}


def test_penalties_are_taken_off_and_shown(group: RolloutGroup, make_group) -> None:
    """Length: 0.1 * 2/10, ...; overlong: the last 2 of 10 tokens, so half of 0.5 at 9 and all of it at 10."""
    costly = shaping(length_penalty=0.1, overlong_penalty=0.5)
    group = replace(
        group, rollouts=(group.rollouts[0], make_group(responses=[(6,) * 9]).rollouts[0], group.rollouts[2])
    )
    np.testing.assert_allclose(costly.rewards(group).rewards_G, [-0.02, 1 - 0.09 - 0.25, 2 - 0.1 - 0.5], rtol=1e-12)
    metrics = costly.metrics([group, group])
    assert metrics == pytest.approx({"length_penalty_mean": 0.21 / 3, "overlong_penalty_mean": 0.25})
    assert [result.value for result in group.results] == [0.0, 1.0, 2.0]


def test_what_an_environment_wrote_costs_nothing(group: RolloutGroup) -> None:
    """Neither its length nor how far it is from the reference."""

    def answered(rollout: Rollout) -> Rollout:
        versions_T, reference_T = np.zeros(rollout.num_tokens, np.int32), np.full(rollout.num_tokens, -9.0, np.float32)
        versions_T[1:5] = OBSERVED if rollout.num_tokens > 5 else 0
        logprobs_T = np.where(versions_T == OBSERVED, 0.0, -8.5).astype(np.float32)
        columns = {"policy_versions": versions_T, "behavior_logprobs": logprobs_T, "reference_logprobs": reference_T}
        return replace(rollout, columns=rollout.columns | columns)

    episodes = replace(group, rollouts=tuple(map(answered, group.rollouts)))
    costly = replace(
        shaping(length_penalty=0.1, overlong_penalty=0.5),
        kl=KlPenalty(coefficient=0.2, estimator="k1"),
    )
    earned = costly.rewards(episodes).token_rewards  # 2, 4 and 6 sampled tokens of 10: none in the last fifth
    np.testing.assert_allclose(earned[1], [-0.1, 0, 0, 0, 0, -0.1, -0.1, 0.9 - 0.04], rtol=1e-9)
    masks = [one.tolist() for one in costly.rewards(episodes).is_sampled]
    assert masks[:2] == [[True] * 2, [True] + [False] * 4 + [True] * 3]
    np.testing.assert_allclose(earned[2][-2:], [-0.1, 2 - 0.1 - 0.06], rtol=1e-9)


def of_turns(rollout: Rollout, sampled: list[int], rewards: dict[int, float]) -> Rollout:
    """A rollout whose other tokens an environment wrote, with rewards at tokens."""
    versions_T, rewards_T = np.full(rollout.num_tokens, OBSERVED, np.int32), np.zeros(rollout.num_tokens, np.float32)
    versions_T[sampled] = 0
    rewards_T[list(rewards)] = list(rewards.values())
    return replace(rollout, columns=rollout.columns | {"policy_versions": versions_T, "turn_rewards": rewards_T})


@pytest.fixture
def episodes(make_group) -> RolloutGroup:
    """Rewards by turn: (1, 2, 3), (0, 4) and (2), the last of each by the end of the episode. Values are the sums."""
    group = make_group(responses=[(4,) * 6, (5,) * 5, (6,) * 2], finish=[STOP] * 3)
    first, second, third = group.rollouts
    turns = of_turns(first, [0, 2, 3, 5], {0: 1.0, 3: 2.0}), of_turns(second, [0, 1, 4], {}), third
    results = tuple(replace(group.results[0], value=value) for value in (6.0, 4.0, 2.0))
    return replace(group, rollouts=turns, results=results)


def test_a_turn_has_its_reward_at_its_last_token(episodes: RolloutGroup) -> None:
    earned = UNSHAPED.rewards(episodes)
    assert [one.tolist() for one in earned.token_rewards] == [[1, 0, 0, 2, 0, 3], [0, 0, 0, 0, 4], [0, 2]]
    assert earned.rewards_G.tolist() == [6.0, 4.0, 2.0] and earned.turns == ()
    assert [one.turn_T.tolist() for one in episodes.rollouts] == [[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("settings", "returns"),
    [
        ({"credit": "turn"}, [[1, 2, 3], [0, 4], [2]]),
        ({"credit": "discounted"}, [[6, 5, 3], [4, 4], [2]]),
        ({"credit": "discounted", "turn_discount": 0.5}, [[1 + 1 + 0.75, 3.5, 3], [2, 4], [2]]),
        ({"credit": "discounted", "turn_discount": 0.0}, [[1, 2, 3], [0, 4], [2]]),
    ],
)
def test_turns_learn_from_their_returns(
    episodes: RolloutGroup, settings: dict[str, Any], returns: list[list[float]]
) -> None:
    """The n-th turns are compared with each other: three first ones, two second ones, and one third, which has nothing
    to be compared with."""
    earned = shaping(**settings).rewards(episodes)
    for found, expected in zip(earned.turn_returns, returns, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    first = np.array([one[0] for one in returns]) - np.mean([one[0] for one in returns])
    half = (returns[0][1] - returns[1][1]) / 2
    (advantages,) = GroupMean().of_batch([earned])
    np.testing.assert_allclose(advantages[0], [first[0]] * 2 + [half] * 3 + [0.0], atol=1e-12)
    np.testing.assert_allclose(advantages[1], [first[1]] * 4 + [-half], atol=1e-12)
    np.testing.assert_allclose(advantages[2], [first[2]] * 2, atol=1e-12)


def test_turns_of_invalid_rollouts_do_not_count(episodes: RolloutGroup) -> None:
    invalid = replace(episodes.results[1], outcome=Outcome.INVALID, value=0.0)
    some = replace(episodes, results=(episodes.results[0], invalid, episodes.results[2]))
    (advantages,) = GroupMean().of_batch([shaping(credit="turn").rewards(some)])
    np.testing.assert_allclose(advantages[0], [-0.5] * 2 + [0.0] * 4, atol=1e-12)
    assert not advantages[1].any()


def test_credit_for_turns_leaves_rollouts_of_one_turn_as_they_are(group: RolloutGroup) -> None:
    for credit in ("turn", "discounted"):
        (found,), (usual,) = (GroupMean().of_batch([one.rewards(group)]) for one in (shaping(credit=credit), UNSHAPED))
        assert all(np.array_equal(one, other) for one, other in zip(found, usual, strict=True))


def test_truncated_responses_are_left_out_and_counted(group: RolloutGroup) -> None:
    masked = shaping(mask_truncated=True)
    earned = masked.rewards(group)
    assert earned.valid_G.tolist() == [True, True, False]
    samples = to_sample_group(group, np.ones(3), earned.valid_G).samples
    assert [len(sample.token_ids_T) for sample in samples] == [2, 8]
    assert masked.metrics([group]) == {"masked_truncated_share": pytest.approx(1 / 3)}
    assert valid_rollouts(group).all()


def test_a_greedy_response_is_a_baseline_where_it_was_judged(group: RolloutGroup) -> None:
    right = replace(group, baseline=RewardResult(outcome=Outcome.SCORE, value=0.75))
    unknown = replace(group, baseline=RewardResult(outcome=Outcome.INVALID, value=0.0))
    assert UNSHAPED.rewards(right).baseline == 0.75 and np.isnan(UNSHAPED.rewards(unknown).baseline)
    assert UNSHAPED.metrics([right, unknown]) == {"greedy_reward_mean": 0.75}


def test_flat_groups(make_group) -> None:
    """All that was judged was judged equal. Where nothing was judged, the share of invalid rewards has its say."""
    score, invalid = Outcome.SCORE, Outcome.INVALID
    assert not is_flat(make_group(outcomes=[score, score]))
    assert is_flat(make_group(outcomes=[score, invalid]))
    assert not is_flat(make_group(outcomes=[invalid, invalid]))
    assert not is_flat(make_group(responses=[(4, 5)], outcomes=[score]))
    cut = make_group(finish=[STOP, LENGTH])
    assert is_flat(cut, mask_truncated=True) and not is_flat(cut)


def test_advantages_of_single_tokens_reach_the_samples(make_group) -> None:
    samples = to_sample_group(make_group(), [np.array([0.5, -1.0]), np.array([2.0])]).samples
    assert [sample.advantages_T.tolist() for sample in samples] == [[0.5, -1.0], [2.0]]


def test_leaving_the_reference_costs_where_it_happens(make_group) -> None:
    """A critic's values come along, for advantages that need them."""
    (rollout,) = (group := make_group(responses=[(4, 5, 6)])).rollouts
    said = rollout.behavior_logprobs_T - np.array([0.5, 0.0, -1.0], np.float32)
    values = np.array([0.1, 0.2, 0.3], np.float32)
    group = replace(
        group,
        rollouts=(
            replace(
                rollout,
                columns=rollout.columns | {"reference_logprobs": said, "values": values},
            ),
        ),
    )
    earned = Shaping(ShapingConfig(), 10, KlPenalty(coefficient=0.1, estimator="k1")).rewards(group)
    np.testing.assert_allclose(earned.token_rewards[0], [-0.05, 0, group.results[0].value + 0.1], atol=1e-7)
    assert np.array_equal(earned.values[0], values)
