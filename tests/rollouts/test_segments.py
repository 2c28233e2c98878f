"""Partial rollouts: what travels, and what comes together again."""

from __future__ import annotations

import numpy as np

from llamarl.rollouts.segments import continued, cut_out, ids_only, not_begun, padded, partials_of
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams


def rollout(first: int, stop: int, version: int, reason: FinishReason) -> Rollout:
    return Rollout(
        group_id=3,
        index=1,
        token_ids_T=np.arange(first, stop, dtype=np.int32),
        behavior_logprobs_T=-np.arange(first, stop, dtype=np.float32),
        policy_versions_T=np.full(stop - first, version, np.int32),
        finish_reason=reason,
    )


def request(*partials: Rollout) -> GenerationRequest:
    return GenerationRequest(
        group_id=3, prompt_token_ids_T=np.ones(1, np.int32), group_size=4, sampling=SamplingParams(), partials=partials
    )


def test_segments_become_one_rollout() -> None:
    parked = rollout(0, 5, 2, FinishReason.PARKED)
    whole = continued(continued(not_begun(3, 1), parked), rollout(5, 7, 1, FinishReason.STOP))
    assert whole.token_ids_T.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert whole.behavior_logprobs_T.tolist() == [0, -1, -2, -3, -4, -5, -6]
    assert whole.policy_versions_T.tolist() == [2, 2, 2, 2, 2, 1, 1]
    assert whole.finish_reason is FinishReason.STOP
    assert whole.oldest_version == 1, "an older generator went on with it"
    again = cut_out(whole, 5)
    assert again.token_ids_T.tolist() == [5, 6] and len(again.policy_versions_T) == 2


def test_a_fresh_request_begins_with_nothing_for_each_rollout() -> None:
    assert [(one.index, one.num_tokens) for one in partials_of(request())] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    parked = rollout(0, 5, 2, FinishReason.PARKED)
    assert list(partials_of(request(parked))) == [parked]


def test_token_ids_alone_travel_and_engines_get_arrays_of_one_length() -> None:
    sent = ids_only(rollout(0, 5, 2, FinishReason.ABORTED))
    assert (len(sent.token_ids_T), len(sent.behavior_logprobs_T), len(sent.policy_versions_T)) == (5, 0, 0)
    (got,) = padded(request(sent)).partials
    assert (len(got.token_ids_T), len(got.behavior_logprobs_T), len(got.policy_versions_T)) == (5, 5, 5)
    assert got.finish_reason is FinishReason.ABORTED
