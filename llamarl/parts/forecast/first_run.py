"""`FirstRun`: settings of a run that fits its devices, from a plan and the core's memory estimate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from llamarl.config import ConfigError, RunConfig, validated
from llamarl.config.roles import ATTENTION, LoraConfig, TrainerConfig
from llamarl.models.fit import GIB, RankMemory, holdings
from llamarl.observability.spans import available_bytes
from llamarl.parts.forecast.constants import OF_CORES
from llamarl.parts.forecast.feasibility import plans
from llamarl.parts.forecast.hardware import CPU, GPUS, Gpu, Pool
from llamarl.parts.forecast.plan import Plan
from llamarl.parts.forecast.report import choose
from llamarl.parts.forecast.request import PlanRequest
from llamarl.parts.forecast.room import CACHE_SHARE, room_for_cache, with_cache, with_room
from llamarl.parts.forecast.run_file import on_hosts, planned_settings
from llamarl.parts.forecast.shapes import smaller

LIGHT = {"weights": "bfloat16", "moments": "8bit"}
"""Settings of a trainer with the fewest bytes per weight."""
LEARNING_RATES = 1e-6, 1e-5
"""Peak learning rates of full training and of adapters, which need about ten times as much (as in supervised training,
thinkingmachines.ai/blog/lora)."""
MOST_GPUS = 64
"""Largest cluster that is suggested."""
RESERVES = (0.25, 0.45)
"""Shares of device memory to reserve, in order, until a plan fits with memory that the plan does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRun:
    """A run that fits."""

    plan: Plan
    config: RunConfig
    held: list[RankMemory]
    """Memory of each executor, by the estimate that can refuse a start."""
    because: str = ""
    """Reason for adapters, and what would make full training fit. Empty means full training or adapters on request."""


def first_run(request: PlanRequest, given: dict[str, Any], adapters: str) -> FirstRun:
    """Returns the settings of a first run: full training if it fits, otherwise adapters.

    Args:
        request: request on one pool, without adapters.
        given: settings that a plan does not choose, as parsed TOML.
        adapters: `auto`, `always` or `never`.

    Raises:
        ConfigError: no settings fit. The message names the nearest ones that would.
    """
    beside = _adapters(request)
    ways = {"auto": (None, beside), "always": (beside,), "never": (None,)}[adapters]
    reason = own = ""
    for lora in ways:
        try:
            found = _fitted(replace(request, lora=lora), given)
        except ConfigError as error:
            if not reason:
                reason, _, own = str(error).partition("; ")
        else:
            lightly = _lightly(request, given) if reason else ""
            return replace(found, because=f"{reason}; they fit {lightly}" if lightly else reason)
    reason += " (nor with adapters)" * (len(ways) > 1)
    nearest = ", or ".join(_nearest(request, given, ways))
    raise ConfigError(f"{reason}; {nearest or own or 'use fewer tokens, or a machine with more memory'}")


def _adapters(request: PlanRequest) -> LoraConfig:
    """Returns adapters for all supported projections."""
    return LoraConfig(rank=16, targets=[*ATTENTION]) if request.model.moe else LoraConfig(rank=16)


def _lightly(request: PlanRequest, given: dict[str, Any]) -> str:
    """Returns options with which full training fits. Empty means that it does not, or that they are set already."""
    kept = given.get("trainer", {})
    if kept.items() >= LIGHT.items():
        return ""
    trainer = TrainerConfig.model_validate(kept | LIGHT | {"dtype": "bfloat16"})
    try:
        _fitted(replace(request.with_trainer(trainer), lora=None), given | {"trainer": kept | LIGHT})
    except ConfigError:
        return ""
    return "with " + " ".join(f"--trainer.{name} {value}" for name, value in LIGHT.items())


def _nearest(request: PlanRequest, given: dict[str, Any], ways: tuple[LoraConfig | None, ...]) -> Iterator[str]:
    """Yields changes of the request that make it fit: adapters, a smaller model, more GPUs, a larger GPU."""

    def works(asked: PlanRequest, how: LoraConfig | None) -> bool:
        try:
            _fitted(replace(asked, lora=how, max_staleness=min(1, request.max_staleness)), given)
        except ConfigError:
            return False
        return True

    if None in ways and (lightly := _lightly(request, given)):
        yield f"train all weights {lightly}"
    if (beside := _adapters(request)) not in ways and works(request, beside):
        yield "train adapters (leave out --adapters never)"
    way, pool = ways[-1], request.pools[0]
    with_them = " with adapters" if way else ""
    if other := next((one for one in smaller(request.model) if works(replace(request, model=one), way)), None):
        yield f"use --model {other.path}{with_them}"
    if pool.gpu.name == CPU:
        return
    if count := _least(lambda n: works(replace(request, pools=(Pool(gpu=pool.gpu, count=n),)), way), pool.count):
        yield f"use --gpus {count}{with_them}"
    larger = sorted((gpu for gpu in GPUS.values() if gpu.memory_bytes > pool.gpu.memory_bytes), key=_size)
    for gpu in larger:
        if works(replace(request, pools=(Pool(gpu=gpu, count=pool.count),)), way):
            yield f"use --gpu {gpu.name}{with_them}"
            return


