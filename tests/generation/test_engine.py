"""What is particular to the native engine; what every backend does is in `conformance.py`.

Batch composition changes the shape of matrix products and with it the last bits of logits. So what holds is: the same
tokens unless two candidates are within rounding of each other (here: never), and log-probs equal to about 1e-5.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.config.errors import ConfigError
from llamarl.generation.engine import kv_budget
from llamarl.generation.model import GeneratorModel
from llamarl.generation.scheduler import StopStrings
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams
from tests.generation.conftest import CONTEXT
from tests.generation.native import GREEDY, SAMPLED, assert_same, drain, make_engine, run
from tests.generation.references import assert_greedy, by_key, full_logits, gathered, response_logits, run_segments
from tests.nightly import examples

Requests = Callable[..., list[GenerationRequest]]
Models = Callable[..., Transformer]


@pytest.mark.parametrize(("family", "num_kv_heads"), [("llama", 2), ("llama", 4), ("qwen3", 1)])
def test_greedy_equals_a_full_forward(
    make_model: Models, make_requests: Requests, family: str, num_kv_heads: int
) -> None:
    model = make_model(family=family, num_kv_heads=num_kv_heads)
    requests = make_requests(5, GREEDY)
    rollouts = run(make_engine(model), requests)
    for key, rollout in rollouts.items():
        assert (rollout.finish_reason, rollout.num_tokens) == (FinishReason.LENGTH, 24)
        assert_greedy(response_logits(model, requests[key[0] - 10].prompt_token_ids_T, rollout), rollout)


@pytest.mark.parametrize(
    ("model_type", "scaling"),
    [
        ("mistral", None),
        ("mistral", {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12}),
        ("qwen3", {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12, "beta_fast": 2.0}),
        ("qwen2", {"rope_type": "linear", "factor": 4.0}),
    ],
)
def test_greedy_equals_transformers_beyond_the_original_context(
    make_model: Models, make_requests: Requests, model_type: str, scaling: dict[str, Any] | None
) -> None:
    shape = make_model(family=model_type).shape
    model = Transformer(ModelShape.from_hf({**shape.to_hf(), "rope_scaling": scaling}))
    model.initialize(0, std=0.25)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.shape.to_hf()))
    theirs.load_state_dict(model.state_dict())
    requests = make_requests(5, GREEDY)
    assert max(len(request.prompt_token_ids_T) for request in requests) > 12
    for key, rollout in run(make_engine(model), requests).items():
        prompt = torch.from_numpy(requests[key[0] - 10].prompt_token_ids_T)
        ids = torch.cat([prompt, torch.from_numpy(rollout.token_ids_T)]).long()
        with torch.no_grad():
            assert_greedy(theirs(ids[None]).logits[0, len(prompt) - 1 : -1], rollout)


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

    def test_what_other_prompts_begin_with(self, model: Transformer, requests: list) -> None:
        """Prompts that begin alike prefill that beginning once, within a step and over several."""
        common_T = np.arange(37, dtype=np.int32)
        alike = [
            replace(one, prompt_token_ids_T=np.concatenate((common_T, one.prompt_token_ids_T[:20]))) for one in requests
        ]
        alone = {}
        for request in alike:
            alone |= run(make_engine(model), [request])
        for options in ({"prefill_tokens": 1000}, {"prefill_tokens": 7, "max_running": 4}, {"blocks": 18}):
            engine = make_engine(model, **options)
            assert_same(run(engine, alike), alone)
            if "blocks" not in options:
                assert engine.stats().prefill_tokens < sum(len(one.prompt_token_ids_T) for one in alike) - 32

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
    assert_same(by_key(drain(engine)), {key: rollout for key, rollout in whole.items() if key[0] in (11, 13, 14)})
    assert engine.abort([11]) == []


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
    "temperature = 1e-300": ([1], replace(SHORT, temperature=1e-300)),
    "top_p = 0.0": ([1], replace(SHORT, top_p=0.0)),
    "top_k = -2": ([1], replace(SHORT, top_k=-2)),
    "top_k = 4294967296": ([1], replace(SHORT, top_k=1 << 32)),
    "stop_token_ids = (18446744073709551616,)": ([1], replace(SHORT, stop_token_ids=(1 << 64,))),
    "min_p = 1.5": ([1], replace(SHORT, min_p=1.5)),
    "max_new_tokens = 0": ([1], replace(SHORT, max_new_tokens=0)),
    "stop_strings = ('a',); this engine has no tokenizer": ([1], replace(SHORT, stop_strings=("a",))),
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
        logits = response_logits(model, requests[key[0] - 10].prompt_token_ids_T, rollout).float()
        expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(rollout.token_ids_T).long()[:, None])[:, 0]
        assert np.abs(rollout.behavior_logprobs_T - expected.numpy()).mean() < 0.1


def test_ranks_share_the_memory_that_bounds_them_and_nothing_else(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = kv_budget(model, 4)
    assert full == 4 * CONTEXT * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, head size, bytes
    assert kv_budget(model, 4, num_ranks=8) == full
    monkeypatch.setattr(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else full // 4096)
    assert [kv_budget(model, 4, num_ranks) for num_ranks in (1, 2)] == [full // 4, full // 8]


def test_an_engine_without_memory_says_so(model: Transformer, make_requests: Requests) -> None:
    rollouts = run(make_engine(model, blocks=0), make_requests(2, GREEDY))
    assert {one.error.split(",")[0] for one in rollouts.values()} == {"the KV cache holds 0 tokens"}


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_after_an_update_the_same_prompt_equals_a_cold_engine(
    make_model: Models, make_requests: Requests, kv_on_update: str
) -> None:
    """Bit for bit, since the steps are the same."""
    new, served = make_model(seed=2), make_model(seed=1)
    requests = make_requests(4, SAMPLED)
    engine = make_engine(served, kv_on_update=kv_on_update)
    run(engine, requests)
    served.load_state_dict(new.state_dict())
    engine.set_version(1)
    warm, cold = run(engine, requests), run(make_engine(new), requests)
    for key, rollout in warm.items():
        np.testing.assert_array_equal(rollout.behavior_logprobs_T, cold[key].behavior_logprobs_T)


def test_what_an_update_costs(model: Transformer, make_requests: Requests) -> None:
    """Keeping costs nothing; recomputing prefills once more what was cached: a prefix of 16 and 3 times 10 tokens."""
    costs = {}
    for kv_on_update in ("keep", "recompute"):
        engine = make_engine(model, kv_on_update=kv_on_update)
        engine.submit(make_requests(2, GREEDY)[1:])
        for _ in range(10):
            engine.step()
        engine.set_version(1)
        drain(engine)
        costs[kv_on_update] = engine.stats()
    assert (costs["keep"].recomputed_tokens, costs["keep"].recompute_s) == (0, 0)
    assert costs["recompute"].recomputed_tokens == 16 + 3 * 10
    assert costs["recompute"].prefill_tokens == costs["keep"].prefill_tokens + 46
    assert 0 < costs["recompute"].recompute_s < 240
    assert costs["recompute"].decode_tokens == costs["keep"].decode_tokens == 72


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_each_of_ten_thousand_tokens_carries_the_version_that_sampled_it(
    make_model: Models, make_requests: Requests, kv_on_update: str
) -> None:
    """An update every fifth step."""
    served = make_model()
    rng = np.random.default_rng(0)
    requests = make_requests(140, SamplingParams(max_new_tokens=24))
    engine = make_engine(served, max_running=64, prefill_tokens=400, kv_on_update=kv_on_update)
    engine.submit(requests)
    rollouts, sampled = list[Rollout](), np.zeros(0, int)
    while engine.has_work:
        if engine.stats().steps % 5 == 4:
            with torch.no_grad():
                served.model.norm.weight.copy_(torch.from_numpy(rng.normal(1, 0.1, 32)))
            engine.set_version(engine.version + 1)
        before = engine.stats().decode_tokens
        rollouts += engine.step()
        sampled = np.append(sampled, [engine.version] * (engine.stats().decode_tokens - before))
    versions = np.concatenate([rollout.policy_versions_T for rollout in rollouts])
    assert len(versions) == 140 * 3 * 24 > 10_000
    np.testing.assert_array_equal(np.sort(versions), sampled)
    assert all((np.diff(rollout.policy_versions_T) >= 0).all() for rollout in rollouts)
    assert len(set(versions.tolist())) > 20


def test_scores_do_not_depend_on_how_sequences_are_packed(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 40, length) for length in (1, 1, 30, 96, 1, 2, 64)]
    engine = make_engine(model)
    whole = engine.score(sequences)
    monkeypatch.setattr("llamarl.generation.sampler._PACK_TOKENS", 40)
    monkeypatch.setattr("llamarl.generation.sampler._LOGITS", 40 * 7)
    for token_ids_T, left_T, right_T in zip(sequences, whole, engine.score(sequences), strict=True):
        expected_T = gathered(full_logits(model, token_ids_T)[:-1], token_ids_T[1:])
        np.testing.assert_allclose(left_T, expected_T, atol=1e-5)
        np.testing.assert_allclose(right_T, expected_T, atol=1e-5)
    assert engine.score([]) == []


def test_slots_stay_full_until_the_queue_is_empty(model: Transformer) -> None:
    """Nine of ten rollouts are short, one is eight times as long."""
    requests = [
        GenerationRequest(
            group_id=i, prompt_token_ids_T=np.arange(1 + i % 12, dtype=np.int32), group_size=2,
            sampling=SamplingParams(max_new_tokens=80 if i % 10 == 9 else 10, seed=i),
        )
        for i in range(60)
    ]  # fmt: skip
    engine = make_engine(model, max_running=16, prefill_tokens=32)
    run(engine, requests)
    stats = engine.stats()
    assert stats.slot_steps > 16 * 80
    assert stats.filled_slot_steps / stats.slot_steps > 0.97


# Tokens of the tiny vocabulary as bytes: parts of characters, text across borders, and some that are silent.
PIECES = [b"a", b"b", b"ab", b" ", b"END", b"EN", b"D", b"D!", b"\n", "é".encode(), "日".encode(), b"\xc3", b"\xa9",
          b"\xe6", b"\x97", b"\xa5", b"x" * 9, b"", b"", b"\xa9D"] + [b"."] * 20  # fmt: skip
STOPS = ("END", "é", "日\n", "b a", "\n\n", "xE", "b ", "ENx")


def decode(token_ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in token_ids).decode(errors="replace")


def decode_stripped(token_ids: Sequence[int]) -> str:
    """As tokenizers do that mark words by a space before them."""
    return decode(token_ids).removeprefix(" ")


@settings(deadline=None, max_examples=examples(400))
@example([5, *[17] * 9, 16], ("ENx",), decode)
@example([1, 3], ("b ",), decode_stripped)
@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=60),
    st.sets(st.sampled_from(STOPS), min_size=1).map(tuple),
    st.sampled_from([decode, decode_stripped]),
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(
    tokens: list[int], strings: tuple[str, ...], decode: Callable[[Sequence[int]], str]
) -> None:
    stop, ids_T = StopStrings(strings, decode), np.array(tokens, np.int32)
    for length in range(1, len(tokens) + 1):
        expected = any(string in decode(tokens[:length]) for string in strings)
        assert stop.completed(ids_T[:length]) == expected
        if expected:
            break


def test_stop_strings_cost_little(model: Transformer, make_requests: Requests) -> None:
    """Rows without them are not decoded, and others only where a token can end one, and only a tail."""
    decoded = []

    def counting(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return decode(token_ids)

    plain, stopping = make_requests(2, replace(SAMPLED, max_new_tokens=60))
    engine = make_engine(model, decode=counting)
    run(engine, [plain])
    assert decoded == []
    strings = ("END!", "nowhere")
    rollouts = run(engine, [replace(stopping, sampling=replace(stopping.sampling, stop_strings=strings))])
    num_tokens = sum(rollout.num_tokens for rollout in rollouts.values())
    assert num_tokens == 180
    assert max(decoded) <= 2 * (7 + 4), "some tokens are silent"
    assert 0 < sum(decoded) < 4 * num_tokens


def test_stop_strings_end_rollouts_also_across_segments(model: Transformer, make_requests: Requests) -> None:
    sampling = replace(SAMPLED, max_new_tokens=60, stop_strings=("é", "xE", "b a"))
    free = run(make_engine(model), make_requests(4, replace(sampling, stop_strings=())))
    requests = make_requests(4, sampling)
    whole = run(make_engine(model, decode=decode), requests)
    cut = [replace(request, segment_tokens=5) for request in requests]
    assert_same(run_segments(make_engine(model, decode=decode), cut)[0], whole)
    plain = [replace(r, group_id=r.group_id + 50, sampling=replace(sampling, stop_strings=())) for r in requests]
    mixed = run(make_engine(model, decode=decode, max_running=5), [*plain[:2], *requests, *plain[2:]])
    others = [mixed.pop((one.group_id, index)) for one in plain for index in range(3)]
    assert {rollout.finish_reason for rollout in others} == {FinishReason.LENGTH}
    assert_same(mixed, whole)
    assert {rollout.finish_reason for rollout in whole.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    for key, rollout in whole.items():
        tokens = free[key].token_ids_T
        ends = [n for n in range(1, 61) if any(string in decode(tokens[:n]) for string in sampling.stop_strings)]
        np.testing.assert_array_equal(rollout.token_ids_T, tokens[: ends[0] if ends else 60])


@pytest.mark.parametrize(("gb", "fits"), [(80, True), (30, True), (20, False)])
def test_a_gpu_keeps_room_for_new_weights(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, gb: int, fits: bool
) -> None:
    """Weights of 10.5 GB: what is left after those in use holds keys and values, a second set and a tenth of it."""
    served = GeneratorModel(
        replace(model.shape, hidden_size=1 << 16, vocab_size=40_000, max_position_embeddings=1 << 20),
        "bfloat16",
        "cuda:0",
    )
    weights, total = sum(spec.num_bytes for spec in served.specs()), gb * 10**9
    assert 10e9 < weights < 11e9
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - weights, total))
    if not fits:
        with pytest.raises(ConfigError, match="GB of cuda:0 are free"):
            kv_budget(served, 512)
        return
    shared = kv_budget(served, 512)
    assert 0.1 * (total - 2 * weights) < shared < total - 2.1 * weights
    monkeypatch.setenv("LLAMARL_ALONE", "1")  # what nobody else may take later
    assert kv_budget(served, 512) == pytest.approx(1.8 * shared, rel=1e-6)


def test_an_engine_that_slept_goes_on_as_one_that_did_not(make_model: Models, make_requests: Requests) -> None:
    """Asleep it has no weights, keys or values; it wakes with those that come, and as many blocks as before."""
    trained = make_model()
    model = GeneratorModel(trained.shape, "float32", "cpu")
    engine = make_engine(model, asleep=True)
    weights = dict(trained.named_parameters())
    expected = run(make_engine(trained), make_requests(4, SAMPLED))
    for version in (1, 2):
        assert (model._used, engine._cache, engine.describe()) == ({}, None, "asleep until weights come")
        model.use(model.hold({spec.key: weights[spec.name].detach() for spec in model.specs()}))
        engine.set_version(version)
        assert_same(run(engine, make_requests(4, SAMPLED)), expected)
        assert engine._scheduler.pool.num_free == engine._scheduler.pool.num_blocks == 400
        engine.sleep()


def test_an_engine_with_work_does_not_sleep(make_model: Models, make_requests: Requests) -> None:
    engine = make_engine(make_model())
    engine.submit(make_requests(1, GREEDY))
    with pytest.raises(AssertionError, match="rollouts decode here"):
        engine.sleep()


def test_rollouts_held_for_their_environment_lose_their_keys_asleep(
    make_model: Models, make_requests: Requests
) -> None:
    engine = make_engine(make_model())
    (request,) = make_requests(1, GREEDY)
    (stopped,) = run(engine, [replace(request, group_size=1)]).values()
    sampling = replace(GREEDY, stop_token_ids=(int(stopped.token_ids_T[2]),))
    engine.submit([replace(request, group_size=1, sampling=sampling, has_turns=True)])
    while engine.has_work:
        engine.step()
    assert engine._scheduler.held
    engine.sleep()
    assert not engine._scheduler.held and engine._scheduler.pool.num_free == engine._scheduler.pool.num_blocks
