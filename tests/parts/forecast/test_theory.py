"""The continuous theorem, on thousands of random instances, and the closed forms against brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.nightly import nightly
from tests.parts.forecast.theory import Executor, asynchronous, synchronous

INSTANCES = 3000
GPU_BYTES, GPUS, SAMPLES = 80e9, 1024.0, 2048.0


def _instance(rng: np.random.Generator) -> tuple[Executor, Executor]:
    """A trainer of 10 GB to 20 TB, a generator whose weights take an eighth to a half of that."""
    state = 10 ** rng.uniform(10, 13.3)

    def executor(resident_bytes: float) -> Executor:
        return Executor(
            resident_bytes=resident_bytes,
            sample_bytes=10 ** rng.uniform(7, 10),
            fixed_s=10 ** rng.uniform(-2, 3),
            sample_s=10 ** rng.uniform(-2, 2),
            split_loss=10 ** rng.uniform(-4, -0.5),
        )

    return executor(state), executor(state * rng.uniform(0.125, 0.5))


def _times(trainer: Executor, generator: Executor) -> tuple[float, float]:
    sync_s = synchronous(trainer, generator, samples=SAMPLES, gpus=GPUS, gpu_bytes=GPU_BYTES)[0]
    costs = [one.least(GPU_BYTES, GPUS)[0] for one in (trainer, generator)]
    return sync_s, asynchronous(costs, SAMPLES, GPUS)[0]


@nightly("many draws; by day the theorem holds for the models of the paper")
def test_asynchronous_is_strictly_faster_when_eta_strictly_decreases() -> None:
    rng = np.random.default_rng(0)
    ratios = [np.divide(*_times(*_instance(rng))) for _ in range(INSTANCES)]
    assert min(ratios) > 1
    assert max(ratios) > 2  # the instances are no formality


def test_equal_when_batches_and_splits_cost_nothing() -> None:
    """Without a fixed cost eta does not fall with b, and overlap alone gains nothing."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        flat = [replace(one, fixed_s=0.0, split_loss=0.0) for one in _instance(rng)]
        sync_s, async_s = _times(*flat)
        assert async_s == pytest.approx(sync_s, rel=1e-12)


def test_least_equals_brute_force() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        for one in _instance(rng):
            cost, group, batch = one.least(GPU_BYTES, GPUS)
            assert one.resident_bytes + one.sample_bytes * batch <= group * GPU_BYTES * (1 + 1e-9)
            low = max(1.0, one.resident_bytes / GPU_BYTES)
            groups = low + (GPUS - low) * np.linspace(1e-4, 1, 2000) ** 3
            batches = (groups * GPU_BYTES - one.resident_bytes) / one.sample_bytes
            brute = ((one.fixed_s / batches + one.sample_s) * (1 + one.split_loss * (groups - 1))).min()
            assert cost <= brute * (1 + 1e-9)
            assert cost >= brute * (1 - 1e-2)  # the grid is not exact


def test_synchronous_equals_brute_force() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        trainer, generator = _instance(rng)
        time_s, group, trained, generated = synchronous(
            trainer, generator, samples=SAMPLES, gpus=GPUS, gpu_bytes=GPU_BYTES
        )
        held = trainer.resident_bytes + trainer.sample_bytes * trained + generator.sample_bytes * generated
        assert held <= group * GPU_BYTES * (1 + 1e-9)
        low = max(1.0, trainer.resident_bytes / GPU_BYTES)
        groups = (low + (GPUS - low) * np.linspace(1e-3, 1, 400) ** 3)[:, None]
        shares = np.linspace(0.002, 0.998, 250)[None, :]
        room = groups * GPU_BYTES - trainer.resident_bytes
        cost = (trainer.fixed_s * trainer.sample_bytes / (room * shares) + trainer.sample_s) * (
            1 + trainer.split_loss * (groups - 1)
        ) + (generator.fixed_s * generator.sample_bytes / (room * (1 - shares)) + generator.sample_s) * (
            1 + generator.split_loss * (groups - 1)
        )
        brute_s = SAMPLES / GPUS * float(cost.min())
        assert brute_s * 0.97 <= time_s <= brute_s * (1 + 1e-9)


@pytest.mark.parametrize("num_executors", [2, 3, 5])
def test_shares_of_n_executors_balance_and_no_others_are_better(num_executors: int) -> None:
    rng = np.random.default_rng(num_executors)
    for _ in range(200):
        costs = rng.uniform(0.1, 10, num_executors)
        time_s, shares = asynchronous(costs.tolist(), SAMPLES, GPUS)
        assert sum(shares) == pytest.approx(1)
        assert [SAMPLES * cost / (share * GPUS) for cost, share in zip(costs, shares, strict=True)] == pytest.approx(
            [time_s] * num_executors
        )
        others = rng.dirichlet(np.ones(num_executors), 500)
        assert (SAMPLES / GPUS * (costs / others).max(axis=1)).min() >= time_s


def test_what_does_not_fit_is_refused() -> None:
    one = Executor(resident_bytes=1e15, sample_bytes=1e9, fixed_s=1.0, sample_s=1.0, split_loss=0.01)
    with pytest.raises(ValueError, match="leave no room"):
        one.least(GPU_BYTES, GPUS)
    with pytest.raises(ValueError, match="leave no room"):
        synchronous(one, one, samples=SAMPLES, gpus=GPUS, gpu_bytes=GPU_BYTES)
