"""Explains why nothing fits, by how much, and finds the nearest request that fits."""

from __future__ import annotations

from dataclasses import replace

from llamarl.config import ConfigError
from llamarl.parts.forecast.candidates import generator_candidates, sum_parts, trainer_candidates
from llamarl.parts.forecast.generation import generation_memory
from llamarl.parts.forecast.hardware import Pool
from llamarl.parts.forecast.plan import Plan
from llamarl.parts.forecast.request import ASYNCHRONOUS, PlanRequest
from llamarl.parts.forecast.solver import asynchronous_plan, synchronous_plan
from llamarl.parts.forecast.sync import priced
from llamarl.parts.forecast.training import training_memory

MOST_GPUS = 1 << 17
"""Largest cluster that is suggested."""


def plans(request: PlanRequest) -> tuple[Plan | None, Plan | None]:
    """Returns the best synchronous and asynchronous plan. At least one exists.

    Raises:
        ConfigError: the request is impossible. The message has the missing amount and a suggestion.
    """
    request.check()
    synchronous, asynchronous = (
        plan and priced(plan) for plan in (synchronous_plan(request), asynchronous_plan(request))
    )
    if synchronous is None and asynchronous is None:
        raise ConfigError(explain(request))
    return synchronous, asynchronous


def explain(request: PlanRequest) -> str:
    """Returns which memory constraint fails on the first pool, by how many gigabytes, and the smallest sufficient
    number of GPUs."""
    pool = request.pools[0]
    usable = request.usable_bytes(pool)
    parts = training_memory(request, trainer_candidates(request, pool, ASYNCHRONOUS))
    total = sum_parts(parts)
    best = int(total.argmin())
    split = ", ".join(f"{name} {values[best] / 1e9:.1f}" for name, values in parts.items())
    generators = generator_candidates(request, pool, ASYNCHRONOUS, 1)
    generator = float(sum_parts(generation_memory(request, generators, resident_weights=False)).min())
    if total[best] > usable:
        short = f"the trainer needs at least {total[best] / 1e9:.1f} GB per GPU ({split})"
        over = total[best] - usable
    elif generator > usable:
        short, over = f"a generator needs at least {generator / 1e9:.1f} GB per GPU", generator - usable
    else:
        short = f"trainer state and a generator together need more, at least {(total[best] + generator) / 1e9:.1f} GB"
        over = max(0.0, total[best] + generator - usable)
    return (
        f"{request.model.name} fits in no layout on {pool.count} x {pool.gpu.name}: {short}, {over / 1e9:.1f} GB more "
        f"than the {usable / 1e9:.1f} GB usable; {_nearest(request)}"
    )


def _nearest(request: PlanRequest) -> str:
    """Returns the smallest sufficient number of GPUs of the first pool's kind, or fewer tokens if no number is
    sufficient."""
    low, high = request.pools[0].count, request.pools[0].count
    while high < MOST_GPUS and not _works(request, high):
        low, high = high, high * 2
    if not _works(request, high):
        shorter = replace(request, prompt_tokens=max(1, request.prompt_tokens // 2))
        return f"use a GPU with more memory, or responses well under {shorter.lengths.limit_tokens} tokens"
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _works(request, middle) else (middle, high)
    return f"use --gpus {high}, the fewest that work"


def _works(request: PlanRequest, count: int) -> bool:
    larger = replace(
        request, max_staleness=min(1, request.max_staleness), pools=(Pool(gpu=request.pools[0].gpu, count=count),)
    )
    return bool(synchronous_plan(larger) or asynchronous_plan(larger))
