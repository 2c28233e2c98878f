"""What every `GenerationBackend` must do: plain functions that take a way to start one.

A backend's test module says how to serve the weights of a `conformance_model`, and runs `CHECKS`:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check):
        check(start)

`start(model)` is a context manager that gives a `Served` whose backend has those weights as version 0, room for at
least 8 rollouts of the full context at once, and no work. It may be a backend that lived before. No fixtures and no
clock but deadlines, so that all ranks of a tensor-parallel backend can run a check in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np
import torch

from llamarl.generation.backend import GenerationBackend
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams
from tests.generation.references import (
    TOLERANCE,
    assert_greedy,
    by_key,
    distribution,
    drain,
    drive,
    full_logits,
    gathered,
    logits_in_flight,
    response_logits,
    resumed,
    run,
    run_segments,
)

VOCAB, CONTEXT = 96, 512
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)


class Served(Protocol):
    """A backend and the way to change its weights."""

    backend: GenerationBackend
    kv_on_update: Literal["keep", "recompute"]

    def update(self, model: Transformer, version: int) -> None:
        """Replace the weights while rollouts run, as a generator does, and call `set_version`."""
        ...


Start = Callable[[Transformer], AbstractContextManager[Served]]
Check = Callable[[Start], None]


def conformance_model(seed: int = 0) -> Transformer:
    """Tied embeddings: a head that an update misses shows. Sizes that vLLM and two tensor-parallel ranks can take."""
    shape = ModelShape(
        family="llama", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=96,
        vocab_size=VOCAB, max_position_embeddings=CONTEXT, tie_embeddings=True,
    )  # fmt: skip
    model = Transformer(shape)
    model.initialize(seed, std=0.2)
    return model.requires_grad_(False)


def make_requests(
    count: int, sampling: SamplingParams, group_size: int = 2, segment_tokens: int = 0
) -> list[GenerationRequest]:
    """Group ids from 10; prompts of 1, 17 and then 2 to 50 tokens."""
    rng = np.random.default_rng(1)
    lengths = [1, 17, *rng.integers(2, 50, count)][:count]
    return [
        GenerationRequest(
            group_id=10 + i, prompt_token_ids_T=rng.integers(0, VOCAB, length).astype(np.int32), group_size=group_size,
            sampling=sampling, segment_tokens=segment_tokens,
        )
        for i, length in enumerate(lengths)
    ]  # fmt: skip


def check_greedy_follows_the_model(start: Start) -> None:
    model, requests = conformance_model(), make_requests(4, GREEDY)
    with start(model) as served:
        rollouts = run(served.backend, requests)
    assert rollouts.keys() == {(request.group_id, index) for request in requests for index in range(2)}
    for (group_id, _), rollout in rollouts.items():
        assert (rollout.finish_reason, rollout.num_tokens) == (FinishReason.LENGTH, 24)
        arrays = (rollout.token_ids_T, rollout.behavior_logprobs_T, rollout.policy_versions_T)
        assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32]
        assert rollout.policy_versions_T.tolist() == [0] * 24
        assert_greedy(response_logits(model, requests[group_id - 10].prompt_token_ids_T, rollout), rollout)


def check_logprobs_are_those_of_the_sampled_distribution(start: Start) -> None:
    model, requests = conformance_model(), make_requests(6, GREEDY)
    settings = [
        SamplingParams(temperature=1.0, max_new_tokens=24, seed=1),
        SamplingParams(temperature=0.7, max_new_tokens=24, seed=1),
        SamplingParams(temperature=1.3, top_k=7, max_new_tokens=24),
        SamplingParams(temperature=1.3, top_p=0.7, max_new_tokens=24),
        SamplingParams(temperature=1.3, min_p=0.1, max_new_tokens=24),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_new_tokens=24),
    ]
    requests = [replace(one, sampling=sampling) for one, sampling in zip(requests, settings, strict=True)]
    with start(model) as served:
        rollouts = run(served.backend, requests)
    for (group_id, _), rollout in rollouts.items():
        request = requests[group_id - 10]
        probs_T_V = distribution(response_logits(model, request.prompt_token_ids_T, rollout), request.sampling)
        expected_T = probs_T_V.gather(1, torch.from_numpy(rollout.token_ids_T).long()[:, None])[:, 0].log()
        np.testing.assert_allclose(rollout.behavior_logprobs_T, expected_T.numpy(), atol=TOLERANCE)


def check_tokens_follow_the_distribution(start: Start) -> None:
    """First tokens of 600 rollouts, by Pearson's chi-square; rollouts of a group and of two seeds differ."""
    model, prompt_T = conformance_model(), np.array([5, 6, 7], np.int32)
    counts_V, tokens = np.zeros(VOCAB), []
    with start(model) as served:
        for seed in range(2):
            sampling = SamplingParams(temperature=1.2, max_new_tokens=2, seed=seed)
            request = GenerationRequest(
                group_id=seed, prompt_token_ids_T=prompt_T, group_size=300, sampling=sampling
            )  # fmt: skip
            rollouts = run(served.backend, [request])
            tokens.append([tuple(rollouts[seed, index].token_ids_T) for index in range(300)])
            np.add.at(counts_V, [first for first, _ in tokens[-1]], 1)
    assert tokens[0] != tokens[1]
    assert len(set(tokens[0])) > 50
    expected_V = 600 * torch.softmax(full_logits(model, prompt_T)[-1].double() / 1.2, -1).numpy()
    likely_V = expected_V >= 5
    assert likely_V.sum() > 10
    chi_square = ((counts_V - expected_V)[likely_V] ** 2 / expected_V[likely_V]).sum()
    assert chi_square < likely_V.sum() + 5 * np.sqrt(2 * likely_V.sum())


