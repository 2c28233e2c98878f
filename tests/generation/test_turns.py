"""Rollouts that an environment answers: each goes on alone, while others of its group decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.generation.engine import Engine
from llamarl.models.transformer import Transformer
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams, observed
from tests.generation.native import assert_same, drain, make_engine, run
from tests.nightly import examples, nightly

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=40, seed=3)


def request_of(group_id: int, size: int, segment: int) -> GenerationRequest:
    prompt_T = (np.arange(5 + group_id, dtype=np.int32) * 7 + group_id) % 40
    return GenerationRequest(
        group_id=group_id, prompt_token_ids_T=prompt_T, group_size=size, sampling=SAMPLING, segment_tokens=segment
    )


STOP = replace(SAMPLING, stop_token_ids=tuple(range(0, 40, 4)))


def talk(
    engine: Engine, requests: list[GenerationRequest], *, observation: int = 3, delay: int = 2,
    act: Callable[[int, dict[tuple[int, int], Rollout]], None] = lambda step, waiting: None,
) -> dict[tuple[int, int], Rollout]:  # fmt: skip
    """Rollouts whose every stop is answered after some steps, until they are long.

    Args:
        act: before each step, with those that wait.
    """
    by_id, waiting = {one.group_id: one for one in requests}, dict[tuple[int, int], tuple[int, Rollout]]()
    done, step = dict[tuple[int, int], Rollout](), 0
    engine.submit(requests)
    while engine.has_work or waiting:
        step += 1
        act(step, {key: rollout for key, (_, rollout) in waiting.items()})
        for rollout in engine.step():
            key = rollout.group_id, rollout.index
            limit = by_id[key[0]].sampling.max_new_tokens
            if rollout.finish_reason is FinishReason.STOP and rollout.num_tokens + observation < limit:
                waiting[key] = step + delay + rollout.index, rollout
            elif rollout.finish_reason is FinishReason.ABORTED:
                waiting[key] = step, rollout
            else:
                done[key] = rollout
                engine.release([key])
        for key, (due, rollout) in list(waiting.items()):
            if due <= step:
                del waiting[key]
                goes_on = answered(rollout, observation) if rollout.finish_reason is FinishReason.STOP else rollout
                engine.submit([replace(by_id[key[0]], partials=(goes_on,))])
    assert engine.stats().kv_use == 0, "what has ended holds nothing"
    return done


def turns_of(*, has_turns: bool, temperature: float = 1.0, groups: int = 4, size: int = 3) -> list[GenerationRequest]:
    sampling = replace(STOP, temperature=temperature)
    return [replace(request_of(n, size, 0), sampling=sampling, has_turns=has_turns) for n in range(groups)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_waits_is_not_computed_again(model: Transformer, temperature: float) -> None:
    """Tokens are those of an engine that holds nothing; only prompts and observations are prefilled, once each."""
    forgets, holds = make_engine(model, max_running=5), make_engine(model, max_running=5)
    expected = talk(forgets, turns_of(has_turns=False, temperature=temperature))
    requests = turns_of(has_turns=True, temperature=temperature)
    found = talk(holds, requests)
    assert_same(expected, found)
    observed_tokens = sum(int((~rollout.is_sampled_T).sum()) for rollout in found.values())
    prompts = sum(len(request.prompt_token_ids_T) - 1 for request in requests)
    assert sum(rollout.num_turns for rollout in found.values()) > 2 * len(found)
    assert holds.stats().prefill_tokens == prompts + observed_tokens
    assert forgets.stats().prefill_tokens > 2 * holds.stats().prefill_tokens


def test_those_that_have_waited_longest_are_evicted_first(model: Transformer) -> None:
    engine = make_engine(model, blocks=6, max_running=4)
    first, second = turns_of(has_turns=True, groups=2, size=1)
    waiting = []
    for request in (first, second):
        engine.submit([request])
        while engine.has_work:
            waiting += engine.step()
    before = engine.stats()
    assert before.kv_use == 4 / 6
    long_T = (np.arange(40, dtype=np.int32) * 3) % 40
    engine.submit([GenerationRequest(group_id=9, prompt_token_ids_T=long_T, group_size=1, sampling=SAMPLING)])
    engine.step()
    for request, rollout, is_held in ((second, waiting[1], True), (first, waiting[0], False)):
        engine.abort([9])
        start = engine.stats().prefill_tokens
        engine.submit([replace(request, partials=(answered(rollout, 3),))])
        engine.step()
        again = 0 if is_held else len(request.prompt_token_ids_T) - 1 + rollout.num_tokens
        assert engine.stats().prefill_tokens - start == 3 + again


@pytest.mark.parametrize("edit", ["token", "shorter"])
def test_an_edited_history_is_computed_anew(model: Transformer, edit: str) -> None:
    """What is held is of the turn as it was sampled."""
    (request,) = turns_of(has_turns=True, groups=1, size=1)
    engine, fresh = make_engine(model), make_engine(model)
    engine.submit([request])
    while engine.has_work:
        (*_, turn) = [None, *engine.step()]
    assert turn is not None and turn.finish_reason is FinishReason.STOP and turn.num_tokens > 2
    columns = {name: values_T.copy() for name, values_T in turn.columns.items()}
    columns["token_ids"][0] = (columns["token_ids"][0] + 1) % 40
    if edit == "shorter":
        columns = {name: values_T[:-2] for name, values_T in turn.columns.items()}
    partial = answered(replace(turn, columns=columns), 3)
    before, found = engine.stats().prefill_tokens, list[Rollout]()
    for one in (engine, fresh):
        one.submit([replace(request, partials=(partial,))])
        while one.has_work:
            found += one.step()
        one.release([(0, 0)])
    assert_same({(0, 0): found[0]}, {(0, 0): found[1]})
    prompt = len(request.prompt_token_ids_T) - 1
    assert engine.stats().prefill_tokens - before == fresh.stats().prefill_tokens - prompt
    assert engine.stats().kv_use == 0


def test_those_that_are_answered_go_on_before_others_begin(model: Transformer) -> None:
    engine, requests = make_engine(model, max_running=1), turns_of(has_turns=True, groups=4, size=1)
    engine.submit(requests)
    ended = list[Rollout]()
    while len(ended) < 2:
        ended += engine.step()
    engine.submit([replace(requests[one.group_id], partials=(answered(one, 3),)) for one in ended])
    while len(ended) < 6:
        ended += engine.step()
    assert [one.group_id for one in ended] == [0, 1, 0, 1, 2, 3]


@nightly("more of hypothesis; by day what waits is kept and goes on in the tests above")
@settings(max_examples=examples(25), deadline=None)
@given(
    blocks=st.integers(6, 40), running=st.integers(1, 6), observation=st.integers(1, 6), delay=st.integers(0, 9),
    recompute=st.booleans(), updates=st.lists(st.integers(1, 80), max_size=3),
    aborts=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 3)), max_size=3),
    releases=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 3)), max_size=3), greedy=st.booleans(),
)  # fmt: skip
def test_whatever_happens_meanwhile(
    model: Transformer, blocks: int, running: int, observation: int, delay: int, recompute: bool, updates: list[int],
    aborts: list[tuple[int, int]], releases: list[tuple[int, int]], greedy: bool,
) -> None:  # fmt: skip
    """Updates, aborts, replies that come elsewhere, too few blocks: the tokens are the same, and no block is lost."""
    temperature = 0.0 if greedy else 1.0
    expected = talk(make_engine(model, max_running=5), turns_of(has_turns=False, temperature=temperature),
                    observation=observation)  # fmt: skip
    policy = "recompute" if recompute else "keep"
    engine = make_engine(model, blocks=blocks, max_running=running, kv_on_update=policy)
    pool, held = engine._scheduler.pool, engine._scheduler.held

    def act(step: int, waiting: dict[tuple[int, int], Rollout]) -> None:
        if step in updates:
            engine.set_version(step)
            assert not held, "computed by older weights"
        for group_id in (group_id for at, group_id in aborts if at == step):
            engine._refused += engine.abort([group_id])
        engine.release([key for key in waiting if (step, key[0]) in releases])
        queued = {(one.group.request.group_id, one.index) for one in engine._scheduler.waiting}
        assert held.keys() <= waiting.keys() | queued
        groups = {id(one): one for s in (*engine._scheduler.active, *held.values()) for one in [s.group]}
        groups |= {id(one): one for one in engine._scheduler.groups.values()}
        segments = [one.own for one in (*engine._scheduler.active, *held.values())]
        taken = [block for segment in (*segments, *(one.prefix for one in groups.values())) for block in segment.blocks]
        assert len(set(taken)) == len(taken) == pool.num_blocks - pool.num_free

    found = talk(
        engine, turns_of(has_turns=True, temperature=temperature), observation=observation, delay=delay, act=act
    )
    assert_same(expected, found)


def test_an_id_that_is_used_again_is_another_request(model: Transformer) -> None:
    engine, (request,) = make_engine(model), turns_of(has_turns=True, groups=1, size=1)
    engine.submit([request])
    while engine.has_work:
        engine.step()
    assert engine.stats().kv_use > 0
    other = replace(request_of(3, 1, 0), group_id=0, has_turns=True)
    engine.submit([other])
    (found,) = drain(engine)
    (expected,) = run(make_engine(model), [other]).values()
    np.testing.assert_array_equal(found.token_ids_T, expected.token_ids_T)


def answered(rollout: Rollout, count: int) -> Rollout:
    """With what its environment says."""
    said_T = (np.arange(count, dtype=np.int32) + rollout.num_tokens + rollout.index) % 40
    return replace(rollout, columns=observed(rollout.columns, said_T), finish_reason=FinishReason.PARKED)


@settings(max_examples=examples(15), deadline=None)
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
