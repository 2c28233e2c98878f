"""Every integer layout that the solver considers. Columns: L layouts of one executor; every array is int64 [L]."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

from llamarl.config import ConfigError
from llamarl.config.roles import ParallelismConfig
from llamarl.models.sizes import uneven_parts
from llamarl.parts.forecast.hardware import Pool
from llamarl.parts.forecast.request import PlanRequest, Rules, precisions
from llamarl.run.checks import check_mixture_layout, uneven_experts

MICROBATCHES = (1, 2, 4, 8, 16, 32)
"""Tokens of a microbatch, in longest samples."""
CONTEXT_PARALLEL = (1, 2, 4, 8)
PIPELINE_PARALLEL = (1, 2, 4, 8, 16)
MAX_GENERATOR_TP = 64
EVERY_SLOT = 64
"""Concurrency up to which every integer is tried. Above it, steps of 12 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Layouts as columns, one entry each."""

    def columns(self) -> dict[str, np.ndarray]:
        """Columns by name; each name ends in `_L`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_L")}

    def take(self, rows: np.ndarray) -> Self:
        """The layouts at `rows`."""
        return replace(self, **{name: column[rows] for name, column in self.columns().items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLayouts(Candidates):
    """Tensor (tp) x context (cp) x pipeline (pp) x data (dp) parallel."""

    tp_L: np.ndarray
    cp_L: np.ndarray
    pp_L: np.ndarray
    ep_L: np.ndarray
    """Data-parallel ranks that share the experts of a mixture by number."""
    dp_L: np.ndarray
    microbatch_tokens_L: np.ndarray
    """Tokens of one microbatch per data-parallel rank."""
    sharded: bool
    """Whether trainer state is sharded over dp x cp (FSDP). Otherwise each tp x pp group holds all of it."""

    @property
    def gpus_L(self) -> np.ndarray:
        """GPUs in use."""
        return self.tp_L * self.cp_L * self.pp_L * self.dp_L

    @property
    def shards_L(self) -> np.ndarray:
        """Ranks that share one copy of a tensor-parallel shard."""
        return self.dp_L * self.cp_L if self.sharded else np.ones_like(self.dp_L)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generators(Candidates):
    """Replicas of `tp` GPUs. Each replica decodes `slots` responses concurrently."""

    tp_L: np.ndarray
    replicas_L: np.ndarray
    slots_L: np.ndarray
    weight_bytes_L: np.ndarray
    """Bytes per weight: 2 is bfloat16, 1 is fp8."""

    @property
    def gpus_L(self) -> np.ndarray:
        """GPUs in use."""
        return self.tp_L * self.replicas_L


def sum_parts(parts: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the sum over causes, [L]."""
    return np.sum(np.broadcast_arrays(*parts.values()), axis=0)


def powers_of_two(limit: int) -> list[int]:
    """Returns 1, 2, 4, ... up to `limit`."""
    return [1 << power for power in range(max(limit, 0).bit_length())]


def trainer_candidates(request: PlanRequest, pool: Pool, rules: Rules) -> TrainerLayouts:
    """Returns trainer layouts on at most `pool.count` GPUs that a run accepts. A data-parallel rank has whole groups,
    at least one."""
    rows: list[np.ndarray] = []
    for tp, cp, pp, ep in _model_parallel(request, pool, rules):
        group = tp * cp * pp
        dp = np.arange(ep, min(pool.count // group, request.prompts_per_step) + 1, ep)
        dp = dp[[ep == 1 or _shares_experts(request, int(ranks), ep) for ranks in dp]]
        for factor in MICROBATCHES:
            microbatch = factor * request.longest_tokens
            row = (tp, cp, pp, ep, 0, microbatch)
            block = np.repeat(np.array([row], dtype=np.int64), len(dp), axis=0)
            block[:, 4] = dp
            # More than a rank's whole share is the same as its whole share.
            fits = request.rank_samples(dp) * request.longest_tokens > microbatch // 2
            rows.append(block[fits | (factor == 1)])
    table = np.concatenate(rows) if rows else np.zeros((0, 6), dtype=np.int64)
    return TrainerLayouts(
        tp_L=table[:, 0],
        cp_L=table[:, 1],
        pp_L=table[:, 2],
        ep_L=table[:, 3],
        dp_L=table[:, 4],
        microbatch_tokens_L=table[:, 5],
        sharded=rules.own_parallelism,
    )


def _model_parallel(request: PlanRequest, pool: Pool, rules: Rules) -> list[tuple[int, int, int, int]]:
    """Returns (tp, cp, pp, ep) that fit the pool. Tensor parallelism crosses nodes only if one size must serve both
    phases."""
    heads, moe = request.model.num_heads, request.model.moe
    if not rules.own_parallelism:
        return [(tp, 1, 1, 1) for tp in powers_of_two(min(pool.count, heads))]
    if moe is not None:  # the other axes are for a run to set
        return [(1, 1, 1, ep) for ep in powers_of_two(min(pool.count, moe.num_experts))]
    return [
        (tp, cp, pp, 1)
        for tp in powers_of_two(min(pool.gpu.node_gpus, heads))
        if not uneven_parts(request.model, tp, repeats_kv_heads=False)
        for cp in (CONTEXT_PARALLEL if request.model.delta is None else (1,))
        for pp in PIPELINE_PARALLEL
        if tp * cp * pp <= pool.count and pp <= request.model.num_layers
    ]


def _shares_experts(request: PlanRequest, ranks: int, ep: int) -> bool:
    """Returns whether a run's trainer can share a mixture's experts over `ep` ranks."""
    try:
        check_mixture_layout(request.model, ParallelismConfig(fsdp=ranks, ep=ep), request.model.path, "trainer")
    except ConfigError:
        return False
    return True


def slot_candidates(limit: int) -> np.ndarray:
    """Returns concurrencies from 1 to `limit`, including `limit`."""
    slots = list(range(1, min(limit, EVERY_SLOT) + 1))
    while slots[-1] < limit:
        slots.append(min(limit, math.ceil(slots[-1] * 1.12)))
    return np.array(slots, dtype=np.int64)


def admitted(request: PlanRequest, replicas: int, staleness: int, rules: Rules) -> int:
    """Returns the maximum number of responses that a replica can have in flight.

    With partial rollouts at most (S + 1) B0 are active, spread evenly; otherwise one replica's share of B0.
    """
    if rules.partial_rollouts:
        return max(1, (staleness + 1) * request.num_samples // replicas)
    return math.ceil(request.num_samples / replicas)


def generator_candidates(request: PlanRequest, pool: Pool, rules: Rules, staleness: int) -> Generators:
    """Returns replicas and concurrencies of generators on at most `pool.count` GPUs."""
    heads = request.model.num_heads
    largest = min(pool.count, heads, MAX_GENERATOR_TP if rules.own_parallelism else pool.count)
    blocks: list[np.ndarray] = []
    grid = slot_candidates(admitted(request, 1, staleness, rules))
    for tp in powers_of_two(largest):
        uneven = uneven_parts(request.model, tp, repeats_kv_heads=True) + uneven_experts(request.model.moe, tp)
        if rules.own_parallelism and uneven:
            continue
        for replicas in range(1, min(pool.count // tp, request.num_samples) + 1):
            limit = admitted(request, replicas, staleness, rules)
            slots = grid[: int(np.searchsorted(grid, limit))]
            block = np.empty((len(slots) + 1, 3), dtype=np.int64)
            block[:, 0], block[:, 1] = tp, replicas
            block[:-1, 2], block[-1, 2] = slots, limit
            blocks.append(block)
    table = np.concatenate(blocks)
    sizes = precisions(pool, rules)
    return Generators(
        tp_L=np.tile(table[:, 0], len(sizes)),
        replicas_L=np.tile(table[:, 1], len(sizes)),
        slots_L=np.tile(table[:, 2], len(sizes)),
        weight_bytes_L=np.repeat(np.array(sizes, dtype=np.int64), len(table)),
    )
