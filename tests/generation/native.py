"""The native engine for tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from llamarl.generation.attention import KVCache
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel
from llamarl.models.transformer import Transformer
from llamarl.types import GenerationRequest, Rollout, SamplingParams
from tests.generation.conformance import Start
from tests.generation.references import Key, by_key

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, max_new_tokens=24, seed=5)


def make_engine(
    model: Transformer, blocks: int | None = 400, max_running: int = 16, prefill_tokens: int = 64, **options: Any
) -> Engine:
    shape = model.shape
    block_bytes = KVCache.block_bytes(shape, torch.float32)
    kv_bytes = None if blocks is None else blocks * block_bytes
    outside = {name: options.pop(name) for name in ("version", "decode") if name in options}
    settings = EngineSettings(max_running=max_running, prefill_tokens=prefill_tokens, kv_bytes=kv_bytes, **options)
    return Engine(model, settings, **outside)


def drain(engine: Engine) -> list[Rollout]:
    """Everything that comes out until nothing is left; nothing is held then."""
    rollouts = []
    for _ in range(5000):
        if not engine.has_work:
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.kv_use) == (0, 0, 0.0)
            return rollouts
        rollouts += engine.step()
    raise AssertionError("the engine does not finish")


def run(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[Key, Rollout]:
    engine.submit(requests)
    return by_key(drain(engine))


def assert_same(left: dict[Key, Rollout], right: dict[Key, Rollout]) -> None:
    assert left.keys() == right.keys()
    for key, rollout in left.items():
        np.testing.assert_array_equal(rollout.token_ids_T, right[key].token_ids_T)
        np.testing.assert_allclose(rollout.behavior_logprobs_T, right[key].behavior_logprobs_T, atol=2e-5)
        assert rollout.finish_reason == right[key].finish_reason


@dataclass
class NativeServed:
    """For the conformance suite."""

    backend: Engine
    kv_on_update: Literal["keep", "recompute"]
    load: Callable[[Transformer], object]

    def update(self, model: Transformer, version: int) -> None:
        self.load(model)
        self.backend.set_version(version)


def serve(kv_on_update: Literal["keep", "recompute"], **options: Any) -> Start:
    """With the trainer's model under "recompute", with the one made for generation under "keep"."""

    @contextmanager
    def start(model: Transformer) -> Iterator[NativeServed]:
        if kv_on_update == "keep":
            served = GeneratorModel(model.shape, "float32", "cpu")
            served.load(model)
            load = served.load
        else:
            served = copy.deepcopy(model)

            def load(newer: Transformer) -> None:
                served.load_state_dict(newer.state_dict())

        engine = make_engine(served, blocks=None, kv_on_update=kv_on_update, **({"graphs": False} | options))
        yield NativeServed(engine, kv_on_update, load)

    return start