def _size(gpu: Gpu) -> float:
    return gpu.memory_bytes


def _least(works: Callable[[int], bool], low: int) -> int:
    """Returns the smallest sufficient count above `low`, by bisection. 0 means none up to `MOST_GPUS`."""
    high = 2 * low
    while high <= MOST_GPUS and not works(high):
        low, high = high, 2 * high
    if high > MOST_GPUS:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _fitted(request: PlanRequest, given: dict[str, Any]) -> FirstRun:
    """Returns the first plan that fits by the core's estimate, which counts more than a plan. Raises ConfigError."""
    reason: ConfigError | None = None
    for share in (request.constants.reserved_share, *RESERVES):
        constants = replace(request.constants, reserved_share=share)
        try:
            found = plans(replace(request, constants=constants))
        except ConfigError as error:
            raise reason or error from None
        first = choose(*found)
        for plan in (first, *(one for one in found if one and one is not first and one.is_runnable)):
            try:
                return _resolved(plan, request, given)
            except ConfigError as error:
                reason = reason or error
    assert reason is not None
    raise reason


def _resolved(plan: Plan, request: PlanRequest, given: dict[str, Any]) -> FirstRun:
    """Returns the settings of a plan, with microbatches and a cache that fit. Raises ConfigError."""
    pool, shape = request.pools[0], request.model
    if pool.gpu.name == CPU:
        settings, there, where = _of_cores(plan, given), available_bytes(), "this machine"
    else:
        settings, there, where = _merged(given, planned_settings(plan)), request.usable_bytes(pool), pool.gpu.name
        settings["cluster"] = on_hosts(settings["cluster"], plan.num_hosts)
    settings["trainer"]["learning_rate"] = LEARNING_RATES[request.lora is not None]
    config = validated(settings, RunConfig)
    config = with_room(config, shape, there, 0.0 if plan.rules.overlap else CACHE_SHARE * there)
    if (room := room_for_cache(config, shape, there)) < 0:
        raise ConfigError(
            f"{shape.name} needs {(there - room) / GIB:.1f} GiB of {where}, which has {there / GIB:.1f} GiB to use"
        )
    if pool.gpu.name != CPU:
        config = with_cache(config, shape, room)
    return FirstRun(plan=plan, config=config, held=[*holdings(config, shape, {})])


def _of_cores(plan: Plan, given: dict[str, Any]) -> dict[str, Any]:
    """Returns settings for a machine without GPUs: half of the cores train, the others generate."""
    cores = os.cpu_count() or 1
    planned = planned_settings(plan)
    planned["generator"] = {"device": "cpu", "threads": max(1, cores // 2), "max_running": plan.generator.slots}
    planned["trainer"] |= {"parallelism": {}, "device": "cpu", "threads": max(1, cores - cores // 2)}
    planned["rollout"] |= {"max_staleness": max(1, plan.staleness)}
    planned["cluster"] = {}
    return _merged(given, planned)


def cpu_request(request: PlanRequest) -> PlanRequest:
    """Returns the request on the cores of this machine. They share its memory, so none has a separate limit."""
    pool = Pool(gpu=replace(request.pools[0].gpu, memory_bytes=1e18), count=max(2, os.cpu_count() or 1))
    return replace(request, pools=(pool,), constants=OF_CORES)


def _merged(given: dict[str, Any], planned: dict[str, Any]) -> dict[str, Any]:
    sections = {
        name: {**given[name], **settings} if isinstance(given.get(name), dict) else settings
        for name, settings in planned.items()
    }
    found = given | sections
    rollout = found["rollout"]
    # Slow groups are overtaken by a quarter of a step, which adds at most one step of staleness (docs/staleness.md).
    rollout["window"] = 1 + rollout["prompts_per_step"] // 4 if rollout["max_staleness"] else 1
    return found
