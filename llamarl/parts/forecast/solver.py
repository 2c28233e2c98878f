"""The best integer layout under given rules. Columns: L candidates of one executor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from llamarl.parts.forecast.candidates import (
    Generators,
    TrainerLayouts,
    admitted,
    generator_candidates,
    sum_parts,
    trainer_candidates,
)
from llamarl.parts.forecast.generation import generation_memory, generation_parts, steady_parts
from llamarl.parts.forecast.hardware import Pool
from llamarl.parts.forecast.plan import GeneratorPlan, Plan, TrainerPlan
from llamarl.parts.forecast.request import ASYNCHRONOUS, SYNCHRONOUS, PlanRequest, Rules
from llamarl.parts.forecast.training import training_memory, training_parts

STALENESS_SHARE = 0.10
"""The plan has the smallest staleness whose step is at most this share longer than the best step."""
Layouts = TypeVar("Layouts", TrainerLayouts, Generators)


@dataclass(frozen=True, kw_only=True, slots=True)
class _FittingCandidates(Generic[Layouts]):
    """Candidates of one executor that fit if it does not share the memory."""

    layouts: Layouts
    time_s_L: np.ndarray
    kept_L: np.ndarray
    """Bytes that stay while the other executor works: trainer state, or a generator's weights."""
    transient_L: np.ndarray
    """Bytes that are needed only during the executor's phase."""
    latency_s_L: np.ndarray
    """Seconds to generate the longest response. 0 for trainers."""


def synchronous_plan(request: PlanRequest) -> Plan | None:
    """Returns the best colocated plan on one pool. None means that nothing fits."""
    plans = [solve(request, (pool, pool), SYNCHRONOUS, 0) for pool in request.pools]
    return min((plan for plan in plans if plan), key=lambda plan: plan.step_s, default=None)


def asynchronous_plan(request: PlanRequest) -> Plan | None:
    """Returns the best disaggregated plan over assignments of the pools, at the smallest staleness that is nearly as
    fast as the fastest. None means that nothing fits."""
    pairs = [(first, second) for first in request.pools for second in request.pools]
    found = list[Plan]()
    for staleness in range(1, request.max_staleness + 1):
        plans = [solve(request, pair, ASYNCHRONOUS, staleness) for pair in pairs]
        found += sorted((plan for plan in plans if plan), key=lambda plan: plan.step_s)[:1]
    least_s = min((plan.step_s for plan in found), default=0.0)
    return next((plan for plan in found if plan.step_s <= least_s * (1 + STALENESS_SHARE)), None)


def solve(request: PlanRequest, pools: tuple[Pool, Pool], rules: Rules, staleness: int) -> Plan | None:
    """Returns the plan with the shortest step under `rules`. None means that nothing fits.

    Args:
        pools: pools of trainer and generators; the same object if they share it.
        staleness: S. 0 unless `rules.overlap`.
    """
    trainers, generators = _trainers(request, pools[0], rules), _generators(request, pools[1], rules, staleness)
    if not len(trainers.time_s_L) or not len(generators.time_s_L):
        return None
    if rules.overlap:
        found = _disaggregated(trainers, generators, pools, staleness, rules)
    else:
        found = _in_turn(request.usable_bytes(pools[0]), trainers, generators, rules)
    if found is None:
        return None
    trainer, generator = found
    return Plan(
        request=request,
        rules=rules,
        trainer=_trainer_plan(request, pools[0], trainers.layouts.take(np.array([trainer])), rules),
        generator=_generator_plan(request, pools[1], generators.layouts.take(np.array([generator])), rules, staleness),
        staleness=staleness,
    )


def fastest_phases(request: PlanRequest, pools: tuple[Pool, Pool], staleness: int) -> tuple[float, float] | None:
    """Returns the seconds of training and of generation if each uses the fastest layout of its pool. None means none
    fits."""
    trainers = _trainers(request, pools[0], ASYNCHRONOUS).time_s_L
    generators = _generators(request, pools[1], ASYNCHRONOUS, staleness).time_s_L
    return (float(trainers.min()), float(generators.min())) if len(trainers) and len(generators) else None


def _trainers(request: PlanRequest, pool: Pool, rules: Rules) -> _FittingCandidates[TrainerLayouts]:
    layouts = trainer_candidates(request, pool, rules)
    memory = training_memory(request, layouts)
    transient = memory["gathered"] * layouts.sharded + memory["activations"]
    rows = np.flatnonzero(memory["state"] + transient <= request.usable_bytes(pool))
    layouts = layouts.take(rows)
    return _FittingCandidates(
        layouts=layouts,
        time_s_L=sum_parts(training_parts(request, pool, layouts, publishes=rules.overlap)),
        kept_L=memory["state"][rows],
        transient_L=transient[rows],
        latency_s_L=np.zeros(len(rows)),
    )


def _generators(request: PlanRequest, pool: Pool, rules: Rules, staleness: int) -> _FittingCandidates[Generators]:
    layouts = generator_candidates(request, pool, rules, staleness)
    memory = generation_memory(request, layouts, resident_weights=rules.one_layout)
    rows = np.flatnonzero(memory["weights"] + memory["kv"] <= request.usable_bytes(pool))
    layouts = layouts.take(rows)
    longest = request.lengths.longest_tokens(request.num_samples)
    return _FittingCandidates(
        layouts=layouts,
        time_s_L=sum_parts(generation_parts(request, pool, layouts, rules)),
        kept_L=memory["weights"][rows],
        transient_L=memory["kv"][rows],
        latency_s_L=longest * sum_parts(steady_parts(request, pool, layouts)),
    )


