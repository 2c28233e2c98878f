"""Room for keys and values beside all else that a start counts, which is more than a plan does."""

from __future__ import annotations

from typing import Any

from llamarl.config import RunConfig
from llamarl.models.fit import CONTEXT_BYTES, cache_bytes, holdings, longest
from llamarl.models.memory import total
from llamarl.models.sizes import DecoderSizes
from llamarl.run.memory import HOST, run_holdings, shares_in_turns

CACHE_SHARE = 0.2
"""Share of a device that roles share which keys and values should have; for less, microbatches get smaller."""


def room_for_cache(config: RunConfig, shape: DecoderSizes, there: float) -> float:
    """Bytes that are left, on each device of `there` bytes, for more keys and values than those of one longest
    sequence; less than 0: a start would be refused."""
    if config.trainer.device != "cpu" and config.cluster.placement == "colocated":
        moments = shares_in_turns(config, run_holdings(config, shape), 1)
        fullest = [max(sum(map(total, of[place].values())) for place in of if place != HOST) for of in moments]
        return there - (max(fullest) if max(fullest) > there else fullest[-1])
    held = [*holdings(config, shape, {})]
    if config.trainer.device == "cpu":  # a machine without GPUs is shared by all
        return there - sum(one.num_ranks * float(total(one.parts)) for one in held)
    trainer, generator = (float(total(one.parts)) + CONTEXT_BYTES for one in held[:2])
    return there - (max(trainer, generator) if trainer > there else generator)


def with_room(config: RunConfig, shape: DecoderSizes, there: float, wanted: float) -> RunConfig:
    """The run with microbatches so small that keys and values have as much room as `wanted`, or with the smallest."""
    limit = sum(longest(config, shape))
    while (tokens := config.trainer.microbatch_tokens) > limit and room_for_cache(config, shape, there) < wanted:
        config = _with(config, "trainer", microbatch_tokens=max(limit, tokens // 2))
    return config


def with_cache(config: RunConfig, shape: DecoderSizes, room: float) -> RunConfig:
    """The run with keys and values of the longest sequence, and of as many more as run at once, within the room."""
    generator = config.generator
    one = cache_bytes(config, shape, sum(longest(config, shape)))
    return _with(config, "generator", kv_cache_bytes=int(one + min(room, (generator.max_running - 1) * one)))


def _with(config: RunConfig, section: str, **settings: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=settings)})
