"""Each operation against torch, or float64; `test_attention.py` compiles them for other processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llamarl.kernels import ops
from llamarl.models import transformer

needs_kernel = pytest.mark.skipif(ops.kernels().library is None, reason=ops.kernels().reason or "has one")
WIDTHS = [8, 22, 256, 770]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_kernel
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_equals_the_module(width: int) -> None:
    norm = transformer.RMSNorm(width, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x_N_D = randn(7, width) * torch.logspace(-4, 4, 7)[:, None]
    with torch.inference_mode():
        torch.testing.assert_close(ops.rms_norm(x_N_D, norm.weight, 1e-5), norm(x_N_D), rtol=1e-6, atol=1e-9)


@needs_kernel
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 8), (4, 1, 22), (2, 2, 128)])
def test_rotate_equals_the_modules(num_heads: int, num_kv_heads: int, head_dim: int, normed: bool) -> None:
    """On parts of a joined projection."""
    joined = randn(5, (num_heads + 2 * num_kv_heads) * head_dim)
    parts = joined.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], dim=1)
    q, k, v = (flat.unflatten(1, (-1, head_dim)) for flat in parts)
    table = randn(5, 2, head_dim)
    rotation = table[:, :1], table[:, 1:]
    norms = (randn(head_dim), randn(head_dim) + 1) if normed else None
    expected = [
        ops.rotate_by_torch(F.rms_norm(x, (head_dim,), norms[i], 1e-6) if norms else x, rotation)
        for i, x in enumerate((q, k))
    ]
    values = v.clone()
    for rotated, exact in zip(ops.rotate(q, k, rotation, norms, 1e-6), expected, strict=True):
        torch.testing.assert_close(rotated, exact, rtol=1e-6, atol=2e-6)
    assert torch.equal(v, values)


@needs_kernel
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul_equals_float64(width: int) -> None:
    joined = randn(6, 2 * width) * torch.logspace(-2, 2, 6)[:, None]
    gate, up = joined.split(width, dim=1)
    torch.testing.assert_close(
        ops.silu_mul(gate, up), (F.silu(gate.double()) * up.double()).float(), rtol=2e-6, atol=1e-30
    )


@needs_kernel
def test_what_is_not_finite_stays_in_its_row() -> None:
    x = randn(3, 40)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    for y in (ops.rms_norm(x, torch.ones(40), 1e-6), ops.silu_mul(x, randn(3, 40))):
        assert y.isfinite().all(dim=1).tolist() == [True, False, False]


@needs_kernel
@pytest.mark.parametrize("vocab_size", [3, 511, 512, 5000])
def test_draw_inverts_the_cumulative_distribution(vocab_size: int) -> None:
    rng, count = np.random.default_rng(0), 400
    logits = randn(count, vocab_size) * 4
    logits[:, 1] = -torch.inf
    temperature_B = rng.uniform(0.3, 3, count).astype(np.float32)
    noise_B = rng.integers(0, 1 << 24, count).astype(np.float32) / (1 << 24)
    noise_B[:2] = 0, 1 - 2**-24
    drawn = ops.draw(logits, temperature_B, noise_B)
    assert drawn is not None
    logprobs = torch.log_softmax(logits.double() / torch.from_numpy(temperature_B)[:, None], 1).numpy()
    above = np.exp(logprobs).cumsum(1)[np.arange(count), drawn[0]]
    below = above - np.exp(logprobs[np.arange(count), drawn[0]])
    assert (below - 1e-6 <= noise_B).all()
    assert (noise_B <= above + 1e-6).all()
    np.testing.assert_allclose(drawn[1], logprobs[np.arange(count), drawn[0]], atol=5e-6)
    assert len(set(drawn[0].tolist())) > min(vocab_size, 100) // 2
    assert (drawn[0] != 1).all()


@needs_kernel
def test_draw_without_temperature_takes_the_first_of_the_best() -> None:
    logits = randn(4, 2000)
    logits[:, 700] = logits[:, 1700] = 9.0
    logits[3] = torch.nan
    tokens_B, logprobs_B = ops.draw(logits, np.zeros(4, np.float32), np.full(4, 0.5, np.float32))
    assert tokens_B[:3].tolist() == [700] * 3
    np.testing.assert_allclose(logprobs_B[:3], torch.log_softmax(logits[:3], 1)[:, 700], atol=1e-6)
    assert np.isnan(logprobs_B[3])
    assert 0 <= tokens_B[3] < 2000
