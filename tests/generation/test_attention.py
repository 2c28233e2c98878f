"""Both paths of attention, by what the engine gets from them; `tests/kernels/test_attention.py` has the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from llamarl.generation.attention import BLOCK_SIZE, KVCache, attend_to_table, backend_name, valid_places
from llamarl.generation.engine import Engine
from llamarl.kernels import attention, build
from llamarl.models.transformer import Transformer
from llamarl.types import GenerationRequest, Rollout
from tests.generation.native import GREEDY, SAMPLED, assert_same, drain, make_engine, run
from tests.generation.references import by_key
from tests.nightly import crossed

Requests = Callable[..., list[GenerationRequest]]
CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(attention.kernel().library is None, reason=attention.kernel().reason or "has one")


def on_torch(engine: Engine) -> Engine:
    engine._cache.library = None
    return engine


def small_cache(**options: object) -> KVCache:
    sizes = {"num_layers": 1, "num_blocks": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": torch.float32, "device": CPU}
    return KVCache(**sizes | options)


@needs_kernel
@pytest.mark.parametrize(
    ("sampling", "options"),
    crossed([GREEDY, SAMPLED], [{"prefill_tokens": 7}, {"blocks": 14, "prefill_tokens": 9}]),
    ids=str,
)
def test_both_paths_give_the_same_rollouts(
    model: Transformer, make_requests: Requests, sampling: object, options: dict
) -> None:
    """Through chunked prefill, and rollouts that are parked and prefilled again."""
    requests = make_requests(7, sampling)
    kernel, torch_only = make_engine(model, **options), on_torch(make_engine(model, **options))
    assert_same(run(kernel, requests), run(torch_only, requests))
    assert kernel.stats() == torch_only.stats()
    assert (kernel.stats().parked > 0) == ("blocks" in options)


@needs_kernel
@pytest.mark.parametrize("cached", [torch.float32, torch.bfloat16])
def test_both_paths_agree_on_bfloat16_keys(model: Transformer, make_requests: Requests, cached: torch.dtype) -> None:
    """Hidden states in float32, as `GeneratorModel` has them on the CPU."""
    outs = []
    for library in (attention.kernel().library, None):
        engine = make_engine(model)
        cache = engine._cache
        sizes = {"num_kv_heads": cache.num_kv_heads, "head_dim": cache.head_dim, "num_blocks": cache.num_blocks}
        engine._cache = small_cache(num_layers=2, dtype=cached, **sizes)
        engine._cache.library = library
        rollouts = run(engine, make_requests(5, GREEDY))
        outs.append(np.array([rollouts[key].behavior_logprobs_T[:3] for key in sorted(rollouts)]))
    np.testing.assert_allclose(*outs, atol=1e-5)


def test_sparse_blocks_give_the_same_rollouts(model: Transformer, make_requests: Requests) -> None:
    """One rollout far from its neighbors in the cache."""
    requests = make_requests(3, GREEDY, group_size=1)
    engine = on_torch(make_engine(model))
    pool = engine._scheduler.pool
    blocks = [pool.take() for _ in range(200)]
    engine.submit(requests[:1])
    engine.step()
    pool.release(blocks)
    engine.submit(requests[1:])
    engine.step()
    assert_same(by_key(drain(engine)), run(make_engine(model), requests))


def test_what_lies_in_blocks_of_others_does_no_harm(model: Transformer, make_requests: Requests) -> None:
    """Rows of different length share a table; behind the blocks of a shorter one it names none but its own."""
    requests = make_requests(3, GREEDY, group_size=1)
    engine = on_torch(make_engine(model))
    other = engine._scheduler.pool.take()
    assert other == 0, "the one that zeros in a table would name"
    for stored in (engine._cache.keys_L_C_J_K_S, engine._cache.values_L_C_J_S_K):
        stored[:, other] = float("nan")
    engine.submit(requests)
    rollouts = list[Rollout]()
    while engine.has_work:
        rollouts += engine.step()
    assert_same(by_key(rollouts), run(make_engine(model), requests))


@pytest.fixture
def fresh() -> Iterator[None]:
    caches = build.load, attention.kernel
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_the_path_is_chosen_with_the_cache_and_has_a_name(
    model: Transformer, make_requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model)
    if attention.kernel().library is not None:
        assert backend_name(engine._cache) == f"c++ {attention.instructions(attention.kernel().library)}"
    assert backend_name(small_cache(head_dim=12)) == "torch (head_dim = 12 is no multiple of 8)"
    assert backend_name(small_cache(device=torch.device("meta"))) == "torch (meta device)"
    monkeypatch.setenv(build.VARIABLE, "torch")
    build.load.cache_clear()
    attention.kernel.cache_clear()
    off = small_cache()
    assert backend_name(off) == "torch (LLAMARL_KERNELS=torch)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_float32_over_long_contexts(dtype: torch.dtype) -> None:
    """4,000 tokens, half of them shared; bfloat16 sums would be off by a tenth."""
    cache = small_cache(num_blocks=300, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for stored in (cache.keys_L_C_J_K_S, cache.values_L_C_J_S_K):
        stored.copy_(torch.randn(stored.shape, generator=generator).abs())
    q_B_H_K = torch.randn(2, 2 * cache.num_kv_heads, cache.head_dim, generator=generator)
    table_B_M = torch.randperm(300, generator=generator)[: 2 * 2 * (2000 // BLOCK_SIZE)].view(2, -1)
    half = table_B_M.shape[1] // 2
    table_B_M[1, :half] = table_B_M[0, :half]
    prefix_B, own_B = torch.tensor([half * BLOCK_SIZE - 3] * 2), torch.tensor([half * BLOCK_SIZE - 5, 7])
    out = attend_to_table(cache, 0, q_B_H_K, table_B_M, valid_places(prefix_B, own_B, 2 * half))
    for row in range(2):
        keys, values = (stored[0][table_B_M[row]].double() for stored in (cache.keys_L_C_J_K_S, cache.values_L_C_J_S_K))
        keys_J_K_N, values_J_N_K = keys.permute(1, 2, 0, 3).flatten(2), values.transpose(0, 1).flatten(1, 2)
        places = torch.arange(2 * half * BLOCK_SIZE)
        seen = (places < prefix_B[row]) | ((places >= half * BLOCK_SIZE) & (places < half * BLOCK_SIZE + own_B[row]))
        scores = q_B_H_K[row].double().unflatten(0, (cache.num_kv_heads, -1)) @ keys_J_K_N * cache.head_dim**-0.5
        expected = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ values_J_N_K
        torch.testing.assert_close(out[row].double(), expected.flatten(0, 1), rtol=2e-5, atol=1e-5)
