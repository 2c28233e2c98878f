"""The engine over the Triton kernels, by their interpreter where there is no GPU; see `tests/kernels/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from llamarl.generation.engine import Engine
from llamarl.generation.model import GeneratorModel
from llamarl.kernels import gpu
from llamarl.models.transformer import Transformer
from llamarl.types import GenerationRequest
from tests.generation.native import GREEDY, SAMPLED, assert_same, make_engine, run
from tests.kernels.engines import engine as computed_by

triton_decode = pytest.importorskip("llamarl.kernels.triton_decode")


@pytest.mark.parametrize("sampling", [GREEDY, replace(SAMPLED, top_p=0.9)], ids=["greedy", "truncated"])
def test_an_engine_generates_the_same(
    make_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch, sampling: object
) -> None:
    """Its steps, those with prefill and padded ones included, read the cache by Triton, and need no clean blocks."""
    requests = [
        GenerationRequest(
            group_id=i, prompt_token_ids_T=torch.arange(1, 4 + 15 * i, dtype=torch.int32).numpy(), group_size=2 - i,
            sampling=replace(sampling, max_new_tokens=6 + 12 * i),
        )
        for i in range(2)
    ]  # fmt: skip

    def engine(**options: object) -> Engine:
        served = GeneratorModel(make_model().shape, "float32", "cpu")
        served.load(make_model())
        return make_engine(served, blocks=9, prefill_tokens=7, max_running=3, **options)

    monkeypatch.setattr(triton_decode, "_PROGRAMS", 1)
    with computed_by("torch"):
        expected = run(engine(), requests)
        monkeypatch.setattr("llamarl.generation.kv_cache.fused", lambda device: gpu.Fused(decode=triton_decode))
        graphed = engine(graphs=True)
        assert " triton" in graphed.describe()
        for stored in (graphed._cache.keys_L_C_J_K_S, graphed._cache.values_L_C_J_S_K):
            stored.fill_(torch.nan)
        assert_same(run(graphed, requests), expected)
