"""The engine against slow references on a tiny float32 model.

Batch composition changes the shape of matrix products and with it the last bits of logits. So what holds is: the same
tokens unless two candidates are within rounding of each other (here: never), and log-probs equal to about 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.generation.attention import DecodePlan
from llamarl.generation.engine import Engine
from llamarl.generation.kv_cache import KVCache
from llamarl.models.attention import causal_attend
from llamarl.models.transformer import Transformer
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams

Requests = Callable[..., list[GenerationRequest]]
Models = Callable[..., Transformer]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, max_new_tokens=24, seed=5)


def make_engine(
    model: Transformer, blocks: int | None = 400, max_running: int = 16, prefill_tokens: int = 64, version: int = 0
) -> Engine:
    shape = model.shape
    block_bytes = KVCache.block_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, torch.float32)
    kv_bytes = None if blocks is None else blocks * block_bytes
    return Engine(model, max_running=max_running, prefill_tokens=prefill_tokens, kv_bytes=kv_bytes, version=version)


def drain(engine: Engine) -> list[Rollout]:
    rollouts = []
    for _ in range(5000):
        if not engine.has_work:
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.kv_use) == (0, 0, 0.0)
            return rollouts
        rollouts += engine.step()
    raise AssertionError("the engine does not finish")


def run(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[tuple[int, int], Rollout]:
    engine.submit(list(requests))
    rollouts = drain(engine)
    result = {(rollout.group_id, rollout.index): rollout for rollout in rollouts}
    assert len(result) == len(rollouts), "each rollout is returned once"
    return result


@torch.no_grad()
def full_logits(model: Transformer, token_ids_T: np.ndarray) -> Tensor:
    token_ids = torch.from_numpy(token_ids_T.astype(np.int64))
    return model.logits(model(token_ids, torch.arange(len(token_ids)), causal_attend([len(token_ids)])))


def response_logits(model: Transformer, request: GenerationRequest, rollout: Rollout) -> Tensor:
    """Logits that predict each response token, by one full forward."""
    tokens_T = np.concatenate((request.prompt_token_ids_T, rollout.token_ids_T))
    return full_logits(model, tokens_T)[len(request.prompt_token_ids_T) - 1 : -1]


def assert_same(left: dict[tuple[int, int], Rollout], right: dict[tuple[int, int], Rollout]) -> None:
    assert left.keys() == right.keys()
    for key, rollout in left.items():
        np.testing.assert_array_equal(rollout.token_ids_T, right[key].token_ids_T)
        np.testing.assert_allclose(rollout.behavior_logprobs_T, right[key].behavior_logprobs_T, atol=2e-5)
        assert rollout.finish_reason == right[key].finish_reason


@pytest.mark.parametrize(("family", "num_kv_heads"), [("llama", 2), ("llama", 4), ("qwen3", 1)])
def test_greedy_equals_a_full_forward_per_token(
    make_model: Models, make_requests: Requests, family: str, num_kv_heads: int
) -> None:
    model = make_model(family=family, num_kv_heads=num_kv_heads)
    requests = make_requests(5, GREEDY)
    rollouts = run(make_engine(model), requests)
    for request in requests:
        tokens = request.prompt_token_ids_T
        for _ in range(GREEDY.max_new_tokens):
            tokens = np.append(tokens, np.int32(full_logits(model, tokens)[-1].argmax()))
        for index in range(request.group_size):
            rollout = rollouts[request.group_id, index]
            np.testing.assert_array_equal(rollout.token_ids_T, tokens[len(request.prompt_token_ids_T) :])
            assert rollout.finish_reason == FinishReason.LENGTH


def test_records_are_typed_arrays(model: Transformer, make_requests: Requests) -> None:
    rollout = run(make_engine(model, version=3), make_requests(1, SAMPLED))[10, 0]
    dtypes = [rollout.token_ids_T.dtype, rollout.behavior_logprobs_T.dtype, rollout.policy_versions_T.dtype]
    assert dtypes == [np.int32, np.float32, np.int32]
    assert rollout.policy_versions_T.tolist() == [3] * 24
    assert len(rollout.token_ids_T) == len(rollout.behavior_logprobs_T) == 24


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_behavior_logprobs_equal_a_full_forward(
    model: Transformer, make_requests: Requests, temperature: float
) -> None:
    requests = make_requests(6, SamplingParams(temperature=temperature, max_new_tokens=40))
    for key, rollout in run(make_engine(model), requests).items():
        logits = response_logits(model, requests[key[0] - 10], rollout) / (temperature or 1.0)
        expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(rollout.token_ids_T).long()[:, None])[:, 0]
        np.testing.assert_allclose(rollout.behavior_logprobs_T, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_behavior_logprobs_include_truncation(
    model: Transformer, make_requests: Requests, truncation: dict[str, Any]
) -> None:
    requests = make_requests(4, SamplingParams(temperature=1.2, max_new_tokens=30, **truncation))
    for key, rollout in run(make_engine(model), requests).items():
        logits = response_logits(model, requests[key[0] - 10], rollout).double()
        for probs, token, logprob in zip(
            torch.softmax(logits / 1.2, -1), rollout.token_ids_T, rollout.behavior_logprobs_T, strict=True
        ):
            ranked = probs.sort(descending=True).values
            if "top_k" in truncation:
                mass = ranked[:5].sum()
            elif "top_p" in truncation:
                mass = ranked[: int((ranked.cumsum(0) < 0.8).sum()) + 1].sum()
            else:
                mass = ranked[ranked >= 0.1 * ranked[0]].sum()
            assert abs(float((probs[token] / mass).log()) - logprob) < 1e-4


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
class TestARolloutDoesNotDependOn:
    @pytest.fixture
    def requests(self, make_requests: Requests, sampling: SamplingParams) -> list[GenerationRequest]:
        return make_requests(7, sampling)

    @pytest.fixture
    def expected(self, model: Transformer, requests: list[GenerationRequest]) -> dict[tuple[int, int], Rollout]:
        return run(make_engine(model, max_running=64, prefill_tokens=1000), requests)

    def test_its_neighbours(self, model: Transformer, requests: list, expected: dict) -> None:
        alone = {}
        for request in requests:
            alone |= run(make_engine(model), [request])
        assert_same(alone, expected)

    def test_few_places(self, model: Transformer, requests: list, expected: dict) -> None:
        assert_same(run(make_engine(model, max_running=2), requests), expected)

    def test_chunked_prefill(self, model: Transformer, requests: list, expected: dict) -> None:
        assert_same(run(make_engine(model, prefill_tokens=5), requests), expected)

    def test_parking(self, model: Transformer, requests: list, expected: dict) -> None:
        engine = make_engine(model, blocks=14, prefill_tokens=9)
        assert_same(run(engine, requests), expected)
        assert engine.stats().parked > 0

    def test_the_order_of_submission(self, model: Transformer, requests: list, expected: dict) -> None:
        assert_same(run(make_engine(model), requests[::-1]), expected)

    def test_the_size_of_its_group(
        self, model: Transformer, make_requests: Requests, sampling: SamplingParams, expected: dict
    ) -> None:
        larger = run(make_engine(model, max_running=40), make_requests(7, sampling, group_size=6))
        assert_same({key: rollout for key, rollout in larger.items() if key[1] < 3}, expected)


def test_rollouts_of_a_group_differ_and_seeds_matter(model: Transformer, make_requests: Requests) -> None:
    first = run(make_engine(model), make_requests(2, SAMPLED))
    other = run(make_engine(model), make_requests(2, SamplingParams(temperature=0.9, max_new_tokens=24, seed=6)))
    tokens = [tuple(rollout.token_ids_T) for rollout in (*first.values(), *other.values())]
    assert len(set(tokens)) == len(tokens)


def test_sparse_blocks_give_the_same_rollouts(model: Transformer, make_requests: Requests) -> None:
    """One rollout far from its neighbours in the cache: decode gathers blocks instead of reading a range."""
    requests = make_requests(3, GREEDY, group_size=1)
    engine = make_engine(model)
    pool = engine._scheduler.pool
    blocks = [pool.take_low() for _ in range(200)]
    engine.submit(requests[:1])
    engine.step()
    pool.release(blocks)
    engine.submit(requests[1:])
    engine.step()
    plan = DecodePlan(engine._cache, engine._rows, model.shape.num_heads, torch.float32)
    assert isinstance(plan._sets[0].blocks, Tensor)
    rollouts = {(rollout.group_id, rollout.index): rollout for rollout in drain(engine)}
    assert_same(rollouts, run(make_engine(model), requests))


class CachedReference:
    """One sequence, one token at a time, keys and values kept whatever the weights are."""

    def __init__(self, num_layers: int) -> None:
        self.past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def attend(self, layer: int, q_1_H_K: Tensor, k_1_J_K: Tensor, v_1_J_K: Tensor) -> Tensor:
        self.past[layer].append((k_1_J_K, v_1_J_K))
        rep = q_1_H_K.shape[1] // k_1_J_K.shape[1]
        keys, values = (torch.cat(x).repeat_interleave(rep, dim=1) for x in zip(*self.past[layer], strict=True))
        scores = torch.einsum("hk,thk->ht", q_1_H_K[0], keys) * q_1_H_K.shape[-1] ** -0.5
        return torch.einsum("ht,thk->hk", torch.softmax(scores, -1), values)[None]

    @torch.no_grad()
    def logits(self, model: Transformer, token: int, position: int) -> Tensor:
        return model.logits(model(torch.tensor([token]), torch.tensor([position]), self.attend))[0]


def test_new_weights_between_two_steps_count_from_the_next_token(make_model: Models, make_requests: Requests) -> None:
    """Exactly the old weights' tokens before, the new weights' tokens over the kept cache after."""
    old, new, served = make_model(seed=1), make_model(seed=2), make_model(seed=1)
    requests = make_requests(3, GREEDY, group_size=2)
    engine = make_engine(served, version=7)
    engine.submit(requests)
    for _ in range(9):
        assert engine.step() == []
    served.load_state_dict(new.state_dict())
    engine.set_version(8)
    rollouts = drain(engine)
    assert len(rollouts) == 6
    for rollout in rollouts:
        assert rollout.policy_versions_T.tolist() == [7] * 9 + [8] * 15
        prompt = next(r.prompt_token_ids_T for r in requests if r.group_id == rollout.group_id)
        reference = CachedReference(old.shape.num_layers)
        fed, tokens = prompt.tolist(), []
        for position in range(len(prompt) + 23):
            current = old if len(tokens) < 9 else new
            logits = reference.logits(current, fed[position], position)
            if position >= len(prompt) - 1:
                tokens.append(int(logits.argmax()))
                fed.append(tokens[-1])
        assert rollout.token_ids_T.tolist() == tokens


def test_abort_returns_tokens_so_far_and_frees_everything(model: Transformer, make_requests: Requests) -> None:
    requests = make_requests(6, SAMPLED)
    whole = run(make_engine(model), requests)
    engine = make_engine(model, max_running=7)
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    aborted = engine.abort([10, 12, 15, 999])
    assert sorted((r.group_id, r.index) for r in aborted) == [(g, i) for g in (10, 12, 15) for i in range(3)]
    for rollout in aborted:
        assert rollout.finish_reason == FinishReason.ABORTED
        expected_T = whole[rollout.group_id, rollout.index].token_ids_T
        np.testing.assert_array_equal(rollout.token_ids_T, expected_T[: rollout.num_tokens])
    assert {r.num_tokens for r in aborted if r.group_id == 10} == {5}
    assert {r.num_tokens for r in aborted if r.group_id == 15} == {0}
    rest = {(r.group_id, r.index): r for r in drain(engine)}
    assert_same(rest, {key: rollout for key, rollout in whole.items() if key[0] in (11, 13, 14)})
    assert engine.abort([11]) == []


def test_stop_tokens_end_a_rollout_and_belong_to_it(model: Transformer, make_requests: Requests) -> None:
    free = run(make_engine(model), make_requests(3, SAMPLED))
    stops = (int(free[10, 0].token_ids_T[4]), int(free[11, 1].token_ids_T[7]))
    sampling = SamplingParams(temperature=0.9, max_new_tokens=24, seed=5, stop_token_ids=stops)
    stopped = run(make_engine(model), make_requests(3, sampling))
    for key, rollout in stopped.items():
        hits = np.flatnonzero(np.isin(free[key].token_ids_T, stops))
        length = hits[0] + 1 if len(hits) else 24
        np.testing.assert_array_equal(rollout.token_ids_T, free[key].token_ids_T[:length])
        assert rollout.finish_reason == (FinishReason.STOP if len(hits) else FinishReason.LENGTH)
    assert stopped[10, 0].finish_reason == FinishReason.STOP


def test_the_end_of_the_context_ends_a_rollout(model: Transformer) -> None:
    context = model.shape.max_position_embeddings
    for length in (context - 3, context - 1):
        prompt_T = np.arange(length, dtype=np.int32) % model.shape.vocab_size
        sampling = SamplingParams(max_new_tokens=50)
        request = GenerationRequest(group_id=0, prompt_token_ids_T=prompt_T, group_size=2, sampling=sampling)
        for rollout in run(make_engine(model), [request]).values():
            assert (rollout.num_tokens, rollout.finish_reason) == (context - length, FinishReason.LENGTH)


SHORT = SamplingParams(max_new_tokens=4)
BAD = {
    "the prompt is empty": ([], SHORT),
    "the prompt has 96 tokens and the context 96": ([1] * 96, SHORT),
    "token id 40, outside the vocabulary of 40": ([1, 40], SHORT),
    "token id -1, outside the vocabulary of 40": ([-1], SHORT),
    "too few for a prompt of 20 and a response of 60": ([1] * 20, replace(SHORT, max_new_tokens=60)),
    "temperature = -1.0": ([1], replace(SHORT, temperature=-1.0)),
    "temperature = nan": ([1], replace(SHORT, temperature=float("nan"))),
    "top_p = 0.0": ([1], replace(SHORT, top_p=0.0)),
    "top_k = -2": ([1], replace(SHORT, top_k=-2)),
    "min_p = 1.5": ([1], replace(SHORT, min_p=1.5)),
    "max_new_tokens = 0": ([1], replace(SHORT, max_new_tokens=0)),
}


def test_bad_requests_fail_with_a_reason_and_the_others_go_on(model: Transformer, make_requests: Requests) -> None:
    good = make_requests(2, GREEDY)
    bad = []
    for i, (prompt, sampling) in enumerate(BAD.values()):
        prompt_T = np.array(prompt, np.int32)
        bad.append(GenerationRequest(group_id=i + 100, prompt_token_ids_T=prompt_T, group_size=2, sampling=sampling))
    engine = make_engine(model, blocks=4, max_running=4)
    rollouts = run(engine, [*bad[:3], good[0], *bad[3:], good[1]])
    for i, message in enumerate(BAD):
        for index in range(2):
            failed = rollouts.pop((i + 100, index))
            assert failed.finish_reason == FinishReason.FAILED
            assert message in failed.error
            assert (failed.num_tokens, failed.oldest_version) == (0, -1)
    assert_same(rollouts, run(make_engine(model), good))


def test_a_group_id_in_use_is_refused_before_anything_is_queued(model: Transformer, make_requests: Requests) -> None:
    requests = make_requests(3, GREEDY)
    engine = make_engine(model)
    engine.submit(requests[:1])
    with pytest.raises(ValueError, match="10"):
        engine.submit([requests[1], requests[0]])
    with pytest.raises(ValueError, match="12"):
        engine.submit([requests[2], requests[2]])
    assert {rollout.group_id for rollout in drain(engine)} == {10}


def test_logits_that_are_not_finite_fail_only_the_rollouts_that_have_them(
    make_model: Models, make_requests: Requests
) -> None:
    """One token has a NaN embedding. Blocks that held its keys serve others later without harm."""
    clean, poisoned = make_model(seed=4), make_model(seed=4)
    requests = make_requests(8, GREEDY, seed=3)
    token = int(requests[1].prompt_token_ids_T[3])
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[token] = float("nan")
    bad = {request.group_id for request in requests if token in request.prompt_token_ids_T}
    assert 0 < len(bad) < len(requests)
    expected = run(make_engine(clean), requests)
    rollouts = run(make_engine(poisoned, blocks=16, max_running=6, prefill_tokens=20), requests)
    for key, rollout in rollouts.items():
        full_T = expected[key].token_ids_T
        if key[0] in bad:
            assert (rollout.finish_reason, rollout.error) == (FinishReason.FAILED, "non-finite logits")
            assert rollout.num_tokens == 0
        elif token in full_T[:-1]:
            assert rollout.finish_reason == FinishReason.FAILED
            np.testing.assert_array_equal(rollout.token_ids_T, full_T[: list(full_T).index(token) + 1])
        else:
            assert_same({key: rollout}, {key: expected[key]})


def test_stats_count_what_was_done(model: Transformer, make_requests: Requests) -> None:
    engine = make_engine(model, max_running=4)
    requests = make_requests(2, GREEDY, group_size=3)
    engine.submit(requests)
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.steps, stats.decode_tokens) == (4, 2, 1, 4)
    assert stats.prefill_tokens == 16, "the prompts without their last tokens: 0 and 16"
    assert 0 < stats.kv_use < 1
    drain(engine)
    stats = engine.stats()
    assert (stats.decode_tokens, stats.prefill_tokens, stats.parked) == (6 * 24, 16, 0)


def test_bfloat16_and_default_memory(make_model: Models, make_requests: Requests) -> None:
    model = make_model(seed=0).to(torch.bfloat16)
    requests = make_requests(4, SamplingParams(max_new_tokens=30))
    for key, rollout in run(make_engine(model, blocks=None), requests).items():
        logits = response_logits(model, requests[key[0] - 10], rollout).float()
        expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(rollout.token_ids_T).long()[:, None])[:, 0]
        assert np.abs(rollout.behavior_logprobs_T - expected.numpy()).mean() < 0.1
