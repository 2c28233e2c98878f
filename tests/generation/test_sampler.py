from __future__ import annotations

import numpy as np
import pytest
import torch

from llamarl.generation import sampler as sampler_module
from llamarl.generation.sampler import Drawn, Sampler, SamplingRows, noise_key, settings, truncate, uniforms
from llamarl.kernels import ops
from llamarl.types import SamplingParams

DRAWS = 20_000
LOGITS_V = torch.tensor([0.3, -1.0, 2.0, 1.9, -4.0, 0.0, 1.0, -0.5, 0.2, -30.0])


def expected_probs(params: SamplingParams) -> np.ndarray:
    """The distribution that `SamplingParams` describes, one token at a time, in float64."""
    logits = LOGITS_V.double().numpy() / (params.temperature or 1.0)
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    if params.temperature == 0:
        return probs
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if params.top_k:
        order = order[: params.top_k]
    mass, kept = probs[order].sum(), []
    for token in order:
        if sum(probs[kept]) >= params.top_p * mass and params.top_p < 1:
            break
        kept.append(token)
    kept = [token for token in kept if probs[token] >= params.min_p * probs[order[0]]]
    result = np.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


def draw(params: SamplingParams, count: int = DRAWS) -> Drawn:
    rows = SamplingRows(count)
    for row in range(count):
        rows.set(row, params, noise_key(0, row // 8, row % 8))
    return Sampler(torch.device("cpu"))(LOGITS_V.expand(count, -1), rows, np.arange(count) % 5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.3, top_p=0.7, top_k=6, min_p=0.1),
    ],
    ids=str,
)
def test_frequencies_and_log_probabilities_follow_the_distribution(params: SamplingParams) -> None:
    tokens_B, logprobs_B, cutoffs_B = draw(params)
    expected_V = expected_probs(params)
    counts_V = np.bincount(tokens_B, minlength=len(expected_V))
    assert not counts_V[expected_V == 0].any()
    likely_V = expected_V * DRAWS >= 5
    chi_square = ((counts_V - expected_V * DRAWS)[likely_V] ** 2 / (expected_V * DRAWS)[likely_V]).sum()
    freedom = likely_V.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * max(freedom, 1)), (counts_V, expected_V * DRAWS)
    np.testing.assert_allclose(logprobs_B, np.log(expected_V[tokens_B]), atol=1e-5)
    if expected_V.all():
        assert cutoffs_B is None
        return
    assert cutoffs_B is not None and (cutoffs_B <= 0).all()
    logits_V = LOGITS_V.double().numpy() / params.temperature
    told_B_V = logits_V >= logits_V[tokens_B, None] + cutoffs_B[:, None].astype(np.float64)
    assert (told_B_V == (expected_V > 0)).all()
    gap = logits_V[expected_V > 0].min() - logits_V[expected_V == 0].max()
    for shift in (0.49, -0.49):  # logits of a trainer that differ so much find the same candidates
        assert ((logits_V >= logits_V[tokens_B, None] + cutoffs_B[:, None] + shift * gap) == (expected_V > 0)).all()


def test_cutoffs_of_greedy_rows_and_of_others_that_leave_nothing_out() -> None:
    rows = SamplingRows(4)
    for row, params in enumerate(
        (
            SamplingParams(temperature=0.0),
            SamplingParams(),
            SamplingParams(top_k=len(LOGITS_V)),
            SamplingParams(top_k=2),
        )
    ):
        rows.set(row, params, noise_key(1, 2, row))
    for settings_5_B in (None, torch.from_numpy(settings(rows, np.full(4, 7)))):
        drawn = Sampler(torch.device("cpu"))(LOGITS_V.expand(4, -1), rows, np.full(4, 7), settings_5_B)
        assert drawn.cutoffs_B is not None
        assert np.isneginf(drawn.cutoffs_B).tolist() == [True, True, True, False]


def test_greedy_rows_take_the_best_token_with_its_probability_at_temperature_1() -> None:
    params = SamplingParams(temperature=0.0, top_k=1, top_p=0.5)
    tokens_B, logprobs_B, _ = draw(params, count=3)
    assert tokens_B.tolist() == [2, 2, 2]
    np.testing.assert_allclose(logprobs_B, np.log(expected_probs(SamplingParams())[2]), atol=1e-6)


def test_rows_with_different_settings_do_not_disturb_each_other() -> None:
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=2),
        SamplingParams(temperature=3),
    ]
    alone, rows = [], SamplingRows(len(kinds))
    for row, params in enumerate(kinds):
        one = SamplingRows(1)
        for target, place in ((one, 0), (rows, row)):
            target.set(place, params, noise_key(1, 2, row))
        alone.append(Sampler(torch.device("cpu"))(LOGITS_V[None], one, np.array([7])))
    tokens_B, logprobs_B, _ = Sampler(torch.device("cpu"))(LOGITS_V.expand(4, -1), rows, np.full(4, 7))
    assert tokens_B.tolist() == [int(one.token_ids_B[0]) for one in alone]
    assert logprobs_B.tolist() == [float(one.logprobs_B[0]) for one in alone]


