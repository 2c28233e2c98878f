"""Both paths of attention, by what the engine gets from them; `tests/kernels/test_attention.py` has the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.generation.attention import KernelAttention, backend_name, plan_attention
from llamarl.generation.engine import Engine
from llamarl.generation.kv_cache import KVCache
from llamarl.generation.torch_attention import DecodePlan, TorchAttention
from llamarl.kernels import attention, build
from llamarl.models.transformer import Transformer
from llamarl.types import GenerationRequest
from tests.generation.native import GREEDY, SAMPLED, assert_same, drain, make_engine, run
from tests.generation.references import by_key

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
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{"prefill_tokens": 7}, {"blocks": 14, "prefill_tokens": 9}], ids=str)
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
    """One rollout far from its neighbors in the cache: torch gathers blocks instead of reading a range."""
    requests = make_requests(3, GREEDY, group_size=1)
    engine = on_torch(make_engine(model))
    pool = engine._scheduler.pool
    blocks = [pool.take_low() for _ in range(200)]
    engine.submit(requests[:1])
    engine.step()
    pool.release(blocks)
    engine.submit(requests[1:])
    engine.step()
    plan = DecodePlan(engine._cache, engine._rows, model.shape.num_heads, torch.float32)
    assert isinstance(plan._sets[0].blocks, Tensor)
    assert_same(by_key(drain(engine)), run(make_engine(model), requests))


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
    nowhere = np.zeros(0, np.int64)
    rows = engine._rows
    if attention.kernel().library is not None:
        assert backend_name(engine._cache) == f"c++ {attention.instructions(attention.kernel().library)}"
        assert isinstance(plan_attention(engine._cache, 4, rows, [], nowhere, nowhere), KernelAttention)
    assert backend_name(small_cache(head_dim=12)) == "torch (head_dim = 12 is no multiple of 8)"
    assert backend_name(small_cache(device=torch.device("meta"))) == "torch (meta device)"
    monkeypatch.setenv(build.VARIABLE, "torch")
    build.load.cache_clear()
    attention.kernel.cache_clear()
    off = small_cache()
    assert backend_name(off) == "torch (LLAMARL_KERNELS=torch)"
    assert isinstance(plan_attention(off, 4, rows, [], nowhere, nowhere), TorchAttention)
