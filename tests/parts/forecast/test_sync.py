"""Weight sync of a plan is that of its own copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.feasibility import plans
from llamarl.parts.forecast.report import render_plans
from llamarl.parts.forecast.request import ASYNCHRONOUS, BASELINE
from llamarl.parts.forecast.solver import asynchronous_plan, solve
from llamarl.parts.forecast.sync import priced, weight_transfer
from llamarl.parts.forecast.transfer_time import LinkSpeeds
from tests.parts.forecast.conftest import SMALL, make_request

LINKS = LinkSpeeds(network=50e9, host=450e9)


def test_a_plan_is_priced_by_its_own_copies() -> None:
    request = make_request("llama3-70b", 128)
    searched, (synchronous, asynchronous) = asynchronous_plan(request), plans(request)
    assert searched and synchronous and asynchronous
    trainer, generator = asynchronous.trainer, asynchronous.generator
    share = request.constants.link_efficiency
    transfer, reason = weight_transfer(
        request.model,
        LinkSpeeds(network=50e9 * share, host=450e9 * share),
        (trainer.pp, 1, trainer.dp * trainer.cp, trainer.tp, trainer.ep),
        (generator.replicas, generator.tp, generator.weight_bytes),
        trainer.gpus,
        8,
    )
    assert generator.time_parts["sync"] == transfer.seconds
    assert asynchronous.sync == reason
    assert reason in render_plans(request, synchronous, asynchronous)
    # Embedding and head stay bfloat16; what else the search leaves out is small.
    assert transfer.seconds == pytest.approx(searched.generator.time_parts["sync"], rel=0.1)
    assert asynchronous.step_s == pytest.approx(searched.step_s, rel=0.01)
    assert asynchronous.step_s >= max(trainer.busy_s, generator.busy_s)
    assert Costs.from_plan(asynchronous).adopt_s == transfer.seconds


def test_a_colocated_step_is_its_parts_and_weights_stay_on_their_hosts_where_they_can() -> None:
    synchronous, _ = plans(make_request(SMALL, 8))
    assert synchronous
    assert synchronous.step_s == pytest.approx(synchronous.trainer.busy_s + synchronous.generator.busy_s)
    assert "network" not in synchronous.sync, "all on one host"


def test_without_direct_sync_there_is_nothing_to_price() -> None:
    request = make_request(SMALL, 8)
    plan = solve(request, (request.pools[0],) * 2, BASELINE, 0)
    assert plan
    assert priced(plan) == plan
    assert priced(replace(plan, rules=replace(BASELINE, direct_sync=True))).sync


def test_sizes_that_ranks_cannot_share_evenly_count_as_padded() -> None:
    odd = replace(SMALL, vocab_size=64_003, num_kv_heads=6, num_heads=24)
    even = replace(odd, vocab_size=64_016)
    times = [weight_transfer(model, LINKS, (1, 1, 4, 1, 1), (2, 16, 2), 8, 8)[0].seconds for model in (odd, even)]
    assert times[0] == times[1]


def test_machines_of_two_kinds_do_not_share_hosts() -> None:
    request = make_request("llama3-8b", 12)
    other = replace(request.pools[0], gpu=replace(request.pools[0].gpu, network_bandwidth=5e9))
    found = [solve(request, (request.pools[0], second), ASYNCHRONOUS, 2) for second in (request.pools[0], other)]
    alike, different = (priced(plan).generator.time_parts["sync"] for plan in found if plan)
    assert different > 2 * alike, "12 of a kind share a host of 8; between kinds all go through the slower adapter"
