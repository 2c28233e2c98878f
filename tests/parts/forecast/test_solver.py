"""The integer solver against exhaustive search, its limits, and cases where synchronous wins."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.parts.forecast.candidates import generator_candidates, trainer_candidates
from llamarl.parts.forecast.feasibility import plans
from llamarl.parts.forecast.generation import generation_memory, generation_parts, steady_parts, sum_parts
from llamarl.parts.forecast.hardware import BF16, FP32, GPUS, Pool
from llamarl.parts.forecast.plan import Plan
from llamarl.parts.forecast.report import choose, render_plans, verdict
from llamarl.parts.forecast.request import ASYNCHRONOUS, BASELINE, SYNCHRONOUS, PlanRequest, Rules
from llamarl.parts.forecast.solver import asynchronous_plan, solve, synchronous_plan
from llamarl.parts.forecast.training import training_memory, training_parts
from tests.nightly import nightly
from tests.parts.forecast.conftest import SMALL, make_request


def _exhaustive(request: PlanRequest, rules: Rules, staleness: int) -> float:
    """Least step time over all pairs of candidates, one pair at a time, from the statement of the problem."""
    pool = request.pools[0]
    usable, memory = request.usable_bytes(pool), pool.gpu.memory_bandwidth * request.constants.bandwidth_efficiency
    layouts, candidates = (
        trainer_candidates(request, pool, rules),
        generator_candidates(request, pool, rules, staleness),
    )
    train_s = sum_parts(training_parts(request, pool, layouts))
    if rules.overlap:
        train_s = train_s + request.model.num_parameters * (FP32 + BF16) / layouts.gpus_L / memory
    train = training_memory(request, layouts)
    transient = train["activations"] + train["gathered"] * layouts.sharded
    resident = not rules.own_memory and not rules.own_parallelism
    generate_s = sum_parts(generation_parts(request, pool, candidates, rules))
    generate = generation_memory(request, candidates, resident_weights=resident)
    latency_s = request.lengths.longest_tokens(request.num_samples) * sum_parts(steady_parts(request, pool, candidates))
    least = np.inf
    for i, j in product(range(len(train_s)), range(len(generate_s))):
        state, weights, kv = train["state"][i], generate["weights"][j], generate["kv"][j]
        if rules.overlap:
            fits = state + transient[i] <= usable and weights + kv <= usable
            fits = fits and layouts.gpus_L[i] + candidates.gpus_L[j] <= pool.count
            bound = (latency_s[j] + train_s[i]) / (staleness + 1)
            step_s = max(train_s[i], generate_s[j], bound)
        else:
            if rules.own_parallelism:
                fits = state + weights + max(transient[i], kv) <= usable
            else:
                fits = layouts.tp_L[i] == candidates.tp_L[j] and state + transient[i] + kv <= usable
            step_s = train_s[i] + generate_s[j]
        if fits:
            least = min(least, float(step_s))
    return least


@pytest.mark.parametrize(
    ("rules", "staleness"), [(BASELINE, 0), (SYNCHRONOUS, 0), (ASYNCHRONOUS, 1), (ASYNCHRONOUS, 3)]
)
@pytest.mark.parametrize(("gpus", "prompts", "layers"), [(2, 2, 16), (2, 2, 146), (3, 3, 60), (5, 4, 100)])
def test_solver_equals_exhaustive_search(rules: Rules, staleness: int, gpus: int, prompts: int, layers: int) -> None:
    model = replace(SMALL, num_layers=layers)
    request = make_request(model, gpus, prompts_per_step=prompts, group_size=2, mean_tokens=200.0)
    plan = solve(request, (request.pools[0],) * 2, rules, staleness)
    least = _exhaustive(request, rules, staleness)
    assert (plan.step_s if plan else np.inf) == pytest.approx(least, rel=1e-12)
    assert plan or layers == 146 or rules is not ASYNCHRONOUS, "an instance that does not fit tests little"


REQUESTS = st.fixed_dictionaries(
    {
        "prompts_per_step": st.integers(1, 64),
        "group_size": st.integers(2, 8),
        "mean_tokens": st.floats(20, 1000),
        "sigma": st.floats(0, 1.5),
        "prompt_tokens": st.integers(1, 2000),
    }
)


def _all_plans(request: PlanRequest) -> list[Plan]:
    pair = (request.pools[0],) * 2
    found = [solve(request, pair, BASELINE, 0), solve(request, pair, SYNCHRONOUS, 0)]
    found += [solve(request, pair, ASYNCHRONOUS, staleness) for staleness in (1, 2)]
    return [plan for plan in found if plan]


@nightly("more of hypothesis; by day the solver equals an exhaustive search")
@settings(max_examples=25, deadline=None, derandomize=True)
@given(changes=REQUESTS, gpus=st.integers(1, 48), layers=st.integers(8, 160))
def test_a_plan_stays_within_memory_and_cluster(changes: dict[str, float], gpus: int, layers: int) -> None:
    request = make_request(replace(SMALL, num_layers=layers), gpus, **changes)
    for plan in _all_plans(request):
        assert plan.peak_bytes <= request.usable_bytes(request.pools[0])
        assert plan.gpus <= gpus
        executors = plan.trainer.busy_s + plan.generator.busy_s
        longest = max(plan.trainer.busy_s, plan.generator.busy_s)
        assert plan.step_s >= longest * (1 - 1e-9)
        assert plan.rules.overlap or plan.step_s == pytest.approx(executors)


@nightly("more of hypothesis; by day the solver equals an exhaustive search")
@settings(max_examples=20, deadline=None, derandomize=True)
@given(changes=REQUESTS, gpus=st.integers(2, 40), more=st.integers(1, 24))
def test_more_gpus_are_never_slower(changes: dict[str, float], gpus: int, more: int) -> None:
    for rules, staleness in ((SYNCHRONOUS, 0), (ASYNCHRONOUS, 2), (BASELINE, 0)):
        request = make_request(replace(SMALL, num_layers=64), gpus, **changes)
        few = solve(request, (request.pools[0],) * 2, rules, staleness)
        larger = replace(request, pools=(replace(request.pools[0], count=gpus + more),))
        many = solve(larger, (larger.pools[0],) * 2, rules, staleness)
        assert few is None or (many is not None and many.step_s <= few.step_s * (1 + 1e-12))


def test_a_second_pool_of_another_kind_is_used_when_it_helps() -> None:
    request = make_request("llama3-8b", 8)
    one = asynchronous_plan(request)
    two = asynchronous_plan(replace(request, pools=(request.pools[0], Pool(gpu=GPUS["l40s-48g"], count=64))))
    assert one
    assert two
    assert two.step_s < one.step_s
    assert {two.trainer.pool.gpu.name, two.generator.pool.gpu.name} == {"h100-80g", "l40s-48g"}


def test_synchronous_wins_on_a_cluster_too_small_to_share() -> None:
    """On one GPU nothing can be apart; on three a third of the trainer's GPUs is a coarse split."""
    alone = make_request(SMALL, 1)
    synchronous, asynchronous = plans(alone)
    assert synchronous
    assert asynchronous is None
    assert choose(synchronous, asynchronous) is synchronous
    assert "do not fit on separate GPUs" in render_plans(alone, synchronous, asynchronous)


def test_synchronous_wins_when_the_integers_are_coarse() -> None:
    """Responses of one length leave no tail to hide, and two GPUs split one to one whatever the work."""
    request = make_request(SMALL, 2, sigma=0.0, mean_tokens=16.0, limit_tokens=16, prompt_tokens=3000, max_staleness=1)
    synchronous, asynchronous = plans(request)
    assert synchronous
    assert asynchronous
    assert synchronous.step_s < asynchronous.step_s
    assert choose(synchronous, asynchronous) is synchronous
    assert verdict(synchronous, asynchronous).startswith("Use the synchronous plan: it is")


def test_asynchronous_wins_on_a_large_model() -> None:
    request = make_request("llama3-70b", 256)
    synchronous, asynchronous = synchronous_plan(request), asynchronous_plan(request)
    assert synchronous
    assert asynchronous
    assert asynchronous.step_s < synchronous.step_s / 1.5
    assert choose(synchronous, asynchronous) is asynchronous


def test_more_staleness_is_never_slower() -> None:
    request = make_request("llama3-8b", 32)
    steps = [solve(request, (request.pools[0],) * 2, ASYNCHRONOUS, bound) for bound in (1, 2, 4, 8)]
    times = [plan.step_s for plan in steps if plan]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]
