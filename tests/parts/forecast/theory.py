"""The continuous problem of the paper: group sizes, batches and shares are real numbers, and closed forms exist.

For executor k with m GPUs per model-parallel group and b samples in flight per group, eta_k(b, m) is seconds per sample
of one group. Here eta_k = (a_k / b + s_k) (1 + g_k (m - 1)) / m: a fixed cost shared by the batch, a cost per sample,
and what splitting over m GPUs loses. It is strictly decreasing in b when a_k > 0. f_k = m eta_k is GPU-seconds per
sample. (LlamaRL, arXiv 2505.24034, theory section; the family of eta is this project's choice, the theorem needs only
that eta does not increase with b.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SEARCH_STEPS = 150
"""Steps of the one-dimensional search over m; each keeps two thirds of the interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Executor:
    """What one executor costs and holds."""

    resident_bytes: float
    """Held by each group whatever the batch: c_t W0 of the trainer, q W0 of a generator."""
    sample_bytes: float
    """Held per sample in flight: activations A_t, or keys and values K_g."""
    fixed_s: float
    """a_k: GPU-seconds that the b samples in flight share."""
    sample_s: float
    """s_k: GPU-seconds of each sample."""
    split_loss: float
    """g_k: relative cost of one more GPU in the group."""

    def gpu_seconds(self, batch: float, group: float) -> float:
        """f_k(b, m), GPU-seconds per sample."""
        return (self.fixed_s / batch + self.sample_s) * (1 + self.split_loss * (group - 1))

    def least(self, gpu_bytes: float, gpus: float) -> tuple[float, float, float]:
        """(f, m, b) of least GPU-seconds with resident + sample_bytes b <= m gpu_bytes and 1 <= m <= gpus.

        b fills the memory: with x = m M0 - resident, f = (a A / x + s)(u + v x), u = 1 - g + g resident / M0,
        v = g / M0, which is least at x = sqrt(a A u / (s v)); f is convex in x, so that point is clipped to the range.

        Raises:
            ValueError: the resident bytes fill all GPUs.
        """
        low = max(1.0, self.resident_bytes / gpu_bytes)
        if gpus * gpu_bytes <= self.resident_bytes or gpus < 1:
            raise ValueError(f"{self.resident_bytes:.3g} resident bytes leave no room on {gpus:g} x {gpu_bytes:.3g}")
        u = 1 - self.split_loss + self.split_loss * self.resident_bytes / gpu_bytes
        v, shared = self.split_loss / gpu_bytes, self.fixed_s * self.sample_bytes
        stationary = math.sqrt(max(0.0, shared * u) / (self.sample_s * v)) if self.sample_s * v > 0 else math.inf
        lowest = max(0.0, low * gpu_bytes - self.resident_bytes)
        room = min(max(stationary, lowest), gpus * gpu_bytes - self.resident_bytes)
        group, batch = (room + self.resident_bytes) / gpu_bytes, room / self.sample_bytes
        # An empty batch is the limit of a problem without fixed cost.
        batch = max(batch, math.ulp(1.0))
        return self.gpu_seconds(batch, group), group, batch


def asynchronous(gpu_seconds: Sequence[float], samples: float, gpus: float) -> tuple[float, tuple[float, ...]]:
    """Step time T* = (B0 / G0) sum f_k in seconds and shares theta_k = f_k / sum f, for any number of executors.

    The maximum of B0 f_k / (theta_k G0) over shares that add up to one is least where all are equal.
    """
    total = sum(gpu_seconds)
    return samples / gpus * total, tuple(cost / total for cost in gpu_seconds)


def synchronous(
    trainer: Executor, generator: Executor, *, samples: float, gpus: float, gpu_bytes: float
) -> tuple[float, float, float, float]:
    """(T, m, b_t, b_g) of least (B0 / G0)(f_t(b_t, m) + f_g(b_g, m)) with c_t W0 + A b_t + K b_g <= m M0.

    For given m the memory x = m M0 - c_t W0 is split so that A b_t : K b_g = sqrt(a_t w_t A) : sqrt(a_g w_g K), with
    w_k = 1 + g_k (m - 1) (Cauchy-Schwarz); the rest is convex in m and searched by thirds.

    Raises:
        ValueError: the trainer's state fills all GPUs.
    """
    low = max(1.0, trainer.resident_bytes / gpu_bytes * (1 + 1e-12))
    if gpus < low:
        raise ValueError(f"{trainer.resident_bytes:.3g} resident bytes leave no room on {gpus:g} x {gpu_bytes:.3g}")

    def batches(group: float) -> tuple[float, float]:
        room = group * gpu_bytes - trainer.resident_bytes
        weights = [
            math.sqrt(one.fixed_s * one.sample_bytes * (1 + one.split_loss * (group - 1)))
            for one in (trainer, generator)
        ]
        share = weights[0] / sum(weights) if sum(weights) > 0 else 0.5
        tiny = math.ulp(1.0)
        return max(tiny, room * share / trainer.sample_bytes), max(tiny, room * (1 - share) / generator.sample_bytes)

    def cost(group: float) -> float:
        trained, generated = batches(group)
        return trainer.gpu_seconds(trained, group) + generator.gpu_seconds(generated, group)

    group = _valley(cost, low, gpus)
    return samples / gpus * cost(group), group, *batches(group)


def _valley(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one valley is least on [low, high]: each step drops a third of the interval."""
    ends = low, high
    for _ in range(SEARCH_STEPS):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if function(left) <= function(right) else (left, high)
    return min((low, high, *ends), key=function)
