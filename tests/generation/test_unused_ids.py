"""Token ids that the tokenizer has no token for: nothing samples them, whatever their rows of the model hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.generation.model import GeneratorModel, load_generator_model
from llamarl.generation.sampler import logprobs_of
from llamarl.models.attention import causal_attend
from llamarl.models.hf import save_model
from llamarl.models.transformer import Transformer
from llamarl.training.policy import target_logprobs
from llamarl.types import GenerationRequest, SamplingParams
from tests.generation.conftest import VOCAB
from tests.generation.native import make_engine, run
from tests.nightly import crossed, some

UNUSED = ((5, 6), (11, 14), (30, VOCAB))
USED = sorted(set(range(VOCAB)) - {one for span in UNUSED for one in range(*span)})
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=24),
    "temperature": SamplingParams(temperature=1.3, max_new_tokens=24, seed=5),
    "top-k": SamplingParams(temperature=1.0, top_k=3, max_new_tokens=24, seed=6),
    "more than there are": SamplingParams(temperature=1.0, top_k=VOCAB, max_new_tokens=24, seed=6),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7, max_new_tokens=24, seed=7),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05, max_new_tokens=24, seed=8),
}
Models = Callable[..., Transformer]
Requests = Callable[..., list[GenerationRequest]]


def padded_model(make_model: Models, tied: bool = False) -> Transformer:
    """Rows of unused ids are ten times as large as others, so that they would be sampled most of the time."""
    shape = replace(make_model().shape, unused_ids=UNUSED, tie_embeddings=tied)
    model = Transformer(shape)
    model.initialize(3, std=0.25)
    with torch.no_grad():
        for first, stop in UNUSED:
            model.head_weight_V_D[first:stop] *= 10
    return model


@pytest.fixture
def padded(make_model: Models) -> Transformer:
    return padded_model(make_model)


def used(requests: list[GenerationRequest]) -> list[GenerationRequest]:
    """The same with prompts of tokens that exist."""
    ids = np.array(USED, np.int32)
    return [replace(one, prompt_token_ids_T=ids[one.prompt_token_ids_T % len(ids)]) for one in requests]


@pytest.mark.parametrize(("name", "precision"), some(crossed(SAMPLINGS, ["float32", "bfloat16", "int8"]), 3))
def test_are_never_sampled(
    padded: Transformer, make_requests: Requests, name: str, precision: str, computed_by: str
) -> None:
    sampling = SAMPLINGS[name]
    served = GeneratorModel(padded.shape, precision, "cpu")
    served.load(padded)
    rollouts = run(make_engine(served), used(make_requests(4, sampling)))
    sampled = np.concatenate([one.token_ids_T for one in rollouts.values()])
    assert set(sampled.tolist()) <= set(USED)
    assert all(np.isfinite(one.behavior_logprobs_T).all() for one in rollouts.values())
    if precision == "float32" and sampling.temperature:
        assert_trained_alike(padded, served, rollouts, sampling, used(make_requests(4, sampling)))


def assert_trained_alike(model, served, rollouts, sampling, requests) -> None:
    """The trainer's log-probabilities of the same weights are those that were recorded, so ratios are 1."""
    for (group_id, _), rollout in rollouts.items():
        prompt = requests[group_id - 10].prompt_token_ids_T
        ids = torch.from_numpy(np.concatenate([prompt, rollout.token_ids_T])).long()
        with torch.no_grad():
            hidden = model(ids[:-1], torch.arange(len(ids) - 1), causal_attend([len(ids) - 1]))[len(prompt) - 1 :]
        targets, cutoffs = ids[len(prompt) :], rollout.columns.get("cutoffs")
        cutoffs = None if cutoffs is None else torch.from_numpy(cutoffs)
        ours = target_logprobs(
            hidden, model.head_weight_V_D, targets, sampling.temperature, cutoffs_R=cutoffs, unused_ids=model.unused_ids
        )
        recorded = torch.from_numpy(rollout.behavior_logprobs_T)
        torch.testing.assert_close(ours.detach(), recorded, atol=2e-5, rtol=1e-5)
        scored = logprobs_of(served, hidden, targets, sampling.temperature, cutoffs)
        torch.testing.assert_close(scored, recorded, atol=2e-5, rtol=1e-5)


def test_nor_by_the_trainers_model(make_model: Models, make_requests: Requests) -> None:
    model, sampling = padded_model(make_model, tied=True), SAMPLINGS["temperature"]
    rollouts = run(make_engine(model), used(make_requests(4, sampling)))
    assert {one for rollout in rollouts.values() for one in rollout.token_ids_T.tolist()} <= set(USED)
    assert_trained_alike(model, model, rollouts, sampling, used(make_requests(4, sampling)))


def test_ranks_that_share_the_vocabulary_leave_them_out(padded: Transformer) -> None:
    class Both:
        """Rank 0 of two; the other one has the second half of the logits."""

        size, rank = 2, 0

        def all_reduce(self, x: Tensor) -> Tensor:
            return x

        def all_gather_vocab(self, logits_N_V: Tensor) -> Tensor:
            return torch.cat((logits_N_V, torch.full_like(logits_N_V, 1e3)), 1)

    half = GeneratorModel(padded.shape, "float32", "cpu", Both())
    half.load(padded)
    probs_V = half.logits(torch.ones(1, padded.shape.hidden_size)).softmax(-1)[0]
    assert [one for one in range(VOCAB) if probs_V[one]] == [one for one in USED if one >= VOCAB // 2]


def test_prompts_cannot_have_them(padded: Transformer, make_requests: Requests) -> None:
    (request,) = make_requests(1, SAMPLINGS["greedy"])
    request = replace(request, prompt_token_ids_T=np.array([USED[0], 12], np.int32))
    assert all("12" in one.error for one in run(make_engine(padded), [request]).values())
    with pytest.raises(ValueError, match="12"):
        make_engine(padded).score([np.array([0, 12], np.int32)])


def test_a_reference_has_the_tokens_of_the_policy(tmp_path: Path, make_model: Models) -> None:
    """Whatever its own folder says."""
    for name, ids in (("policy", range(4)), ("reference", range(VOCAB))):
        save_model(make_model(), tmp_path / name, None)
        vocabulary = {"model": {"type": "BPE", "vocab": {str(one): one for one in ids}}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(vocabulary))
    model = load_generator_model(tmp_path / "reference", "float32", "cpu", tokens_of=tmp_path / "policy")
    assert model.logits(torch.ones(1, 32)).softmax(-1)[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
