"""The best integer layout under given rules. Columns: L candidates of one executor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llamarl.forecast.candidates import admitted, generator_candidates, trainer_candidates
from llamarl.forecast.generation import (
    Generators,
    generation_memory,
    generation_parts,
    steady_parts,
    sum_parts,
)
from llamarl.forecast.hardware import BF16, FP32, Pool
from llamarl.forecast.plan import GeneratorPlan, Plan, TrainerPlan
from llamarl.forecast.request import ASYNCHRONOUS, SYNCHRONOUS, Request, Rules
from llamarl.forecast.training import TrainerLayouts, training_memory, training_parts

STALENESS_GAIN = 0.01
"""One more step of staleness must shorten the step by more than this share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trainers:
    layouts: TrainerLayouts
    time_s_L: np.ndarray
    state_L: np.ndarray
    """Bytes that stay while generators work."""
    transient_L: np.ndarray
    """Bytes of the training phase alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Generators:
    candidates: Generators
    time_s_L: np.ndarray
    latency_s_L: np.ndarray
    weights_L: np.ndarray
    kv_L: np.ndarray


def synchronous_plan(request: Request) -> Plan | None:
    """The best colocated plan on one pool, or None when nothing fits."""
    plans = [solve(request, (pool, pool), SYNCHRONOUS, 0) for pool in request.pools]
    return min((plan for plan in plans if plan), key=lambda plan: plan.step_s, default=None)


def asynchronous_plan(request: Request) -> Plan | None:
    """The best disaggregated plan over assignments of the pools and staleness, or None when nothing fits."""
    best: Plan | None = None
    for staleness in range(1, request.max_staleness + 1):
        plans = [
            solve(request, (first, second), ASYNCHRONOUS, staleness)
            for first in request.pools
            for second in request.pools
        ]
        plan = min((plan for plan in plans if plan), key=lambda plan: plan.step_s, default=None)
        if plan and (best is None or plan.step_s < best.step_s * (1 - STALENESS_GAIN)):
            best = plan
    return best


def solve(request: Request, pools: tuple[Pool, Pool], rules: Rules, staleness: int) -> Plan | None:
    """The plan of least step time under `rules`, or None when nothing fits.

    Args:
        pools: of trainer and generators; the same object when they share it.
        staleness: S; 0 unless `rules.overlap`.
    """
    trainer_pool, generator_pool = pools
    trainers = _trainers(request, trainer_pool, rules)
    generators = _generators(request, generator_pool, rules, staleness)
    if not len(trainers.time_s_L) or not len(generators.time_s_L):
        return None
    if rules.overlap:
        found = _disaggregated(trainers, generators, pools, staleness, rules)
    elif rules.own_parallelism:
        found = _colocated(request, trainer_pool, trainers, generators, rules)
    else:
        found = _shared(request, trainer_pool, trainers, generators, rules)
    if found is None:
        return None
    step_s, trainer, generator = found
    return Plan(
        request=request,
        rules=rules,
        trainer=_trainer_plan(request, trainer_pool, trainers.layouts.take(np.array([trainer])), rules),
        generator=_generator_plan(
            request, generator_pool, generators.candidates.take(np.array([generator])), rules, staleness
        ),
        staleness=staleness,
        step_s=step_s,
    )


def fastest_phases(request: Request, pools: tuple[Pool, Pool], staleness: int) -> tuple[float, float] | None:
    """Seconds of training and of generation when each is as fast as its own pool allows, or None."""
    trainers = _trainers(request, pools[0], ASYNCHRONOUS)
    generators = _generators(request, pools[1], ASYNCHRONOUS, staleness)
    if not len(trainers.time_s_L) or not len(generators.time_s_L):
        return None
    return float(trainers.time_s_L.min()), float(generators.time_s_L.min())


def _time_parts(request: Request, pool: Pool, layouts: TrainerLayouts, rules: Rules) -> dict[str, np.ndarray]:
    """With overlap also publishing: the rank's own shard is copied to where generators fetch it from."""
    parts = training_parts(request, pool, layouts)
    if rules.overlap:
        rate = pool.gpu.memory_bandwidth * request.constants.bandwidth_efficiency
        parts["publish"] = request.model.num_parameters * (FP32 + BF16) / layouts.gpus_L / rate
    return parts


