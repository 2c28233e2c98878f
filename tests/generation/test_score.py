"""Log-probabilities by cause: the weights as they came in float32, the engine's own, and of what is drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel
from llamarl.generation.sampler import score
from llamarl.models.quantize import dequantize_rows, quantize_rows
from llamarl.models.transformer import Transformer
from llamarl.types import CandidateSets, GenerationRequest, SamplingParams

SAMPLING = SamplingParams(temperature=0.7, top_p=0.6, top_k=9, min_p=0.02, max_new_tokens=30, seed=4)


def rounded(model: Transformer) -> Transformer:
    """With the weights that an int8 generator has, in float64."""
    exact = Transformer(model.shape).double()
    given = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            weight = given[name]
            if name.endswith("_proj.weight"):
                parameter.copy_(dequantize_rows(*quantize_rows(weight, "int8")))
            else:
                parameter.copy_(weight.bfloat16() if weight.ndim == 2 else weight)
    return exact


def all_of(sequences: list[np.ndarray], temperature: float) -> CandidateSets:
    cutoffs = [np.full(len(ids_T) - 1, -np.inf, np.float32) for ids_T in sequences]
    return CandidateSets(temperature=temperature, cutoffs=cutoffs)


def engine_of(model: Transformer, precision: str) -> Engine:
    served = GeneratorModel(model.shape, precision, "cpu")
    served.load(model)
    return Engine(served, EngineSettings(max_running=4, prefill_tokens=64, kv_bytes=None))


def test_weights_without_the_engine_s_arithmetic(model: Transformer) -> None:
    sequences = [np.arange(2, 30, dtype=np.int32), np.array([7], np.int32), np.arange(9, 1, -1, dtype=np.int32)]
    plain = all_of(sequences, 0.7)
    engine = engine_of(model, "int8")
    found, own = engine.score(sequences, plain), engine.score(sequences)
    cold, again = score(rounded(model), sequences, plain), engine.score(sequences, plain)
    for found_3_T, expected_3_T, own_T, again_3_T in zip(found, cold, own, again, strict=True):
        np.testing.assert_array_equal(found_3_T, again_3_T, "the engine's arithmetic is back")
        assert found_3_T.shape == (3, len(own_T))
        np.testing.assert_allclose(found_3_T[0], expected_3_T[1], atol=2e-5)
        np.testing.assert_array_equal(found_3_T[1], found_3_T[2], "nothing is left out")
    np.testing.assert_allclose(score(engine.model, sequences, all_of(sequences, 1.0))[0][1], own[0], rtol=0)
    if engine.model._network.layers[0].o.path != "torch":
        assert np.abs(found[0][0] - found[0][1]).max() > 1e-4, "the kernels round activations"


@pytest.mark.parametrize("sampling", [SAMPLING, replace(SAMPLING, top_p=1.0, top_k=0, min_p=0.2)])
def test_what_is_drawn_is_what_the_sampler_says(model: Transformer, sampling: SamplingParams) -> None:
    engine = engine_of(model, "float32")
    prompt_T = np.arange(5, 15, dtype=np.int32)
    engine.submit([GenerationRequest(group_id=1, prompt_token_ids_T=prompt_T, group_size=1, sampling=sampling)])
    rollouts = []
    while engine.has_work:
        rollouts += engine.step()
    (rollout,) = rollouts
    whole_T = np.concatenate([prompt_T, rollout.token_ids_T])
    cutoffs_T = np.concatenate([np.full(9, -np.inf, np.float32), rollout.columns["cutoffs"]])
    other = [prompt_T[:1], prompt_T]  # what comes before and behind in the same pack
    candidates = [all_of(other, 1.0).cutoffs[0], cutoffs_T, all_of(other, 1.0).cutoffs[1]]
    sequences = [other[0], whole_T, other[1]]
    _, found_3_T, _ = engine.score(sequences, CandidateSets(temperature=0.7, cutoffs=candidates))
    np.testing.assert_allclose(found_3_T[2, -30:], rollout.behavior_logprobs_T, atol=1e-5)
    assert (found_3_T[2, -30:] > found_3_T[1, -30:]).any()
    np.testing.assert_allclose(found_3_T[2, :9], found_3_T[1, :9], atol=1e-6, err_msg="nobody drew the prompt")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_sequences_share_at_their_beginning_is_computed_once(
    model: Transformer, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of them is all of another, and not where the candidates of a shared token differ."""
    engine, rng = engine_of(model, precision), np.random.default_rng(1)
    beginning = rng.integers(0, 40, 40)
    sequences = [np.concatenate((beginning, rng.integers(0, 40, n))) for n in (1, 9, 20)]
    sequences.append(sequences[2][:50])
    fed, forward = list[int](), GeneratorModel.__call__

    def counted(self: GeneratorModel, *feed: torch.Tensor) -> torch.Tensor:
        fed.append(len(feed[0]))
        return forward(self, *feed)

    monkeypatch.setattr(GeneratorModel, "__call__", counted)
    together = engine.score(sequences)
    assert fed == [39 + sum(len(ids_T) - 40 for ids_T in sequences)]
    assert [len(one) for one in together] == [len(ids_T) - 1 for ids_T in sequences]
    for ids_T, found_T in zip(sequences, together, strict=True):
        np.testing.assert_allclose(found_T, engine.score([ids_T])[0], atol=1e-5 if precision == "float32" else 3e-2)
    candidates = all_of(sequences, 0.7)
    candidates.cutoffs[1][30] = -0.5
    fed.clear()
    divided = engine.score(sequences, candidates)
    assert fed[0] == 30 + sum(len(ids_T) - 1 - 30 for ids_T in sequences)
    for at, ids_T in enumerate(sequences):
        own = CandidateSets(temperature=0.7, cutoffs=[candidates.cutoffs[at]])
        np.testing.assert_allclose(divided[at], engine.score([ids_T], own)[0], atol=3e-2)
