"""Memory for the KV cache next to everything that a start counts, which is more than a plan counts."""

from __future__ import annotations

from typing import Any

from llamarl.config import RunConfig
from llamarl.models.fit import CONTEXT_BYTES, cache_bytes, holdings, longest
from llamarl.models.memory import total
from llamarl.models.sizes import DecoderSizes
from llamarl.run.memory import HOST, run_holdings, shares_in_turns

CACHE_SHARE = 0.2
"""Share of a shared device for the KV cache. Microbatches are reduced to reach it."""


def room_for_cache(config: RunConfig, shape: DecoderSizes, there: float) -> float:
    """Returns the free bytes on each device of `there` bytes for a KV cache beyond one longest sequence. Negative means
    that a start would be refused."""
    if config.trainer.device != "cpu" and config.cluster.placement == "colocated":
        moments = shares_in_turns(config, run_holdings(config, shape), 1)
        fullest = [max(sum(map(total, of[place].values())) for place in of if place != HOST) for of in moments]
        return there - (max(fullest) if max(fullest) > there else fullest[-1])
    held = [*holdings(config, shape, {})]
    if config.trainer.device == "cpu":  # all executors share a machine without GPUs
        return there - sum(one.num_ranks * float(total(one.parts)) for one in held)
    trainer, generator = (float(total(one.parts)) + CONTEXT_BYTES for one in held[:2])
    return there - (max(trainer, generator) if trainer > there else generator)


def with_room(config: RunConfig, shape: DecoderSizes, there: float, wanted: float) -> RunConfig:
    """Returns the run with microbatches small enough for a KV cache of `wanted` bytes, or with the smallest."""
    limit = sum(longest(config, shape))
    while (tokens := config.trainer.microbatch_tokens) > limit and room_for_cache(config, shape, there) < wanted:
        config = _with(config, "trainer", microbatch_tokens=max(limit, tokens // 2))
    return config


def with_cache(config: RunConfig, shape: DecoderSizes, room: float) -> RunConfig:
    """Returns the run with a KV cache for the longest sequence and as many concurrent ones as fit into `room` bytes."""
    generator = config.generator
    one = cache_bytes(config, shape, sum(longest(config, shape)))
    return _with(config, "generator", kv_cache_bytes=int(one + min(room, (generator.max_running - 1) * one)))


def _with(config: RunConfig, section: str, **settings: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=settings)})
