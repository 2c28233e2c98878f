"""What a cache in float8 keeps of keys and values, and what an engine makes of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.generation.attention import BLOCK_SIZE, FP8, KVCache
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel, KvPrecision
from llamarl.kernels import attention
from llamarl.models.transformer import Transformer
from llamarl.types import GenerationRequest, Rollout
from tests.generation.native import SAMPLED, assert_same, run

Requests = Callable[..., list[GenerationRequest]]


def rounded(x: Tensor) -> Tensor:
    """To e4m3 in float64: 3 bits behind the leading one, steps of 2^-9 below 2^-6, half to even, at most 448."""
    x = x.double()
    exponent = x.abs().clamp(2.0**-6, 448.0).log2().floor()
    step = torch.exp2(exponent - 3)
    return (x.clamp(-448, 448) / step).round() * step


def cache_of(dtype: torch.dtype, num_blocks: int = 9) -> KVCache:
    return KVCache(
        num_layers=2, num_blocks=num_blocks, num_kv_heads=2, head_dim=8, dtype=dtype, device=torch.device("cpu")
    )


def test_what_is_read_is_what_was_written_rounded_once() -> None:
    """Over the whole range and beyond it, and NaN stays what it is."""
    cache, count = cache_of(FP8), 7 * BLOCK_SIZE
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, count, 2, 8, generator=generator) * torch.logspace(-4, 4, count)[:, None, None]
    k[3, 1, :6] = torch.tensor([448.0, 449, 464, -480, torch.inf, -torch.inf])
    k[5, 0, :3] = torch.tensor([2.0**-10, 3 * 2.0**-10, 17.0])  # ties, which go to the even one
    v[9, 1, 2] = torch.nan
    place_N = torch.randperm(9 * BLOCK_SIZE, generator=generator)[:count]
    block_N, offset_N = place_N // BLOCK_SIZE, place_N % BLOCK_SIZE
    cache.clear(list(range(9)))
    cache.write(1, block_N, offset_N, k, v)
    for found, given in zip(cache.read(1, block_N, offset_N), (k, v), strict=True):
        assert found.dtype == FP8
        torch.testing.assert_close(found.transpose(0, 1).double(), rounded(given), rtol=0, atol=0, equal_nan=True)
    keys, values = cache.blocks(1, torch.arange(9)[None])
    assert keys.dtype == values.dtype == torch.float32
    for found, given in ((keys[0].transpose(-1, -2), k), (values[0], v)):
        of_tokens = found.transpose(1, 2)[block_N, offset_N].double()
        torch.testing.assert_close(of_tokens, rounded(given), rtol=0, atol=0, equal_nan=True)
    assert not cache.read(0, block_N, offset_N)[0].float().isnan().any(), "cleared"


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_an_engine_reads_rounded_keys_and_values(
    model: Transformer, make_requests: Requests, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """In prefill, in chunks, and in every step: as one whose cache is in float32 and is given rounded ones."""

    def rollouts(kv_dtype: KvPrecision) -> dict[tuple[int, int], Rollout]:
        served = GeneratorModel(model.shape, "float32", "cpu", kv_dtype=kv_dtype)
        served.load(model)
        engine = Engine(served, EngineSettings(max_running=8, prefill_tokens=7, kv_bytes=1 << 21, graphs=graphs))
        assert "attention by torch" in engine.describe()
        return run(engine, make_requests(5, SAMPLED))

    found = rollouts("fp8")
    monkeypatch.setattr(attention, "unusable", lambda *_: "not asked here")
    plain = rollouts("auto")
    monkeypatch.setattr(KVCache, "_rounded", lambda cache, x: rounded(x).float())
    assert_same(found, rollouts("auto"))
    apart = [np.abs(plain[key].behavior_logprobs_T[0] - one.behavior_logprobs_T[0]) for key, one in found.items()]
    assert np.mean(apart) > 1e-3, "rounding shows"


def test_it_holds_twice_as_many_tokens(model: Transformer) -> None:
    """As the same bytes in bfloat16, and four times as many as in float32."""
    found = []
    precisions: tuple[KvPrecision, ...] = ("fp8", "bfloat16", "auto")
    for kv_dtype in precisions:
        served = GeneratorModel(model.shape, "float32", "cpu", kv_dtype=kv_dtype)
        found.append(
            Engine(served, EngineSettings(max_running=4, prefill_tokens=8, kv_bytes=1 << 18))._scheduler.pool.num_blocks
        )
    assert found[0] == 2 * found[1] == 4 * found[2] > 0