def _trainers(request: Request, pool: Pool, rules: Rules) -> _Trainers:
    """Layouts that fit with the memory to themselves."""
    layouts = trainer_candidates(request, pool, rules)
    memory = training_memory(request, layouts)
    transient = memory["gathered"] * layouts.sharded + memory["activations"]
    rows = np.flatnonzero(memory["state"] + transient <= request.usable_bytes(pool))
    layouts = layouts.take(rows)
    return _Trainers(
        layouts=layouts,
        time_s_L=sum_parts(_time_parts(request, pool, layouts, rules)),
        state_L=memory["state"][rows],
        transient_L=transient[rows],
    )


def _generators(request: Request, pool: Pool, rules: Rules, staleness: int) -> _Generators:
    """Candidates that fit with the memory to themselves."""
    candidates = generator_candidates(request, pool, rules, staleness)
    resident = not rules.own_memory and not rules.own_parallelism
    memory = generation_memory(request, candidates, resident_weights=resident)
    rows = np.flatnonzero(memory["weights"] + memory["kv"] <= request.usable_bytes(pool))
    candidates = candidates.take(rows)
    longest = request.lengths.longest_tokens(request.num_samples)
    return _Generators(
        candidates=candidates,
        time_s_L=sum_parts(generation_parts(request, pool, candidates, rules)),
        latency_s_L=longest * sum_parts(steady_parts(request, pool, candidates)) if len(rows) else np.zeros(0),
        weights_L=memory["weights"][rows],
        kv_L=memory["kv"][rows],
    )


