"""The real controller in virtual time: closed forms, conservation, bounds under faults, determinism."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamarl.config.cluster import ClusterConfig
from llamarl.observability.metrics import StepMetrics
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.report import render_simulation, summary
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.result import Simulation
from tests.nightly import examples, nightly
from tests.parts.forecast.simulator.conftest import Simulate, run_config

EXACT = Costs(
    decode_base_s=0.01,
    decode_per_rollout_s=0.001,
    prefill_token_s=0.0,
    train_base_s=2.0,
    train_token_gpu_s=0.001,
    publish_s=0.5,
    adopt_s=0.25,
    score_s=0.0,
    generator_start_s=30.0,
    prompt_tokens=100,
    response_lengths=(400,),
)
TOKENS = 4 * (100 + 2 * 399)
"""Computed tokens of a step of `run_config`: 4 prompts, 8 responses, whose last tokens predict nothing."""
TRAIN_S = 2.0 + 0.001 * TOKENS
LARGE = {"max_staleness": 8, "window": 36}


def test_synchronous_step_is_slowest_generation_plus_train_plus_sync(simulated: Simulate) -> None:
    """S = 0, two equal shares, one generator three times slower: every phase waits for the one before."""
    found = simulated(run_config(max_staleness=0), costs=EXACT, faults=Faults(slow_share=0.5, slow_factor=3.0))
    slowest_s = 3 * 400 * (0.01 + 0.001 * 4)
    assert [step.step_s for step in found.steps[1:]] == pytest.approx([slowest_s + TRAIN_S + 0.5 + 3 * 0.25] * 5)
    assert found.staleness == {0: 48}
    assert found.counts["resumed_rollouts"] == 0, "nothing runs while weights change"
    assert found.accounts.overlap_share == pytest.approx(0, abs=1e-9)


def test_synchronous_order_is_admission_order(simulated: Simulate) -> None:
    costs = Costs(response_sigma=1.0)
    found = simulated(run_config(max_staleness=0, window=4), costs=costs, replicas=3)
    assert list(found.group_ids) == list(range(24)), "each step takes exactly the groups that were admitted for it"


def test_trainer_bound_step_is_train_plus_publish(simulated: Simulate) -> None:
    found = simulated(run_config(steps=30, **LARGE), costs=EXACT, replicas=8)
    assert found.step_s[5:] == pytest.approx([TRAIN_S + 0.5] * len(found.step_s[5:]))
    assert found.verdict.bound == "trainer-bound"


def test_generator_bound_step_is_generation(simulated: Simulate) -> None:
    """One generator with all 72 rollouts of nine steps in flight; adoption is the only interruption."""
    config = run_config(steps=60, **LARGE)
    costs = Costs(**{field: getattr(EXACT, field) for field in EXACT.__slots__} | {"train_token_gpu_s": 0.0})
    found = simulated(config, costs=costs, replicas=1)
    token_s = (0.01 + 0.001 * 72) / 72
    assert mean_step_s(found) == pytest.approx(8 * 400 * token_s + 0.25, rel=0.03)
    assert found.verdict.bound == "generator-bound"


def test_a_step_says_who_waits_and_over_which_steps(simulated: Simulate) -> None:
    """The same function and window as the busy shares beside it; what the screen and the page show is this text."""
    found = simulated(run_config(steps=30, **LARGE), costs=EXACT, replicas=8)
    last = found.steps[-1]
    said = re.fullmatch(r"trainer-bound over steps 20 to 30, .+; the trainer is busy (\d+)%", last.verdict or "")
    assert said
    assert int(said[1]) == round(100 * last.busy_share["trainer"])
    assert found.steps[2].verdict and " over steps 1 to 3, " in found.steps[2].verdict
    assert str(found.verdict).startswith("trainer-bound over steps 1 to 30, ")


def mean_step_s(found: Simulation) -> float:
    """Of the steps in the middle."""
    return float(np.mean(found.step_s[20:-10]))


@nightly("long simulations; by day shorter ones say who waits")
def test_a_slow_generator_costs_nothing_while_the_others_have_time(simulated: Simulate) -> None:
    """Trainer-bound, room to run ahead: one of eight may be ten times slower."""
    config = run_config(steps=80, **LARGE)
    clean, slow = (
        mean_step_s(simulated(config, costs=EXACT, replicas=8, faults=faults))
        for faults in (Faults(), Faults(slow_share=0.125, slow_factor=10.0))
    )
    assert slow == pytest.approx(clean, rel=0.01), "the slow one also adopts weights more slowly"


@nightly("long simulations; by day shorter ones say who waits")
@pytest.mark.parametrize(("adopt_s", "segment_tokens"), [(0.6, 0), (0.01, 0), (0.01, 50)])
def test_a_generator_that_is_ten_times_slower_costs_its_share(
    simulated: Simulate, adopt_s: float, segment_tokens: int
) -> None:
    """Generator-bound, one of eight: whether it is the weights that come late, or each token. Nothing gets too old."""
    costs = Costs(train_token_gpu_s=1e-7, response_sigma=0.0, adopt_s=adopt_s)
    config = run_config(steps=60, segment_tokens=segment_tokens, **LARGE)
    clean, slow = (
        simulated(config, costs=costs, replicas=8, faults=faults)
        for faults in (Faults(), Faults(slow_share=0.125, slow_factor=10.0))
    )
    assert mean_step_s(slow) < 1.05 * 8 / 7 * mean_step_s(clean)
    assert 0 < max(step.staleness_max for step in slow.steps) <= slow.steps[0].staleness_limit


@nightly("long simulations; by day shorter ones say who waits")
def test_asynchrony_hides_stragglers(simulated: Simulate) -> None:
    """The longest of eight lognormal responses decides each synchronous step, but only few asynchronous ones."""
    costs = Costs(response_sigma=1.0, train_token_gpu_s=1e-4, score_s=0.0)
    synchronous, asynchronous = (
        mean_step_s(simulated(run_config(steps=80, max_new_tokens=60_000, **rollout), costs=costs))
        for rollout in ({"max_staleness": 0}, LARGE)
    )
    assert asynchronous < 0.35 * synchronous


def comparable(found: Simulation) -> dict[str, object]:
    return {name: value for name, value in summary(found).items() if not name.startswith(("wall", "cpu", "controller"))}


def measured(step: StepMetrics) -> StepMetrics:
    """What happened in virtual time."""
    real = ("controller_cpu_s", "record_share", "rss_bytes.", "descriptors.", "threads.")
    return replace(step, extra={name: value for name, value in step.extra.items() if not name.startswith(real)})


@nightly("long simulations; by day shorter ones say who waits")
def test_the_seed_decides_everything(simulated: Simulate) -> None:
    faults = Faults(deaths_per_hour=200.0, reward_timeout_share=0.05, slow_share=0.3, slow_factor=2.0)

    def run(seed: int) -> Simulation:
        config = run_config(steps=30, seed=seed, max_staleness=2, window=6, cluster={"max_restarts": 1000})
        return simulated(config, replicas=3, faults=faults)

    first, again, other = run(1), run(1), run(2)
    assert comparable(first) == comparable(again)
    assert [measured(step) for step in first.steps] == [measured(step) for step in again.steps]
    assert first.spans == again.spans
    assert comparable(first) != comparable(other)


@nightly("long simulations; by day shorter ones survive deaths and say who waits")
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    max_staleness=st.integers(0, 3),
    window_share=st.floats(0, 1),
    deaths_per_hour=st.sampled_from([0.0, 100.0, 1000.0]),
    slow_share=st.sampled_from([0.0, 0.5]),
    timeout_share=st.sampled_from([0.0, 0.05]),
    joins=st.sampled_from([(), ((20.0, 2),)]),
)
def test_every_group_once_and_none_too_old(
    simulated: Simulate,
    seed: int,
    max_staleness: int,
    window_share: float,
    deaths_per_hour: float,
    slow_share: float,
    timeout_share: float,
    joins: tuple[tuple[float, int], ...],
) -> None:
    """Conservation and the proved bound, whatever goes wrong. A run may end by too many deaths, never lose a group."""
    window = 1 + int(window_share * (4 * (max_staleness + 1) - 1))
    config = run_config(steps=8, seed=seed, max_staleness=max_staleness, window=window, cluster={"max_restarts": 1000})
    faults = Faults(
        deaths_per_hour=deaths_per_hour,
        slow_share=slow_share,
        slow_factor=5.0,
        joins=joins,
        reward_timeout_share=timeout_share,
    )
    found = simulated(config, replicas=3, faults=faults, costs=Costs(generator_start_s=5.0))
    assert len(set(found.group_ids)) == len(found.group_ids) == 4 * len(found.steps)
    assert max(found.staleness, default=0) <= found.staleness_bound
    if found.end == "finished":
        assert sorted(found.group_ids) == list(range(32))
    else:
        assert found.end.startswith("MeshFailed"), found.end
        assert found.counts["deaths"] > 0


def test_a_checkpoint_blocks_the_trainer_for_a_twentieth_and_is_written_beside_the_steps(simulated: Simulate) -> None:
    """Trainer-bound: 100 s of writing, of which 5 s show in the step that waits for the copy."""
    config, costs = run_config(steps=40, **LARGE), replace(EXACT, save_bytes=200.0, save_bandwidth=2.0)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": 25})})
    found = simulated(config, costs=costs, replicas=8)
    longer_s = {step.step: step.step_s - (TRAIN_S + 0.5) for step in found.steps[5:]}
    assert {step for step, seconds in longer_s.items() if seconds > 1e-6} == {26}
    waited_s = longer_s[26] - 5.0 - EXACT.adopt_s
    assert -1e-6 < waited_s < 0.01, "a step that is saved has been adopted, after a decode step, and is on record"
    (copied,) = [span for span in found.spans["trainer"] if span.name == "checkpoint"][:1]
    assert copied.end_s - copied.start_s == pytest.approx(5.0)
    assert costs.save_s(1) == pytest.approx((5.0, 95.0))
    assert costs.save_s(10) == pytest.approx((0.5, 9.5)), "every GPU of the trainer writes its share"


def test_reward_timeouts_make_rollouts_invalid(simulated: Simulate) -> None:
    found = simulated(run_config(steps=40, max_staleness=1), faults=Faults(reward_timeout_share=0.1))
    assert 0.05 < float(np.mean([step.invalid_share for step in found.steps])) < 0.15
    broken = simulated(run_config(), faults=Faults(reward_timeout_share=1.0))
    assert broken.end.startswith("TooManyInvalid")


def test_a_response_longer_than_the_call_timeout_ends_the_run_as_it_would_a_real_one(simulated: Simulate) -> None:
    config = run_config(cluster={"timeout_s": 5.0, "on_failure": {"generator": "stop"}})
    assert simulated(config, costs=EXACT, replicas=1).end.startswith("CallTimeout: generator-0.collect")


def test_a_stalled_run_says_who_waits(simulated: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClusterConfig, "stall_timeout_s", property(lambda _: 3.0))
    found = simulated(run_config(), costs=EXACT)
    assert found.end.startswith("Stalled: nothing finished for 3 s")
    assert "8 are in flight" in found.end
    assert "generator-1 (pid 0): work for 3 s" in found.end
    assert "after 0 steps" in render_simulation(found)


@nightly("long simulations; by day shorter ones say who waits")
def test_segments_change_who_decodes_but_not_what(simulated: Simulate) -> None:
    """One of two generators is slower, not so much that it is spared: parked rollouts go to the other, and the slow one
    decides no more."""
    costs = replace(EXACT, response_lengths=(100, 900), prefill_token_s=1e-6)
    slow = Faults(slow_share=0.5, slow_factor=3.5)
    found = {
        tokens: simulated(run_config(steps=20, max_staleness=0, segment_tokens=tokens), costs=costs, faults=slow)
        for tokens in (0, 60)
    }
    assert [step.update.num_loss_tokens for step in found[60].steps] == [
        step.update.num_loss_tokens for step in found[0].steps
    ]
    assert sorted(found[60].group_ids) == list(range(80))
    assert sum(step.extra["resumed_segments"] for step in found[60].steps) > 20 * 8
    assert not any(step.extra["resumed_segments"] for step in found[0].steps)
    assert np.mean(found[60].step_s) < 0.7 * np.mean(found[0].step_s)


def test_segments_survive_deaths(simulated: Simulate) -> None:
    config = run_config(steps=20, max_staleness=2, window=6, segment_tokens=50, cluster={"max_restarts": 1000})
    deaths = Faults(deaths=((12.0, 1), (12.1, 2), (40.0, 0)))
    found = simulated(config, replicas=3, faults=deaths, costs=Costs(generator_start_s=5.0))
    assert (found.end, found.counts["deaths"]) == ("finished", 3)
    assert sorted(found.group_ids) == list(range(80))
    assert max(found.staleness) <= found.staleness_bound