def check_keyed_sampling(start: Start) -> None:
    """A sampled rollout does not depend on its neighbors, their order or its group's size. Skipped where not keyed."""
    requests = make_requests(3, SamplingParams(temperature=0.9, max_new_tokens=24, seed=3))
    with start(conformance_model()) as served:
        if not served.backend.keyed_sampling:
            return
        together = run(served.backend, requests)
        apart = [run(served.backend, [replace(one, group_size=4)]) for one in reversed(requests)]
    for part in apart:
        for key in part.keys() & together.keys():
            np.testing.assert_array_equal(part[key].token_ids_T, together[key].token_ids_T)


def check_stop_tokens(start: Start) -> None:
    requests = make_requests(3, GREEDY)
    with start(conformance_model()) as served:
        free = run(served.backend, requests)
        stop = int(free[11, 0].token_ids_T[7])
        stopped = run(served.backend, [replace(r, sampling=replace(GREEDY, stop_token_ids=(stop,))) for r in requests])
    for key, rollout in stopped.items():
        hits = np.flatnonzero(free[key].token_ids_T == stop)
        length = hits[0] + 1 if len(hits) else 24
        np.testing.assert_array_equal(rollout.token_ids_T, free[key].token_ids_T[:length])
        assert rollout.finish_reason == (FinishReason.STOP if len(hits) else FinishReason.LENGTH)


def check_abort_gives_partials_that_can_be_resumed(start: Start) -> None:
    sampling = replace(GREEDY, max_new_tokens=400)
    requests, model = make_requests(3, sampling), conformance_model()
    with start(model) as served:
        backend = served.backend
        backend.submit(requests)
        wanted = backend.stats().decode_tokens + sum(r.group_size for r in requests) * 30
        done = drive(backend, lambda: backend.stats().decode_tokens >= wanted)
        aborted = backend.abort([10, 12, 999])
        done += drain(backend)
        assert not backend.abort([11]), "it has finished"
        partials = [one for one in aborted if one.finish_reason == FinishReason.ABORTED]
        assert {one.group_id for one in partials} <= {10, 12} and partials
        assert all(0 < one.num_tokens < 400 for one in partials)
        finished = by_key((*done, *run(backend, resumed(requests, partials)).values()))
    assert finished.keys() == {(request.group_id, index) for request in requests for index in range(2)}
    for (group_id, _), rollout in finished.items():
        assert (rollout.finish_reason, rollout.num_tokens) == (FinishReason.LENGTH, 400)
        assert_greedy(response_logits(model, requests[group_id - 10].prompt_token_ids_T, rollout), rollout)
    for partial in partials:
        whole = finished[partial.group_id, partial.index]
        np.testing.assert_array_equal(whole.token_ids_T[: partial.num_tokens], partial.token_ids_T)
        np.testing.assert_array_equal(whole.behavior_logprobs_T[: partial.num_tokens], partial.behavior_logprobs_T)


