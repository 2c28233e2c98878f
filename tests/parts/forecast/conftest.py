"""Small requests that are solved in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llamarl.parts.forecast.constants import Constants
from llamarl.parts.forecast.hardware import GPUS, Pool
from llamarl.parts.forecast.lengths import Lengths
from llamarl.parts.forecast.request import PlanRequest
from llamarl.parts.forecast.shapes import MODELS, DecoderShape

SMALL = DecoderShape(
    family="llama",
    name="small",
    hidden_size=2048,
    num_layers=16,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=6144,
    vocab_size=64_000,
    max_position_embeddings=8192,
)


@pytest.fixture
def small_request() -> PlanRequest:
    return make_request(SMALL, 8, prompts_per_step=8, group_size=4)


def make_request(model: DecoderShape | str, gpus: int, **changes: Any) -> PlanRequest:
    """`gpus` H100s; `mean_tokens`, `sigma`, `limit_tokens` and fields of Request change it."""
    lengths = Lengths.lognormal(
        mean_tokens=changes.pop("mean_tokens", 300.0),
        sigma=changes.pop("sigma", 0.7),
        limit_tokens=changes.pop("limit_tokens", 1024),
    )
    request = PlanRequest(
        model=MODELS[model] if isinstance(model, str) else model,
        prompt_tokens=128,
        lengths=lengths,
        prompts_per_step=64,
        group_size=8,
        max_staleness=2,
        pools=(Pool(gpu=GPUS["h100-80g"], count=gpus),),
        constants=Constants(),
    )
    return replace(request, **changes)
