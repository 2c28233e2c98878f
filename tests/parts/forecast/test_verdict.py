"""Which plan is advised, and why: its error, its cost, its hosts, its staleness; and what adapters save."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from llamarl.config import ConfigError
from llamarl.config.roles import LoraConfig
from llamarl.parts.forecast.candidates import trainer_candidates
from llamarl.parts.forecast.feasibility import plans
from llamarl.parts.forecast.hardware import GPUS, Pool
from llamarl.parts.forecast.plan import Plan
from llamarl.parts.forecast.report import ERROR, choose, verdict
from llamarl.parts.forecast.request import ASYNCHRONOUS
from llamarl.parts.forecast.shapes import MODELS
from llamarl.parts.forecast.solver import asynchronous_plan, solve
from llamarl.parts.forecast.sync import priced
from llamarl.parts.forecast.training import step_flops, training_memory
from tests.architecture.repository import ROOT
from tests.parts.forecast.conftest import SMALL, make_request


def two_plans(step_s: float, gpus: int = 8, kind: str = "h100-80g") -> tuple[Plan, Plan]:
    """A synchronous plan of 8 H100s, and an asynchronous one that takes `step_s` times its seconds on other GPUs."""
    synchronous, asynchronous = plans(make_request(SMALL, 8))
    assert synchronous and asynchronous and synchronous.gpus == 8
    busy = {"compute": synchronous.step_s * step_s}
    pool, trainer, generator = Pool(gpu=GPUS[kind], count=gpus), asynchronous.trainer, asynchronous.generator
    trainer = replace(trainer, pool=pool, tp=1, cp=1, pp=1, dp=gpus // 2, time_parts=busy)
    generator = replace(generator, pool=pool, tp=1, replicas=gpus - gpus // 2, time_parts=busy, latency_s=0.0)
    return synchronous, replace(asynchronous, trainer=trainer, generator=generator)


@pytest.mark.parametrize(
    ("step_s", "gpus", "kind", "is_asynchronous", "words"),
    [
        (0.95, 8, "h100-80g", False, ("a tie within the 25%", "equally fast", "equal cost", "on 8 GPUs.")),
        (0.81, 8, "h100-80g", False, ("a tie",)),
        (0.79, 8, "h100-80g", True, ("1.27 times as fast",)),
        (0.5, 8, "h100-80g", True, ("2.00 times as fast", "0.50 times the cost")),
        (
            0.5,
            24,
            "h100-80g",
            False,
            ("is faster, at staleness", "and dearer", "1.50 times the cost", "24 GPUs against 8"),
        ),
        (0.5, 16, "h100-80g", True, ("2.00 times as fast", "equal cost", "on 16 GPUs against 8")),
        (2.0, 4, "l40s-48g", False, ("is cheaper, at staleness", "and slower", "0.33 times the cost")),
        (1.0, 8, "l40s-48g", True, ("equally fast", "0.33 times the cost")),
        (1.5, 8, "h100-80g", False, ("it is 1.50 times as fast",)),
    ],
)
def test_what_is_better_is_better_beyond_the_error_and_at_its_cost(
    step_s: float, gpus: int, kind: str, is_asynchronous: bool, words: tuple[str, ...]
) -> None:
    synchronous, asynchronous = two_plans(step_s, gpus, kind)
    assert (choose(synchronous, asynchronous) is asynchronous) == is_asynchronous
    said = verdict(synchronous, asynchronous)
    assert said.startswith(f"Use the {'a' * is_asynchronous}synchronous plan")
    assert not [word for word in words if word not in said], said


def test_a_price_of_nothing_leaves_hours() -> None:
    synchronous, asynchronous = two_plans(0.5)
    free = replace(GPUS["h100-80g"], price=0.0)
    generator = replace(asynchronous.generator, pool=Pool(gpu=free, count=8))
    trainer = replace(asynchronous.trainer, pool=generator.pool)
    assert "GPU-hours), on 8 GPUs" in verdict(synchronous, replace(asynchronous, trainer=trainer, generator=generator))


def test_no_staleness_means_none() -> None:
    synchronous, asynchronous = plans(make_request(SMALL, 8, max_staleness=0))
    assert synchronous and asynchronous is None
    assert verdict(synchronous, None) == "Use the synchronous plan: rollout.max_staleness = 0."


def test_the_error_is_the_recorded_one() -> None:
    path = ROOT / "benchmarks/results/prediction-seed0-2026-11-22.json"
    found = json.loads(path.read_text())["own_machine"]["median_errors"]
    assert found["planner"]["step_s"] == pytest.approx(ERROR, abs=5e-4)


def test_hosts_are_counted_and_what_no_run_can_be_is_not_advised() -> None:
    synchronous, asynchronous = plans(make_request(SMALL, 24, prompts_per_step=240))
    assert synchronous and asynchronous
    assert (synchronous.gpus, synchronous.num_hosts, synchronous.is_runnable) == (24, 3, False)
    assert asynchronous.num_hosts == -(-asynchronous.gpus // 8) and asynchronous.is_runnable
    assert choose(synchronous, asynchronous) is asynchronous
    assert "shares 24 GPUs of 3 hosts" in verdict(synchronous, asynchronous)
    assert verdict(synchronous, None).startswith("No run can be so")


@pytest.mark.parametrize("prompts", [8, 16, 64])
def test_staleness_is_the_smallest_that_is_nearly_the_fastest(prompts: int) -> None:
    request = make_request(SMALL, 8, prompts_per_step=prompts, max_staleness=6)
    pool = request.pools[0]
    steps_s = [plan.step_s for bound in range(1, 7) if (plan := solve(request, (pool, pool), ASYNCHRONOUS, bound))]
    found = asynchronous_plan(request)
    assert found and found.staleness == 1 + next(n for n, one in enumerate(steps_s) if one <= 1.1 * min(steps_s))


def test_adapters_save_state_and_products() -> None:
    """Frozen weights lie in 16 bits where they have adapters; of their products, gradients of weights are left out."""
    request = make_request("qwen3-8b", 8, lora=LoraConfig(rank=16))
    whole, model = replace(request, lora=None), request.model
    layouts = trainer_candidates(request, request.pools[0], ASYNCHRONOUS)
    alone = layouts.take(np.flatnonzero(layouts.gpus_L == 1)[:1])
    inner, hidden, inter = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288), 4096, 12288
    adapters = 16 * 36 * (2 * (hidden + 4096) + 2 * (hidden + 1024) + 3 * (hidden + inter))
    state = float(training_memory(request, alone)["state"][0])
    norms = 36 * 2 * (hidden + 128) + hidden
    assert state == pytest.approx(2 * inner + 4 * (2 * 151_936 * 4096 + norms) + 16 * adapters, rel=1e-6)
    assert float(training_memory(whole, alone)["state"][0]) == pytest.approx(16 * model.num_parameters, rel=1e-6)
    targets = 64 * 8 * request.lengths.mean_tokens
    tokens = 64 * 128 + targets
    saved = 2 * (inner * tokens + 151_936 * 4096 * targets) - 8 * adapters * tokens
    assert step_flops(whole) - step_flops(request) == pytest.approx(saved, rel=1e-6)
    with_them, without = (asynchronous_plan(one) for one in (request, whole))
    assert (
        with_them and without and with_them.trainer.time_parts["publish"] < 0.02 * without.trainer.time_parts["publish"]
    )
    assert "adapters alone" in priced(with_them).sync
    with pytest.raises(ConfigError, match="experts get no adapters; use trainer"):
        plans(replace(request, model=MODELS["mixtral-8x7b"]))
