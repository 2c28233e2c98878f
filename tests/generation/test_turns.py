"""Rollouts that an environment answers: each goes on alone, while others of its group decode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.models.transformer import Transformer
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams, observed
from tests.generation.native import make_engine

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=40, seed=3)


def request_of(group_id: int, size: int, segment: int) -> GenerationRequest:
    prompt_T = (np.arange(5 + group_id, dtype=np.int32) * 7 + group_id) % 40
    return GenerationRequest(
        group_id=group_id, prompt_token_ids_T=prompt_T, group_size=size, sampling=SAMPLING, segment_tokens=segment
    )


def answered(rollout: Rollout, count: int) -> Rollout:
    """With what its environment says."""
    said_T = (np.arange(count, dtype=np.int32) + rollout.num_tokens + rollout.index) % 40
    return replace(rollout, columns=observed(rollout.columns, said_T), finish_reason=FinishReason.PARKED)


@settings(max_examples=15, deadline=None)
@given(
    segment=st.integers(1, 9), observation=st.integers(1, 6), delay=st.integers(0, 5),
    updates=st.lists(st.integers(1, 60), max_size=3), recompute=st.booleans(),
)  # fmt: skip
def test_log_probs_versions_and_masks(
    model: Transformer, segment: int, observation: int, delay: int, updates: list[int], recompute: bool
) -> None:
    """Whatever decodes beside it, log-probs are those of the weights given all tokens before, observed ones too."""
    engine = make_engine(model, max_running=5, kv_on_update="recompute" if recompute else "keep")
    requests = {group_id: request_of(group_id, 3, segment) for group_id in range(3)}
    engine.submit(requests.values())
    waiting, done, step = list[tuple[int, Rollout]](), list[Rollout](), 0
    while engine.has_work or waiting:
        step += 1
        if step in updates:
            engine.set_version(step)  # the same weights, by another name
        for rollout in engine.step() if engine.has_work else ():
            if rollout.finish_reason is FinishReason.PARKED and rollout.num_tokens + observation < 40:
                waiting.append((step + delay + rollout.index, answered(rollout, observation)))
            else:
                done.append(rollout)
        for due, rollout in list(waiting):
            if due <= step:
                waiting.remove((due, rollout))
                engine.submit([replace(requests[rollout.group_id], partials=(rollout,))])
    assert sorted((one.group_id, one.index) for one in done) == [(g, i) for g in range(3) for i in range(3)]
    for rollout in done:
        sequence = np.concatenate([requests[rollout.group_id].prompt_token_ids_T, rollout.token_ids_T])
        (scored,) = engine.score([sequence])
        mask_T = rollout.is_sampled_T
        np.testing.assert_allclose(
            rollout.behavior_logprobs_T[mask_T], scored[-rollout.num_tokens :][mask_T], atol=1e-4
        )
        assert not rollout.behavior_logprobs_T[~mask_T].any()
        assert [len(part) for is_sampled, part in rollout.turns if not is_sampled] == [observation] * int(
            (~mask_T).sum() // observation
        )
        versions = rollout.policy_versions_T[mask_T]
        assert (np.diff(versions) >= 0).all() and set(versions) <= {0, *updates}
    assert engine.stats().kv_use == 0


def test_an_observation_that_fills_the_context_ends_the_rollout(model: Transformer) -> None:
    """With what was sampled before it."""
    engine, request = make_engine(model, max_running=5), request_of(0, 1, 4)
    context = model.shape.max_position_embeddings
    request = replace(request, sampling=replace(SAMPLING, max_new_tokens=2 * context))
    engine.submit([request])
    parked: list[Rollout] = []
    while not parked:
        parked = engine.step()
    room = context - len(request.prompt_token_ids_T) - 4
    for count, tokens in ((room - 1, 4 + room), (room, 4)):
        engine.submit([replace(request, partials=(answered(parked[0], count),))])
        ended = list[Rollout]()
        while not ended:
            ended = engine.step()
        assert (ended[0].finish_reason, ended[0].num_tokens, ended[0].error) == (FinishReason.LENGTH, tokens, "")
    np.testing.assert_array_equal(ended[0].token_ids_T, parked[0].token_ids_T)


def test_a_rollout_is_not_submitted_twice(model: Transformer) -> None:
    engine = make_engine(model, max_running=5)
    request = request_of(0, 2, 4)
    engine.submit([request])
    with pytest.raises(ValueError, match=r"rollouts \[0, 1\] of group 0 are submitted twice"):
        engine.submit([request])
    parked = None
    while parked is None:
        parked = next((one for one in engine.step() if one.index == 0), None)
    engine.submit([replace(request, partials=(parked,))])
    with pytest.raises(ValueError, match=r"rollouts \[0\] of group 0 are submitted twice"):
        engine.submit([replace(request, partials=(parked,))])