def _best_below(key_L: np.ndarray, time_s_L: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each limit the shortest time among candidates with key <= limit (infinite if none), and its row (0 if
    none)."""
    order = np.lexsort((time_s_L, key_L))
    running = np.minimum.accumulate(time_s_L[order])
    is_new = np.concatenate([[True], running[1:] < running[:-1]])
    rows = order[np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))]
    position = np.searchsorted(key_L[order], limits, side="right") - 1
    found = position >= 0
    return np.where(found, running[position], np.inf), np.where(found, rows[position], 0)


def _disaggregated(
    trainers: _FittingCandidates[TrainerLayouts],
    generators: _FittingCandidates[Generators],
    pools: tuple[Pool, Pool],
    staleness: int,
    rules: Rules,
) -> tuple[int, int] | None:
    """Minimizes max(trainer, generators, (longest response + trainer) / (S + 1)) over layouts.

    The third term is the staleness bound: a response admitted when step k - S - 1 is adopted must be complete when step
    k starts, (S + 1) steps later minus one train step.
    """
    room = pools[0].count - generators.layouts.gpus_L * (pools[0] is pools[1])
    train_s, rows = _best_below(trainers.layouts.gpus_L, trainers.time_s_L, room)
    latency_s = generators.latency_s_L * rules.partial_rollouts
    step_s = np.maximum(np.maximum(train_s, generators.time_s_L), (latency_s + train_s) / (staleness + 1))
    least_s = float(step_s.min())
    if not np.isfinite(least_s):
        return None
    # The fewest GPUs among equals: GPUs that do not shorten the step are better released.
    generator = int(np.lexsort((generators.layouts.gpus_L, step_s))[0])
    allowed_s = min(least_s, (staleness + 1) * least_s - latency_s[generator])
    fits = np.flatnonzero((trainers.layouts.gpus_L <= room[generator]) & (trainers.time_s_L <= allowed_s))
    best = fits[np.lexsort((trainers.time_s_L[fits], trainers.layouts.gpus_L[fits]))]
    return int(best[0] if len(best) else rows[generator]), generator


def _in_turn(
    usable: float,
    trainers: _FittingCandidates[TrainerLayouts],
    generators: _FittingCandidates[Generators],
    rules: Rules,
) -> tuple[int, int] | None:
    """Returns the rows of trainer and generators with the shortest sequential step. With separate layouts in one
    memory, trainer state and both weight copies stay, and the rest shares memory in turn. With one layout, the groups
    are equal and everything is in memory at once."""
    best = math.inf, 0, 0
    kind = generators.kept_L if rules.own_parallelism else generators.layouts.tp_L
    for value in np.unique(kind):
        mine, ours = np.flatnonzero(kind == value), np.arange(len(trainers.time_s_L))
        filled, room = np.zeros(len(ours)), np.zeros(len(mine))
        if not rules.own_memory:
            room = usable - generators.kept_L[mine] - generators.transient_L[mine]
            filled = trainers.kept_L + trainers.transient_L * (not rules.own_parallelism)
        if not rules.own_parallelism:
            ours = np.flatnonzero(trainers.layouts.tp_L == value)
        elif not rules.own_memory:
            ours = np.flatnonzero(trainers.kept_L + trainers.transient_L + value <= usable)
        if not len(ours):
            continue
        train_s, rows = _best_below(filled[ours], trainers.time_s_L[ours], room)
        step_s = train_s + generators.time_s_L[mine]
        row = int(step_s.argmin())
        best = min(best, (float(step_s[row]), int(ours[rows[row]]), int(mine[row])))
    return best[1:] if math.isfinite(best[0]) else None


def _first(parts: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(np.atleast_1d(values)[0]) for name, values in parts.items()}


def _trainer_plan(request: PlanRequest, pool: Pool, layouts: TrainerLayouts, rules: Rules) -> TrainerPlan:
    memory = _first(training_memory(request, layouts))
    if not layouts.sharded:
        memory.pop("gathered")
    return TrainerPlan(
        pool=pool,
        **{name.removesuffix("_L"): int(column[0]) for name, column in layouts.columns().items()},
        time_parts=_first(training_parts(request, pool, layouts, publishes=rules.overlap)),
        memory_parts=memory,
    )


def _generator_plan(
    request: PlanRequest, pool: Pool, generators: Generators, rules: Rules, staleness: int
) -> GeneratorPlan:
    times = _first(generation_parts(request, pool, generators, rules))
    step = _first(steady_parts(request, pool, generators))
    decode_s, step_s = times.pop("decode"), sum(step.values())
    more = replace(generators, slots_L=np.ceil(generators.slots_L * 1.12).astype(np.int64))
    larger = _first(generation_memory(request, more, resident_weights=rules.one_layout))
    sizes = {name.removesuffix("_L"): int(column[0]) for name, column in generators.columns().items()}
    return GeneratorPlan(
        pool=pool,
        **sizes,
        time_parts={name: decode_s * part / step_s for name, part in step.items()} | times,
        memory_parts=_first(generation_memory(request, generators, resident_weights=rules.one_layout)),
        latency_s=request.lengths.longest_tokens(request.num_samples) * step_s,
        memory_full=sizes["slots"] < admitted(request, sizes["replicas"], staleness, rules)
        and sum(larger.values()) > request.usable_bytes(pool),
    )
