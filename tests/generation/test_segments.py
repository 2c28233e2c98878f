"""Partial rollouts: cut anywhere, resumed anywhere, the same rollout comes out.

What holds on CPU in float32. Bit for bit: the noise of every token; and everything, log-probabilities included, when an
engine repeats the same steps. Matrix products round differently for other batch shapes, so across segmentations and
engines logits differ in their last bits: a token differs only when two candidates lie within that rounding. On the
model of these tests that never happens; `test_tokens_that_rounding_changes` measures how often on a larger one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from llamarl.generation.engine import Engine
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.types import FinishReason, GenerationRequest, Rollout
from tests.generation.native import GREEDY, SAMPLED, assert_same, drain, make_engine, run
from tests.generation.references import Key, by_key, resumed, run_segments
from tests.nightly import examples, nightly

Requests = Callable[..., list[GenerationRequest]]


@pytest.fixture(scope="module")
def expected(model: Transformer, make_requests: Requests) -> dict[bool, dict[Key, Rollout]]:
    """By greedy: rollouts that nothing disturbed."""
    return {
        sampling is GREEDY: run(make_engine(model, max_running=64, prefill_tokens=1000), make_requests(5, sampling))
        for sampling in (GREEDY, SAMPLED)
    }


def resubmit(request: GenerationRequest, partials: list[Rollout], engines: list[Engine], rng: random.Random) -> None:
    """Some of a group's partial rollouts go on in an engine without others of the group."""
    free = [engine for engine in engines if request.group_id not in engine._scheduler.groups]
    if free and partials:
        taken = tuple(partials.pop() for _ in range(rng.randint(1, len(partials))))
        rng.choice(free).submit([replace(request, partials=taken)])


def disturbed_step(engine: Engine, version: int, rng: random.Random) -> list[Rollout]:
    """A step, and seldom an update to the same weights or an abort."""
    left = engine.step()
    if rng.random() < 0.06:
        engine.set_version(version)
    if rng.random() < 0.06:
        left += engine.abort(rng.sample(range(10, 15), 2))
    return left


@settings(deadline=None, max_examples=examples(10), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.booleans(), st.integers(0, 26), st.integers(1, 3), st.integers(0, 2**32))
def test_a_rollout_does_not_depend_on_how_it_was_cut(
    model: Transformer,
    make_requests: Requests,
    expected: dict[bool, dict[Key, Rollout]],
    greedy: bool,
    segment_tokens: int,
    num_engines: int,
    seed: int,
) -> None:
    """Parked, aborted, preempted, recomputed and moved between engines at random."""
    rng = random.Random(seed)
    requests = make_requests(5, GREEDY if greedy else SAMPLED)
    by_group = {one.group_id: replace(one, segment_tokens=segment_tokens) for one in requests}
    engines = [
        make_engine(
            model, blocks=rng.randint(8, 30), max_running=rng.randint(1, 9), prefill_tokens=rng.randint(3, 64),
            kv_on_update=rng.choice(["keep", "recompute"]),
        )
        for _ in range(num_engines)
    ]  # fmt: skip
    for request in by_group.values():
        rng.choice(engines).submit([request])
    last = dict[Key, Rollout]()
    pending, done = {group_id: list[Rollout]() for group_id in by_group}, list[Rollout]()
    for version in range(2000):
        for group_id, partials in pending.items():
            resubmit(by_group[group_id], partials, engines, rng)
        for rollout in [one for engine in engines for one in disturbed_step(engine, version, rng)]:
            key = (rollout.group_id, rollout.index)
            assert_prefix(last.get(key, rollout), rollout)
            last[key] = rollout
            partial = rollout.finish_reason in (FinishReason.PARKED, FinishReason.ABORTED)
            (pending[rollout.group_id] if partial else done).append(rollout)
        if not any(pending.values()) and not any(engine.has_work for engine in engines):
            break
    assert_same(by_key(done), expected[greedy])
    for engine in engines:
        assert drain(engine) == []


def assert_prefix(partial: Rollout, rollout: Rollout) -> None:
    """What a generator was given it hands on bit for bit."""
    count = partial.num_tokens
    np.testing.assert_array_equal(rollout.token_ids_T[:count], partial.token_ids_T)
    np.testing.assert_array_equal(rollout.behavior_logprobs_T[:count], partial.behavior_logprobs_T)
    np.testing.assert_array_equal(rollout.policy_versions_T[:count], partial.policy_versions_T)