@pytest.mark.skipif(ops.kernels().library is None, reason=ops.kernels().reason or "has one")
def test_the_kernel_and_torch_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where the noise lies within rounding of a border between two tokens: below once in 1,000 draws here."""
    logits_B_V = torch.randn(3000, 4100, generator=torch.Generator().manual_seed(0)) * 3
    rows = SamplingRows(3000)
    for row in range(3000):
        temperature, top_k = (0.0, 0.7, 1.0)[row % 3], 20 * (row % 5 == 0)
        rows.set(row, SamplingParams(temperature=temperature, top_k=top_k), noise_key(3, row, 0))
    drawn = Sampler(torch.device("cpu"))(logits_B_V, rows, np.arange(3000))
    monkeypatch.setattr(sampler_module, "draw", lambda *_: None)
    expected = Sampler(torch.device("cpu"))(logits_B_V, rows, np.arange(3000))
    same_B = drawn[0] == expected[0]
    assert same_B.mean() >= 0.999
    np.testing.assert_allclose(drawn[1][same_B], expected[1][same_B], atol=5e-6)


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-24])
def test_the_ends_of_the_noise_never_pick_an_impossible_token(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "uniforms", lambda keys_B, _: np.full(len(keys_B), noise, np.float32))
    generator = torch.Generator().manual_seed(0)
    probs_B_V = torch.softmax(torch.randn(2000, 30, generator=generator), -1)
    probs_B_V[:, 0] = probs_B_V[:, -1] = 0.0
    probs_B_V[0], probs_B_V[1], probs_B_V[2] = torch.eye(30)[[0, 29, 7]]
    rows = SamplingRows(2000)
    for row in range(2000):
        rows.set(row, SamplingParams(top_k=row % 20), row)
    tokens_B, logprobs_B, _ = Sampler(torch.device("cpu"))(probs_B_V.log(), rows, np.zeros(2000, np.int64))
    assert np.isfinite(logprobs_B).all()
    assert (probs_B_V[np.arange(2000), tokens_B] > 0).all()


def test_only_rows_that_are_not_finite_say_so() -> None:
    logits_B_V = LOGITS_V.repeat(4, 1)
    logits_B_V[1, 3], logits_B_V[2, 0] = float("nan"), float("inf")
    rows = SamplingRows(4)
    for row, temperature in enumerate((1.0, 1.0, 1.0, 0.0)):
        rows.set(row, SamplingParams(temperature=temperature), row)
    tokens_B, logprobs_B, _ = Sampler(torch.device("cpu"))(logits_B_V, rows, np.zeros(4, np.int64))
    assert np.isfinite(logprobs_B).tolist() == [True, False, False, True]
    assert ((tokens_B >= 0) & (tokens_B < len(LOGITS_V))).all()


def test_equally_likely_tokens_keep_their_order_under_top_k() -> None:
    one = torch.tensor
    kept, _ = truncate(torch.full((1, 6), 1 / 6), one([1.0]), one([2.0]), one([0.0]))
    assert kept[0].nonzero().flatten().tolist() == [0, 1]


def test_noise_is_uniform_and_differs_in_every_part_of_its_key() -> None:
    keys = [noise_key(seed, group, index) for seed in range(4) for group in range(-4, 60) for index in range(16)]
    assert len(set(keys)) == len(keys)
    assert noise_key(0, 1, 2) != noise_key(0, 2, 1) != noise_key(1, 2, 0)
    keys_B = np.repeat(np.array(keys, np.uint64), 20)
    noise_B = uniforms(keys_B, np.tile(np.arange(20), len(keys)))
    assert noise_B.dtype == np.float32
    assert 0 <= noise_B.min() < noise_B.max() < 1
    counts, _ = np.histogram(noise_B, bins=64, range=(0, 1))
    expected = len(noise_B) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4 * np.sqrt(126)
    streams = noise_B.reshape(len(keys), 20)
    assert abs(np.corrcoef(streams[:, 0], streams[:, 1])[0, 1]) < 0.05
    assert abs(np.corrcoef(streams[:-1, 0], streams[1:, 0])[0, 1]) < 0.05


@pytest.mark.parametrize("size", [10, 256, 257, 5000])
def test_a_search_by_blocks_finds_what_one_along_the_vocabulary_finds(size: int) -> None:
    """Up to rounding, which moves a token to a neighbor with some probability; never one without any."""
    generator = torch.Generator().manual_seed(0)
    probs_B_V = torch.softmax(torch.randn(400, size, generator=generator) * 6, -1)
    probs_B_V[:, 1::3] = 0.0
    probs_B_V[3] = torch.nan
    noise_B_1 = torch.rand(400, 1, generator=generator)
    noise_B_1[0], noise_B_1[1] = 0.0, 1 - 2**-24
    found_B_1, total_B_1 = sampler_module._by_blocks(probs_B_V, noise_B_1)
    expected_B_1, _ = sampler_module._searched(probs_B_V, noise_B_1)
    whole = torch.arange(400) != 3
    assert (probs_B_V.gather(1, found_B_1.clamp_max(size - 1))[whole] > 0).all()
    assert (found_B_1 == expected_B_1)[whole].float().mean() > 0.99
    torch.testing.assert_close(total_B_1[whole], probs_B_V.sum(1, keepdim=True)[whole])
    assert total_B_1[3].isnan()