def check_segments(start: Start) -> None:
    """Parked each 7 tokens; versions of earlier segments stay; the limit holds over the whole rollout."""
    model, requests = conformance_model(), make_requests(3, GREEDY, segment_tokens=7)
    with start(model) as served:
        first = run(served.backend, requests)
        assert {(one.finish_reason, one.num_tokens) for one in first.values()} == {(FinishReason.PARKED, 7)}
        served.update(model, 1)
        rollouts, num_parked = run_segments(served.backend, resumed(requests, first.values()))
    assert num_parked == 2 * len(rollouts), "after 14 and 21 tokens"
    assert rollouts.keys() == first.keys()
    for (group_id, _), rollout in rollouts.items():
        assert (rollout.finish_reason, rollout.num_tokens) == (FinishReason.LENGTH, 24)
        assert rollout.policy_versions_T.tolist() == [0] * 7 + [1] * 17
        assert_greedy(response_logits(model, requests[group_id - 10].prompt_token_ids_T, rollout), rollout)


def check_update_in_flight(start: Start) -> None:
    """Exactly the old weights' tokens before, exactly the new weights' after, and each says whose it is."""
    models = {0: conformance_model(), 1: conformance_model(seed=1)}
    requests = make_requests(3, replace(GREEDY, max_new_tokens=400))
    with start(models[0]) as served:
        backend = served.backend
        backend.submit(requests)
        sampled = backend.stats().decode_tokens
        done = drive(backend, lambda: backend.stats().decode_tokens >= sampled + 30)
        served.update(models[1], 1)
        rollouts = by_key(done + drain(backend))
        kv_on_update = served.kv_on_update
    assert any(set(rollout.policy_versions_T.tolist()) == {0, 1} for rollout in rollouts.values())
    for (group_id, _), rollout in rollouts.items():
        assert (rollout.finish_reason, rollout.num_tokens) == (FinishReason.LENGTH, 400)
        assert set(rollout.policy_versions_T.tolist()) <= {0, 1}
        assert (np.diff(rollout.policy_versions_T) >= 0).all()
        prompt_T = requests[group_id - 10].prompt_token_ids_T
        assert_greedy(logits_in_flight(models, prompt_T, rollout, kv_on_update), rollout)


def check_a_prompt_after_an_update_is_a_cold_one(start: Start) -> None:
    """The same prompts before and after, submitted while others run: no cached prefix outlives its weights."""
    old, new = conformance_model(), conformance_model(seed=1)
    requests = make_requests(3, GREEDY)
    runner = replace(requests[2], group_id=99, sampling=replace(GREEDY, max_new_tokens=400))
    with start(old) as served:
        served.backend.submit([runner, *requests])
        sampled = served.backend.stats().decode_tokens
        done = drive(served.backend, lambda: served.backend.stats().decode_tokens >= sampled + 8)
        served.update(new, 1)
        again = [replace(request, group_id=request.group_id + 100) for request in requests]
        served.backend.submit(again)
        rollouts = by_key(done + drain(served.backend))
    for request in again:
        for index in range(2):
            rollout = rollouts[request.group_id, index]
            assert rollout.policy_versions_T.tolist() == [1] * 24
            assert_greedy(response_logits(new, request.prompt_token_ids_T, rollout), rollout)


def check_score(start: Start) -> None:
    """The probe after each update: log-probabilities by the current weights, the tied head included."""
    models = [conformance_model(), conformance_model(seed=1)]
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCAB, length).astype(np.int32) for length in (1, 2, 60, CONTEXT, 33)]
    requests = make_requests(2, GREEDY)
    with start(models[0]) as served:
        expected = run(served.backend, requests)
        served.backend.submit(requests)
        sampled = served.backend.stats().decode_tokens
        done = drive(served.backend, lambda: served.backend.stats().decode_tokens >= sampled + 4)
        before = served.backend.score(sequences)
        rollouts = by_key(done + drain(served.backend))
        served.update(models[1], 1)
        after = served.backend.score(sequences)
        for bad in ([], [VOCAB], [-1], [1] * (CONTEXT + 1)):
            try:
                served.backend.score([np.array(bad, np.int32)])
            except ValueError:
                continue
            raise AssertionError(f"{bad[:2]} of {len(bad)} was scored")
    for model, scores in zip(models, (before, after), strict=True):
        for token_ids_T, logprobs_T in zip(sequences, scores, strict=True):
            assert (logprobs_T.dtype, len(logprobs_T)) == (np.float32, len(token_ids_T) - 1)
            reference_T = gathered(full_logits(model, token_ids_T)[:-1], token_ids_T[1:])
            np.testing.assert_allclose(logprobs_T, reference_T, atol=TOLERANCE)
    for key, rollout in expected.items():
        np.testing.assert_array_equal(rollouts[key].token_ids_T, rollout.token_ids_T)