def test_the_same_steps_give_the_same_bits(model: Transformer, make_requests: Requests) -> None:
    requests = [replace(request, segment_tokens=9) for request in make_requests(5, SAMPLED)]
    first, second = (run_segments(make_engine(model, blocks=14), requests)[0] for _ in range(2))
    for key, rollout in first.items():
        np.testing.assert_array_equal(rollout.token_ids_T, second[key].token_ids_T)
        np.testing.assert_array_equal(rollout.behavior_logprobs_T, second[key].behavior_logprobs_T)


def test_a_group_in_segments_shares_one_prefill_of_its_prompt(model: Transformer, make_requests: Requests) -> None:
    request = replace(make_requests(2, SAMPLED, group_size=3)[1], segment_tokens=10)
    engine = make_engine(model)
    parked = run(engine, [request])
    assert engine.stats().prefill_tokens == 16
    run(engine, resumed([request], parked.values()))
    assert engine.stats().prefill_tokens == 16 + 16 + 3 * 10, "the prefix once, then the own tokens that were fed"


def test_only_the_partials_given_go_on(model: Transformer, make_requests: Requests) -> None:
    """Also one without tokens; a bad one fails alone."""
    request = replace(make_requests(3, GREEDY)[2], segment_tokens=8)
    whole = run(make_engine(model), [replace(request, segment_tokens=0)])
    parked = run(make_engine(model, version=4), [request])
    fresh = Rollout.empty(12, 2, FinishReason.ABORTED)
    bad = replace(parked[12, 1], columns=parked[12, 1].columns | {"token_ids": parked[12, 1].token_ids_T + 40})
    again = replace(request, segment_tokens=0, partials=(parked[12, 0], bad, fresh))
    rollouts = run(make_engine(model, version=3), [again])
    assert (
        rollouts.pop((12, 1)).error
        == f"partial rollout 1 has token id {bad.token_ids_T[0]}, outside the vocabulary of 40"
    )
    assert_same(rollouts, {key: whole[key] for key in ((12, 0), (12, 2))})
    assert rollouts[12, 0].policy_versions_T.tolist() == [4] * 8 + [3] * 16
    assert rollouts[12, 0].oldest_version == 3


def test_columns_of_a_partial_go_on_with_their_default(model: Transformer, make_requests: Requests) -> None:
    """Whatever a rollout was parked with comes back, parked again in between."""
    request = replace(make_requests(3, GREEDY)[2], segment_tokens=8)
    parked = run(make_engine(model), [request])
    marked = tuple(
        replace(one, columns=one.columns | {"loss_mask": np.zeros(one.num_tokens, bool)}) for one in parked.values()
    )
    for engine in (make_engine(model), make_engine(model, max_running=1)):
        again = run(engine, [replace(request, partials=marked)])
        for rollout in again.values():
            assert rollout.columns["loss_mask"].tolist() == [False] * 8 + [True] * (rollout.num_tokens - 8)
            assert rollout.columns["loss_mask"].dtype == bool


@nightly("more of hypothesis; by day a rollout does not depend on how it was cut")
def test_tokens_that_rounding_changes() -> None:
    """How often a sampled token changes with the batch, in a random model of 2,000 tokens: seldom."""
    shape = ModelShape(
        family="llama", hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256,
        vocab_size=2000, max_position_embeddings=128,
    )  # fmt: skip
    model = Transformer(shape)
    model.initialize(0, std=0.05)
    sampling = replace(SAMPLED, temperature=1.0, max_new_tokens=64)
    request = GenerationRequest(
        group_id=1, prompt_token_ids_T=np.arange(20, dtype=np.int32), group_size=64, sampling=sampling
    )  # fmt: skip
    together = run(make_engine(model, max_running=64), [request])
    cut, _ = run_segments(make_engine(model, max_running=7, prefill_tokens=50), [replace(request, segment_tokens=13)])
    compared = differing = 0
    for key, rollout in together.items():
        differs_T = rollout.token_ids_T != cut[key].token_ids_T
        # After the first one everything differs.
        compared += int(differs_T.argmax()) + 1 if differs_T.any() else len(differs_T)
        differing += bool(differs_T.any())
    assert compared > 3000
    assert differing / compared < 2e-3, f"{differing} of {compared} tokens"
