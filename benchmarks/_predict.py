"""The planner's roofline at given settings, without a search: what a profiled machine does with another workload.

One trainer and one generator per replica have a device each. Cores that they share, and what they send through the
controller, are no part of it; a simulation with the same profile has both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llamarl.parts.forecast.generation import Generators, generation_parts, steady_parts, sum_parts
from llamarl.parts.forecast.hardware import BF16, Pool
from llamarl.parts.forecast.request import ASYNCHRONOUS, SYNCHRONOUS, PlanRequest
from llamarl.parts.forecast.training import TrainerLayouts, training_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One step in the long run."""

    step_s: float
    train_s: float
    """Seconds in which the trainer works."""
    generate_s: float
    """Seconds in which the generators work."""

    @property
    def trainer_idle_share(self) -> float:
        return 1 - self.train_s / self.step_s

    @property
    def generator_idle_share(self) -> float:
        return 1 - self.generate_s / self.step_s


def predict_step(
    request: PlanRequest, pool: Pool, *, staleness: int, replicas: int, max_running: int, microbatch_tokens: int
) -> Prediction:
    """A step with `replicas` generators of one device and a trainer of one, all of the kind of `pool`.

    Staleness 0: the phases take turns, and generation ends with its longest response. Otherwise the slowest of trainer,
    generators, and (longest response + trainer) / (S + 1), as in `solver`. How many responses run at once follows from
    who waits for whom; it is the largest number, up to `max_running`, that makes the step shortest.
    """
    rules = ASYNCHRONOUS if staleness else SYNCHRONOUS
    active = min(max_running, math.ceil((staleness + 1) * request.num_samples / replicas))
    slots = np.arange(1, active + 1) if staleness else np.array([active])
    ones = np.ones_like(slots)
    generators = Generators(tp_L=ones, replicas_L=ones * replicas, slots_L=slots, weight_bytes_L=ones * BF16)
    one = np.array([1])
    trainer = TrainerLayouts(
        tp_L=one,
        cp_L=one,
        pp_L=one,
        ep_L=one,
        dp_L=one,
        microbatch_tokens_L=np.array([microbatch_tokens]),
        sharded=True,
    )
    generate_s = sum_parts(generation_parts(request, pool, generators, rules))
    train_s = float(sum_parts(training_parts(request, pool, trainer))[0])
    if not staleness:
        return Prediction(step_s=float(generate_s[0]) + train_s, train_s=train_s, generate_s=float(generate_s[0]))
    longest_s = request.lengths.longest_tokens(request.num_samples) * sum_parts(steady_parts(request, pool, generators))
    step_s = np.maximum(np.maximum(generate_s, train_s), (longest_s + train_s) / (staleness + 1))
    best = len(step_s) - 1 - int(step_s[::-1].argmin())
    return Prediction(step_s=float(step_s[best]), train_s=train_s, generate_s=float(generate_s[best]))
