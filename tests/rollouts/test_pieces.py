"""Groups that are larger than one call may carry."""

from __future__ import annotations

import pickle
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.cluster.api import MAX_PAYLOAD_BYTES, chunks
from llamarl.rollouts.pieces import PIECE_TOKENS, joined, pieces, slices
from llamarl.types import FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup


def group_of(lengths: list[int]) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            group_id=7,
            index=index,
            token_ids_T=np.full(length, index, np.int32),
            behavior_logprobs_T=np.zeros(length, np.float32),
            policy_versions_T=np.zeros(length, np.int32),
            finish_reason=FinishReason.STOP,
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
    assert all(
        len(part.rollouts) == 1 or sum(rollout.num_tokens for rollout in part.rollouts) <= PIECE_TOKENS
        for part in parts
    )
    whole = reduce(joined, parts, None)
    assert whole is not None
    assert [rollout.index for rollout in whole.rollouts] == list(range(len(lengths)))
    assert whole.results == group.results
    assert whole.responses == group.responses
    assert [part.stop - part.start for part in slices(group.rollouts)] == [len(part.rollouts) for part in parts]


@pytest.mark.parametrize("lengths", [[60_000] * 4, [4096] * 64])
def test_calls_can_carry_what_a_whole_group_could_not(lengths: list[int]) -> None:
    group = group_of(lengths)
    assert len(pickle.dumps(group)) > MAX_PAYLOAD_BYTES
    for part in chunks(pieces(group)):
        assert len(pickle.dumps(part)) <= MAX_PAYLOAD_BYTES
