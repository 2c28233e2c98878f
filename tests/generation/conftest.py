"""Tiny models and slow references for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from llamarl.models.shape import ModelShape, RopeScaling
from llamarl.models.transformer import Transformer
from llamarl.types import GenerationRequest, SamplingParams
from tests.kernels.engines import ENGINES, engine

VOCAB = 40
CONTEXT = 96


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=ENGINES)
def computed_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """What multiplies."""
    with engine(request.param):
        yield request.param


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Transformer]:
    def make(
        seed: int = 0, num_kv_heads: int = 2, family: str = "llama", rope: RopeScaling | None = None
    ) -> Transformer:
        shape = ModelShape(
            family=family, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=num_kv_heads, head_dim=8,
            intermediate_size=48, vocab_size=VOCAB, max_position_embeddings=CONTEXT,
            rope_scaling=rope,
        )  # fmt: skip
        model = Transformer(shape)
        model.initialize(seed, std=0.25)
        return model

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Transformer]) -> Transformer:
    return make_model()


@pytest.fixture(scope="session")
def make_requests() -> Callable[..., list[GenerationRequest]]:
    def make(count: int, sampling: SamplingParams, group_size: int = 3, seed: int = 0) -> list[GenerationRequest]:
        """Prompts of 1 to 45 tokens; the first has one token, the second exactly one block beside its last token."""
        rng = np.random.default_rng(seed)
        lengths = [1, 17, *rng.integers(2, 46, count)][:count]
        return [
            GenerationRequest(
                group_id=10 + i,
                prompt_token_ids_T=rng.integers(0, VOCAB, length).astype(np.int32),
                group_size=group_size,
                sampling=sampling,
            )
            for i, length in enumerate(lengths)
        ]

    return make
