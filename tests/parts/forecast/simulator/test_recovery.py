"""Deaths of generators under each policy of the real controller."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.simulator.faults import Faults
from tests.parts.forecast.simulator.conftest import Simulate, run_config

COSTS = Costs(response_lengths=(300, 500), train_token_gpu_s=1e-4, generator_start_s=20.0)
ONE_DEATH = Faults(deaths=((12.0, 1),))


def config(policy: str, **rollout: int) -> RunConfig:
    rollout = {"max_staleness": 1, "window": 4} | rollout
    return run_config(steps=20, cluster={"on_failure": {"generator": policy}}, **rollout)


def test_stop_ends_the_run_by_the_name_of_the_dead(simulated: Simulate) -> None:
    found = simulated(config("stop"), costs=COSTS, faults=ONE_DEATH)
    assert found.end == "MeshFailed: generator-1 (rank 0): was killed by SIGKILL"


def test_drop_goes_on_with_the_others(simulated: Simulate) -> None:
    found = simulated(config("drop"), costs=COSTS, faults=ONE_DEATH)
    assert found.end == "finished"
    assert sorted(found.group_ids) == list(range(80))
    assert found.counts["dropped_rollouts"] > 0
    assert found.counts["resubmitted_groups"] > 0
    assert set(found.spans) == {"trainer", "reward", "generator-0", "generator-1"}
    last_s = max(span.end_s for span in found.spans["generator-1"])
    assert last_s <= found.loop_s[0] + 12.0


def test_drop_ends_the_run_when_nobody_is_left(simulated: Simulate) -> None:
    found = simulated(config("drop"), costs=COSTS, faults=Faults(deaths=((12.0, 1), (15.0, 0))))
    assert found.end == "MeshFailed: generator-0 (rank 0): was killed by SIGKILL"


def test_respawn_replaces_the_dead(simulated: Simulate) -> None:
    found = simulated(config("respawn"), costs=COSTS, faults=ONE_DEATH)
    assert found.end == "finished"
    assert sorted(found.group_ids) == list(range(80))
    born_s = min(span.start_s for span in found.spans["generator-2"])
    assert found.spans["generator-2"][0].name == "weight_sync", "weights come before the first request"
    assert born_s >= found.loop_s[0] + 12.0 + 20.0


def test_respawn_waits_when_all_are_dead(simulated: Simulate) -> None:
    both = Faults(deaths=((12.0, 1), (12.0, 0)))
    found = simulated(config("respawn"), costs=COSTS, faults=both)
    assert found.end == "finished"
    assert sorted(found.group_ids) == list(range(80))
    assert {"generator-2", "generator-3"} <= set(found.spans)


def test_generators_that_die_again_and_again_are_not_replaced_for_ever(simulated: Simulate) -> None:
    deaths = ((12.0, 0), (33.5, 1), (55.0, 2), (76.5, 3), (98.0, 4))
    few = run_config(steps=20, max_staleness=1, window=4, cluster={"max_restarts": 3})
    assert simulated(few, costs=COSTS, faults=Faults(deaths=deaths[:3]), replicas=1).end == "finished"
    end = simulated(few, costs=COSTS, faults=Faults(deaths=deaths), replicas=1).end
    assert end.startswith("TooManyRestarts: generator died 4 times within 600 s and is not restarted again")
    assert [line.split(":")[0].split()[-1] for line in end.splitlines()[1:]] == [f"generator-{n}" for n in range(4)]


def test_synchronous_runs_recover_too(simulated: Simulate) -> None:
    found = simulated(config("drop", max_staleness=0, window=1), costs=COSTS, faults=ONE_DEATH)
    assert found.end == "finished"
    assert found.staleness == {0: 160}, "what is generated again comes from the same weights"


def test_joining_generators_take_weights_and_work(simulated: Simulate) -> None:
    found = simulated(config("stop"), costs=COSTS, faults=Faults(joins=((5.0, 2),)))
    assert found.end == "finished"
    assert found.counts["joins"] == 2
    for name in ("generator-2", "generator-3"):
        kinds = [span.name for span in found.spans[name]]
        assert kinds[0] == "weight_sync"
        assert "generate" in kinds
