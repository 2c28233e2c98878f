"""The engine over the Triton kernels, on a GPU or by their interpreter; see `test_decode.py`."""

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
from tests.nightly import NIGHTLY
from tests.parts.cuda.interpreter import needs_interpreter

ops = pytest.importorskip("llamarl.parts.cuda.ops")
decode = pytest.importorskip("llamarl.parts.cuda.decode")
pytestmark = needs_interpreter
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


SERVED = {"qwen3": replace(SAMPLED, top_p=0.9), **({"llama": GREEDY} if NIGHTLY else {})}
"""By day the one whose kernels do all that the other's do, and more; the interpreter takes seconds for each."""


@pytest.mark.parametrize(("family", "sampling"), SERVED.items(), ids=SERVED)
def test_an_engine_generates_the_same(
    make_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch, family: str, sampling: object
) -> None:
    """Its steps, those with prefill and padded ones included, run all kernels, and need no clean blocks."""
    requests = [
        GenerationRequest(
            group_id=i, prompt_token_ids_T=torch.arange(1, 4 + 15 * i, dtype=torch.int32).numpy(), group_size=2 - i,
            sampling=replace(sampling, max_new_tokens=4 + 8 * i),
        )
        for i in range(2)
    ]  # fmt: skip

    def engine(**options: object) -> Engine:
        served = GeneratorModel(make_model(family=family).shape, "float32", DEVICE)
        served.load(make_model(family=family))
        return make_engine(served, blocks=9, prefill_tokens=7, max_running=3, **options)

    monkeypatch.setattr(decode, "_PROGRAMS", 1)
    with computed_by("torch"):
        monkeypatch.setattr(gpu, "kernel", lambda name, device: None)
        expected = run(engine(graphs=False), requests)
        monkeypatch.setattr(gpu, "kernel", lambda name, device: {"decode": decode, "ops": ops}.get(name))
        graphed = engine(graphs=True)
        assert " triton" in graphed.describe()
        for stored in (graphed._cache.keys_L_C_J_K_S, graphed._cache.values_L_C_J_S_K):
            stored.fill_(torch.nan)
        assert_same(run(graphed, requests), expected)


def test_quantized_rows_and_sums_go_from_kernel_to_kernel(
    make_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms add the product before and quantize for the next; against torch, which does one after the other."""
    token_N, logits = torch.arange(1, 21, device=DEVICE), list[torch.Tensor]()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + (k + v).repeat_interleave(2, 1)

    with computed_by("torch"):
        for kernels in ({}, {"ops": ops}):
            monkeypatch.setattr(gpu, "kernel", lambda name, device, kernels=kernels: kernels.get(name))
            served = GeneratorModel(make_model().shape, "int8", DEVICE)
            served.load(make_model())
            hidden_N_D = served(token_N, torch.arange(20, device=DEVICE), attend)
            logits.append(served.logits(hidden_N_D))
    expected, found = logits
    assert 0 < ((found - expected).norm() / expected.norm()).item() < 0.03
