"""Groups that are larger than one call may carry."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.cluster.api import MAX_PAYLOAD_BYTES, chunks
from llamarl.config.schema import MAX_SEGMENT_TOKENS, MAX_SEQUENCE_TOKENS
from llamarl.rollouts.pieces import PIECE_TOKENS, joined, pieces, slices, split
from llamarl.rollouts.segments import ids_only
from llamarl.types import (
    FinishReason,
    GenerationRequest,
    Outcome,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
    SamplingParams,
)


def group_of(lengths: list[int], models: bool = True) -> RolloutGroup:
    """With what reference and critic say, or as the generators give it."""
    rollouts = tuple(
        Rollout(
            group_id=7,
            index=index,
            token_ids_T=np.full(length, index, np.int32),
            behavior_logprobs_T=np.zeros(length, np.float32),
            policy_versions_T=np.zeros(length, np.int32),
            finish_reason=FinishReason.STOP,
            reference_logprobs_T=np.arange(models * length, dtype=np.float32),
            values_T=np.arange(models * length, dtype=np.float32) + index,
        )
        for index, length in enumerate(lengths)
    )
    return RolloutGroup(
        group_id=7,
        prompt=Prompt(prompt_id="p", text="", token_ids_T=np.zeros(3, np.int32), answer=""),
        rollouts=rollouts,
        results=tuple(RewardResult(outcome=Outcome.SCORE, value=float(index)) for index in range(len(lengths))),
        responses=tuple(str(index) for index in range(len(lengths))),
    )


def test_a_small_group_travels_as_it_is() -> None:
    group = group_of([5, 0, 9])
    assert [piece is group for piece in pieces(group)] == [True]


@given(st.lists(st.sampled_from([0, 1, 1000, 20_000, PIECE_TOKENS, 60_000]), min_size=1, max_size=8))
def test_pieces_keep_every_rollout_in_order_and_join_to_the_group(lengths: list[int]) -> None:
    group = group_of(lengths)
    parts = list(pieces(group))
    assert all(sum(rollout.num_tokens for rollout in part.rollouts) <= PIECE_TOKENS for part in parts)
    whole = reduce(joined, parts, None)
    assert whole is not None
    assert [rollout.index for rollout in whole.rollouts] == list(range(len(lengths)))
    assert [rollout.token_ids_T.tolist() for rollout in whole.rollouts] == [
        [n] * size for n, size in enumerate(lengths)
    ]
    assert [len(rollout.policy_versions_T) for rollout in whole.rollouts] == lengths
    for rollout in whole.rollouts:
        assert np.array_equal(rollout.values_T - rollout.index, np.arange(rollout.num_tokens))
        assert np.array_equal(rollout.reference_logprobs_T, np.arange(rollout.num_tokens))
    assert whole.results == group.results
    assert whole.responses == tuple("" if size > PIECE_TOKENS else str(n) for n, size in enumerate(lengths))


@given(st.lists(st.sampled_from([0, 1, 1000, 20_000, PIECE_TOKENS, 60_000]), min_size=1, max_size=8))
def test_slices_hold_consecutive_rollouts_of_one_call(lengths: list[int]) -> None:
    rollouts = group_of(lengths).rollouts
    parts = [rollouts[part] for part in slices(rollouts)]
    assert [rollout.index for part in parts for rollout in part] == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(rollout.num_tokens for rollout in part) <= PIECE_TOKENS for part in parts)


@pytest.mark.parametrize("lengths", [[60_000] * 4, [4096] * 64, [180_000, 5, 180_000]])
def test_calls_can_carry_what_a_whole_group_could_not(lengths: list[int]) -> None:
    group = group_of(lengths)
    assert len(pickle.dumps(group)) > MAX_PAYLOAD_BYTES
    for part in chunks(pieces(group)):
        assert len(pickle.dumps(part)) <= MAX_PAYLOAD_BYTES


@pytest.mark.parametrize("lengths", [[], [0, 7], [30_000] * 8, [180_000] * 3, [90_000, 9_000, 180_000]])
def test_requests_with_long_partials_are_split_until_calls_carry_them(lengths: list[int]) -> None:
    request = GenerationRequest(
        group_id=7,
        prompt_token_ids_T=np.zeros(MAX_SEQUENCE_TOKENS - 180_000, np.int32),
        group_size=8,
        sampling=SamplingParams(),
        partials=group_of(lengths).rollouts if lengths else (),
    )
    parts = split(request)
    assert [partial.index for part in parts for partial in part.partials] == list(range(len(lengths)))
    wired = [replace(part, partials=tuple(map(ids_only, part.partials))) for part in parts]
    for call in chunks(wired):
        assert len(pickle.dumps(call)) <= MAX_PAYLOAD_BYTES


def test_the_limits_of_the_settings_fit_into_calls() -> None:
    (segment,) = group_of([MAX_SEGMENT_TOKENS], models=False).rollouts
    assert [len(part) for part in chunks([segment])] == [1]
    (whole,) = group_of([MAX_SEQUENCE_TOKENS]).rollouts
    assert [len(part) for part in chunks([ids_only(whole)])] == [1]