def _bad_requests() -> list[GenerationRequest]:
    good = make_requests(1, GREEDY)[0]
    partial = Rollout(
        group_id=0,
        index=0,
        columns={
            "token_ids": np.zeros(3, np.int32),
            "behavior_logprobs": np.zeros(3, np.float32),
            "policy_versions": np.zeros(3, np.int32),
        },
        finish_reason=FinishReason.PARKED,
    )
    prompts = [[], [1] * CONTEXT, [1, VOCAB], [-1]]
    samplings = [
        replace(GREEDY, temperature=-1.0),
        replace(GREEDY, temperature=float("nan")),
        replace(GREEDY, top_p=0.0),
        replace(GREEDY, top_k=-2),
        replace(GREEDY, min_p=1.5),
        replace(GREEDY, max_new_tokens=0),
        replace(GREEDY, stop_strings=("",)),
    ]
    partials = [
        replace(partial, group_id=1),
        replace(partial, index=2),
        replace(partial, columns=partial.columns | {"token_ids": np.array([0, VOCAB, 0], np.int32)}),
        replace(partial, columns=partial.columns | {"behavior_logprobs": np.zeros(2, np.float32)}),
        replace(partial, finish_reason=FinishReason.STOP),
    ]
    bad = [replace(good, prompt_token_ids_T=np.array(prompt, np.int32)) for prompt in prompts]
    bad += [replace(good, sampling=sampling) for sampling in samplings]
    bad += [replace(good, segment_tokens=-1), replace(good, group_size=0)]
    bad += [replace(good, group_id=0, partials=(one,)) for one in partials]
    bad += [replace(good, group_id=0, partials=(partial,), sampling=replace(GREEDY, max_new_tokens=3))]
    bad += [replace(good, group_id=0, partials=(partial, partial))]
    return bad


def check_bad_requests_fail_alone(start: Start) -> None:
    good = make_requests(2, GREEDY)
    with start(conformance_model()) as served:
        expected = run(served.backend, good)
        for i, request in enumerate(_bad_requests()):
            failed = run(served.backend, [request])
            assert failed, f"bad request {i}"
            assert all(one.finish_reason == FinishReason.FAILED and one.error for one in failed.values()), f"{i}"
        bad = [replace(one, group_id=i + 100) for i, one in enumerate(_bad_requests()) if not one.partials]
        rollouts = run(served.backend, [*bad[:3], good[0], *bad[3:], good[1]])
    for key, rollout in expected.items():
        np.testing.assert_array_equal(rollouts.pop(key).token_ids_T, rollout.token_ids_T)
    assert {key[0] for key in rollouts} == {request.group_id for request in bad}
    for rollout in rollouts.values():
        assert (rollout.finish_reason, rollout.num_tokens, rollout.oldest_version) == (FinishReason.FAILED, 0, -1)
        assert rollout.error


def check_a_group_id_in_use_is_refused(start: Start) -> None:
    requests = make_requests(3, GREEDY)
    with start(conformance_model()) as served:
        served.backend.submit(requests[:1])
        for twice in ([requests[1], requests[0]], [requests[2], requests[2]]):
            try:
                served.backend.submit(twice)
            except ValueError:
                continue
            raise AssertionError("a group id was taken twice")
        assert {rollout.group_id for rollout in drain(served.backend)} == {10}
        assert not served.backend.has_work


CHECKS: tuple[Check, ...] = tuple(value for name, value in list(globals().items()) if name.startswith("check_"))