def _best_below(key_L: np.ndarray, time_s_L: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each limit the least time among candidates with key <= limit (infinite if none), and its row (0 if none)."""
    order = np.lexsort((time_s_L, key_L))
    running = np.minimum.accumulate(time_s_L[order])
    is_new = np.concatenate([[True], running[1:] < running[:-1]])
    rows = order[np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))]
    position = np.searchsorted(key_L[order], limits, side="right") - 1
    found = position >= 0
    return np.where(found, running[position], np.inf), np.where(found, rows[position], 0)


_Found = tuple[float, int, int]
"""Step time in seconds, row of the trainer, row of the generators."""


def _pick(step_s: np.ndarray, trainer_rows: np.ndarray, generator_rows: np.ndarray | None = None) -> _Found | None:
    if not len(step_s) or not np.isfinite(step_s.min()):
        return None
    best = int(step_s.argmin())
    generator = best if generator_rows is None else int(generator_rows[best])
    return float(step_s[best]), int(trainer_rows[best]), generator


def _disaggregated(
    trainers: _Trainers, generators: _Generators, pools: tuple[Pool, Pool], staleness: int, rules: Rules
) -> _Found | None:
    """min over layouts of max(trainer, generators, (longest response + trainer) / (S + 1)).

    The third term is the staleness bound: a response admitted when step k - S - 1 is adopted must be done when step k
    starts, (S + 1) steps later less one train step.
    """
    trainer_pool, generator_pool = pools
    shares = trainer_pool is generator_pool
    room = trainer_pool.count - generators.candidates.gpus_L * shares
    train_s, rows = _best_below(trainers.layouts.gpus_L, trainers.time_s_L, room)
    latency_s = generators.latency_s_L * rules.partial_rollouts
    step_s = np.maximum(np.maximum(train_s, generators.time_s_L), (latency_s + train_s) / (staleness + 1))
    if not np.isfinite(step_s.min()):
        return None
    # Among equals the fewest GPUs: what does not shorten the step is better given back.
    least_s = float(step_s.min())
    generator = int(np.lexsort((generators.candidates.gpus_L, step_s))[0])
    allowed_s = min(least_s, (staleness + 1) * least_s - latency_s[generator])
    fits = np.flatnonzero((trainers.layouts.gpus_L <= room[generator]) & (trainers.time_s_L <= allowed_s))
    best = (
        fits[np.lexsort((trainers.time_s_L[fits], trainers.layouts.gpus_L[fits]))] if len(fits) else rows[[generator]]
    )
    return least_s, int(best[0]), generator


def _colocated(
    request: Request, pool: Pool, trainers: _Trainers, generators: _Generators, rules: Rules
) -> _Found | None:
    """Phases in turn, layouts free. In one memory: state and both weight copies stay, the rest takes turns."""
    if rules.own_memory:
        best = int(trainers.time_s_L.argmin())
        return _pick(trainers.time_s_L[best] + generators.time_s_L, np.full(len(generators.time_s_L), best))
    usable = request.usable_bytes(pool)
    found: _Found | None = None
    for weights in np.unique(generators.weights_L):
        fits = np.flatnonzero(trainers.state_L + trainers.transient_L + weights <= usable)
        mine = np.flatnonzero(generators.weights_L == weights)
        if not len(fits):
            continue
        room = usable - weights - generators.kv_L[mine]
        train_s, rows = _best_below(trainers.state_L[fits], trainers.time_s_L[fits], room)
        option = _pick(train_s + generators.time_s_L[mine], fits[rows], mine)
        found = min((one for one in (found, option) if one), default=None)
    return found


def _shared(request: Request, pool: Pool, trainers: _Trainers, generators: _Generators, rules: Rules) -> _Found | None:
    """Phases in turn with one tensor-parallel size and equal groups; in one memory everything is there at once."""
    usable = request.usable_bytes(pool)
    found: _Found | None = None
    for tp in np.intersect1d(trainers.layouts.tp_L, generators.candidates.tp_L):
        ours = np.flatnonzero(trainers.layouts.tp_L == tp)
        mine = np.flatnonzero(generators.candidates.tp_L == tp)
        filled = trainers.state_L[ours] + trainers.transient_L[ours]
        room = np.full(len(mine), np.inf) if rules.own_memory else usable - generators.kv_L[mine]
        train_s, rows = _best_below(filled, trainers.time_s_L[ours], room)
        option = _pick(train_s + generators.time_s_L[mine], ours[rows], mine)
        found = min((one for one in (found, option) if one), default=None)
    return found


def _first(parts: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(np.atleast_1d(values)[0]) for name, values in parts.items()}


def _trainer_plan(request: Request, pool: Pool, layouts: TrainerLayouts, rules: Rules) -> TrainerPlan:
    memory = _first(training_memory(request, layouts))
    if not layouts.sharded:
        memory.pop("gathered")
    return TrainerPlan(
        pool=pool,
        tp=int(layouts.tp_L[0]),
        cp=int(layouts.cp_L[0]),
        pp=int(layouts.pp_L[0]),
        dp=int(layouts.dp_L[0]),
        microbatch_tokens=int(layouts.microbatch_tokens_L[0]),
        time_parts=_first(_time_parts(request, pool, layouts, rules)),
        memory_parts=memory,
    )


def _generator_plan(
    request: Request, pool: Pool, generators: Generators, rules: Rules, staleness: int
) -> GeneratorPlan:
    times = _first(generation_parts(request, pool, generators, rules))
    step = _first(steady_parts(request, pool, generators))
    decode_s, step_s = times.pop("decode"), sum(step.values())
    resident = not rules.own_memory and not rules.own_parallelism
    memory = _first(generation_memory(request, generators, resident_weights=resident))
    more = replace(generators, slots_L=np.ceil(generators.slots_L * 1.12).astype(np.int64))
    larger = _first(generation_memory(request, more, resident_weights=resident))
    replicas, slots = int(generators.replicas_L[0]), int(generators.slots_L[0])
    return GeneratorPlan(
        pool=pool,
        tp=int(generators.tp_L[0]),
        replicas=replicas,
        slots=slots,
        weight_bytes=int(generators.weight_bytes_L[0]),
        time_parts={name: decode_s * part / step_s for name, part in step.items()} | times,
        memory_parts=memory,
        latency_s=request.lengths.longest_tokens(request.num_samples) * step_s,
        memory_full=slots < admitted(request, replicas, staleness, rules)
        and sum(larger.values()) > request.usable_bytes(pool),
    )
