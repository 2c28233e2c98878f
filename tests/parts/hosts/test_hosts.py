"""Generators come and go with their hosts. Time is virtual; places are counted by `HostPlacer`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.cluster.api import ExecutorHandle, ExecutorSpec, HostFailed, MeshFailed
from llamarl.config.cluster import ClusterConfig
from llamarl.controller.supervision import Interrupted, Supervisor
from llamarl.parts.hosts.hosting import HostPlacer
from llamarl.parts.hosts.hosts import Elastic
from llamarl.parts.hosts.machines import let_leave
from llamarl.run.executors import GeneratorSpecs, StartedGenerators
from tests.controller.fakes import Run, config
from tests.executors.ledger import Generator
from tests.parts.hosts.test_hosting import Machine, config_of, going_on, machines

START_S = 5.0
"""For a generator."""


class Registry:
    """Its hosts are gone when they are lost or dismissed, and so is what runs or starts there."""

    def __init__(self, names: str) -> None:
        self.hosts: dict[str, Any] = {name: Machine(name) for name in names}
        self.dismissed = list[str]()
        self.running: dict[str, tuple[str, Generator]] = {}
        """Host and handle of each generator."""

    def lose(self, name: str, reason: str = "") -> None:
        reason = reason or f"host {name} is lost"
        del self.hosts[name]
        for host, handle in self.running.values():
            if host == name:
                handle.die(HostFailed(handle.name, (0,), reason))

    def dismiss(self, host: Any, reason: str) -> None:
        self.dismissed.append(host.inventory.name)
        self.lose(host.inventory.name, reason)


class HostedRun(Run):
    """The trainer on host b, generators on the others."""

    def __init__(self, folder: Path, hosts: str, replicas: int | str, policy: str = "respawn", steps: int = 40) -> None:
        self.registry = Registry(hosts)
        self.hosting = HostPlacer(
            config_of({"generator": ["[c-z]"]}, generator={"replicas": replicas}), self.registry.hosts
        )
        self.names = self.hosting.of_role("generator")
        wanted = config(folder, steps=steps, cluster={"on_failure": {"generator": policy}})
        super().__init__(wanted, folder, [Generator() for _ in self.names])

    async def spawn(self, number: int) -> ExecutorHandle:
        name, generator = f"generator-{number}", Generator()
        host = self.hosting.take_generator(number)[0].name
        handle = self._placed(name, host, generator.start(name))
        self.generators.append(generator)
        self._feed()
        await asyncio.wait((handle.failed,), timeout=START_S)
        if handle.failed.done():
            raise handle.failed.result()
        return handle

    def _placed(self, name: str, host: str, handle: Generator) -> Generator:
        self.registry.running[name] = host, handle
        handle.failed.add_done_callback(lambda _: self.hosting.leave(name))
        return handle

    async def look(self, host: Any) -> None:
        """Trainer and critic stay where they are."""

    def new_generators(self) -> dict[str, Any]:
        return {
            "spawn_generator": self.spawn,
            "free_generator_slots": self.hosting.free_generator_slots,
            "hosts_may_join": True,
        }

    async def _main(self, telemetry: Any) -> None:
        for name, generator in zip(self.names, self.generators, strict=True):
            self._placed(name, self.hosting.place(name)[0].name, generator)
        registry: Any = self.registry
        wanted = ClusterConfig(shutdown_timeout_s=5.0)
        Elastic(registry, self.hosting, self.controller, telemetry, self.supervisor, self.look, wanted)
        await super()._main(telemetry)

    def comes(self, host_name: str, **more: Any) -> None:
        host: Any = Machine(host_name)
        vars(host).update(more)
        host.describe = lambda: f"host {host_name}"
        self.registry.hosts[host_name] = host
        self.registry.joined(host)  # pyrefly: ignore[missing-attribute]

    def leaves(self, name: str) -> None:
        host = self.registry.hosts[name]
        host.is_leaving, host.name = True, name
        self.registry.leaves(host)  # pyrefly: ignore[missing-attribute]

    @property
    def where(self) -> list[str]:
        """Hosts of the generators that are up."""
        return sorted(self.registry.running[one.name][0] for one in self.controller.recovery.staying)


def at(*events: tuple[float, Callable[[HostedRun], object]]) -> Callable[[Any], Awaitable[None]]:
    """What happens after so many seconds."""

    async def strike(run: Any) -> None:
        clock = asyncio.get_running_loop()
        for when_s, event in events:
            await asyncio.sleep(when_s - clock.time())
            event(run)

    return strike


def says(seen: list[list[str]]) -> Callable[[HostedRun], object]:
    return lambda run: seen.append(run.where)


def audited(run: Run, steps: int = 40) -> None:
    assert run.version == steps and not run.complaints
    trained = [row["group_id"] for row in run.rollouts if not row["index"]]
    assert len(set(trained)) == len(trained) == 2 * steps


def test_others_take_over_before_the_only_host_of_generators_goes(tmp_path: Path) -> None:
    seen, run = list[list[str]](), HostedRun(tmp_path, "bcd", 1)
    audited(run.train(strike=at((5.0, lambda run: run.leaves("c")), (5.5, says(seen)), (12.0, says(seen)))))
    assert seen == [["c"], ["d"]], "it computes until the other one is up"
    assert run.registry.dismissed == ["c"]


@pytest.mark.parametrize("adopt_s", [0.5, 6.0])
def test_a_host_leaves_though_what_takes_over_is_too_slow_to_catch_up_beside_it(tmp_path: Path, adopt_s: float) -> None:
    """Fetching takes more than half of weight_sync.patience_s, so that a new generator runs after versions for ever."""
    run, left_s = HostedRun(tmp_path, "bc", "auto"), list[float]()
    placed, dismiss = run._placed, run.registry.dismiss

    def placed_slow(name: str, host: str, handle: Generator) -> Generator:
        handle.adopt_s = adopt_s if host == "d" else 0.0
        return placed(name, host, handle)

    def leaves(host: Any, reason: str) -> None:
        left_s.append(asyncio.get_running_loop().time())
        dismiss(host, reason)

    run._placed, run.registry.dismiss = placed_slow, leaves
    audited(run.train(strike=at((5.0, lambda run: run.comes("d")), (6.0, lambda run: run.leaves("c")))))
    assert run.registry.dismissed == ["c"] and left_s[0] < 6.0 + START_S + 2 * adopt_s + 1.0


def test_a_host_on_which_a_generator_starts_may_leave(tmp_path: Path) -> None:
    run = HostedRun(tmp_path, "bc", "auto", policy="stop")
    audited(run.train(strike=at((5.0, lambda run: run.comes("d")), (6.0, lambda run: run.leaves("d")))))
    assert run.registry.dismissed == ["d"]
    assert any("did not start" in text for text in run.warnings)


def test_the_last_host_of_generators_that_leaves_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = HostedRun(tmp_path, "bc", 1)
    with pytest.raises(Interrupted, match="as host c leaves: generator-0 cannot be removed: it is the only generator"):
        run.train(strike=at((5.0, lambda run: run.leaves("c"))))


def test_a_host_that_came_while_the_run_started_gets_generators(tmp_path: Path) -> None:
    seen, run = list[list[str]](), HostedRun(tmp_path, "bc", "auto")
    run.registry.hosts["d"] = Machine("d")
    audited(run.train(strike=at((8.0, says(seen)))))
    assert {"c", "d"} == set(seen[0])


@pytest.mark.parametrize("failed", ["", "no room"])
def test_a_host_that_comes_gets_generators_once_it_has_the_models(tmp_path: Path, failed: str) -> None:
    """Also those of a host that is lost while it fetches."""
    seen, run = list[list[str]](), HostedRun(tmp_path, "bc", "auto")
    run.hosting.models, run.hosting.ready = ["a/b@0"], set(run.registry.hosts.values())

    async def ask(what: str, timeout_s: float, names: list[str]) -> dict[str, str]:
        assert (what, names) == ("fetch", ["a/b@0"])
        await asyncio.sleep(10.0)
        return {"failed": failed}

    def loses(run: HostedRun) -> None:
        if not failed:
            run.registry.lose("c")

    events = (5.0, lambda run: run.comes("d", name="d", ask=ask)), (6.0, loses), (14.0, says(seen)), (21.0, says(seen))
    audited(run.train(strike=at(*events)))
    assert [{*where} for where in seen] == ([{"c"}, {"c"}] if failed else [set(), {"d"}])
    assert any(text == "nothing starts on host d: host d: no room" for text in run.warnings) == bool(failed)


def test_a_host_that_asked_to_leave_while_the_run_started_goes_in_order(tmp_path: Path) -> None:
    run = HostedRun(tmp_path, "bcd", "auto", policy="stop")
    host = run.registry.hosts["c"]
    host.is_leaving, host.name = True, "c"
    audited(run.train(strike=at((0.0, lambda run: run.leaves("c")))))  # its call comes as the loop begins
    assert run.registry.dismissed == ["c"]
    assert not any("is lost" in text or "has left the run" in text for text in run.warnings), "nobody lost a process"


@pytest.mark.parametrize("second_s", [5.5, 8.0, 10.5])
def test_two_hosts_are_lost_one_after_the_other(tmp_path: Path, second_s: float) -> None:
    """The second one while the first one's replacement starts there, or before it has delivered anything."""
    seen, run = list[list[str]](), HostedRun(tmp_path, "bcde", 1)
    audited(
        run.train(
            strike=at(
                (5.0, lambda run: run.registry.lose("c")),
                (second_s, lambda run: run.registry.lose("d")),
                (second_s + START_S + 1.0, says(seen)),
            )
        )
    )
    assert seen == [["e"]]


def test_without_any_other_host_the_run_waits_for_its_return(tmp_path: Path) -> None:
    seen, run = list[list[str]](), HostedRun(tmp_path, "bc", 1)
    events = (5.0, lambda run: run.registry.lose("c")), (30.0, says(seen)), (40.0, lambda run: run.comes("c"))
    audited(run.train(strike=at(*events, (46.0, says(seen)))))
    assert seen == [[], ["c"]]
    assert any(text.endswith("waits for a host with free devices") for text in run.warnings)


def test_without_respawn_the_loss_of_the_last_host_ends_the_run(tmp_path: Path) -> None:
    for policy in ("stop", "drop"):
        run = HostedRun(tmp_path, "bc", 1, policy=policy)
        with pytest.raises(HostFailed, match="host c is lost"):
            run.train(strike=at((5.0, lambda run: run.registry.lose("c"))))


class GpuRun(HostedRun):
    """The trainer on two GPUs of host b, three generators on those of c; processes start as in a run."""

    def __init__(self, folder: Path, policy: str = "respawn") -> None:
        super().__init__(folder, "bc", 1, policy)
        self.registry.hosts.update(machines(b=2, c=3))
        trainer, generator = {"device": "cuda", "parallelism": {"fsdp": 2}}, {"device": "cuda", "replicas": 3}
        asked = going_on(2, trainer=trainer, generator=generator)
        self.hosting = HostPlacer(asked, self.registry.hosts)
        self.names, self.generators = self.hosting.of_role("generator"), [Generator() for _ in range(3)]
        self.start_s = 1.0
        cluster: Any = SimpleNamespace(spawn=self.start)
        self.started = StartedGenerators(cluster, GeneratorSpecs(config=asked), self.hosting, 60.0, 5.0)

    async def start(self, spec: ExecutorSpec, timeout_s: float) -> Generator:
        generator = Generator()
        handle = generator.start(spec.name)
        self.generators.append(generator)
        self._feed()
        await asyncio.sleep(START_S)
        return handle

    def _placed(self, name: str, host: str, handle: Generator) -> Generator:
        self.started.add(super()._placed(name, host, handle))
        return handle

    def new_generators(self) -> dict[str, Any]:
        return super().new_generators() | {"spawn_generator": self.started.spawn, "spawn_again": self._again}

    async def _again(self, name: str) -> Any:
        self.hosting.again(name)
        await self.started.make_way(name)
        return await super()._again(name)

    def loses_trainer(self) -> None:
        del self.registry.hosts["b"]
        self.handles["trainer"].die(HostFailed("trainer", (0, 1), "host b is lost"))


@pytest.mark.parametrize("policy", ["respawn", "drop"])
def test_generators_make_way_for_a_trainer_whose_host_is_lost(tmp_path: Path, policy: str) -> None:
    """Their rollouts go on elsewhere, and others come when there is a host again."""
    seen = list[int]()
    run = GpuRun(tmp_path, policy)

    def comes(run: Any) -> None:
        seen.append(len(run.controller.recovery.staying))
        run.comes("d", **vars(Machine("d", 2)))

    def counts(run: Any) -> None:
        seen.append(len(run.controller.recovery.staying))

    lost = (5.0, lambda run: run.loses_trainer())
    audited(run.train(strike=at((1.0, counts), lost, (9.0, comes), (9.5 + 2 * START_S, counts))))
    assert seen == [3, 1, 3] and run.lives["trainer"] == 1
    told = "its devices go to trainer, which lost its devices"
    assert sum(told in text for text in run.warnings) == 2
    assert run.hosting.devices("trainer") == [("c", 1), ("c", 2)] and run.hosting.layout("trainer") is None


def test_a_host_that_leaves_gives_the_trainer_to_others_or_ends_the_run(tmp_path: Path) -> None:
    """Where it could start again; a run that ends has a checkpoint."""
    run = GpuRun(tmp_path)
    run.registry.running["trainer"] = "b", run.trainer
    audited(run.train(strike=at((5.0, lambda run: run.leaves("b")))))
    assert run.registry.dismissed == ["b"] and run.lives["trainer"] == 1
    assert any("host b has left the run; it is started again" in text for text in run.warnings)
    assert run.hosting.devices("trainer") == [("c", 1), ("c", 2)]
    (tmp_path / "other").mkdir()
    run = GpuRun(tmp_path / "other")
    run.registry.hosts.pop("c")
    with pytest.raises(Interrupted, match="b leaves, which runs trainer, reward: 0 hosts are left, and the run"):
        run.train(strike=at((5.0, lambda run: run.leaves("b"))))


def test_a_generator_that_starts_where_the_trainer_goes_ends(tmp_path: Path) -> None:
    """It is not there yet when the trainer takes its device."""
    run = GpuRun(tmp_path)

    def dies(run: Any) -> None:
        run.handles["generator-2"].die(MeshFailed("generator-2", (0,), "boom"))

    audited(run.train(strike=at((5.0, dies), (6.0, lambda run: run.loses_trainer()))))
    assert any("generator-3 (rank 0): its devices go to another executor" in text for text in run.warnings)
    assert run.hosting.devices("trainer") == [("c", 1), ("c", 2)] and run.hosting.of_role("generator") == [
        "generator-0"
    ]


def test_a_host_of_fine_tuning_goes_at_once_or_ends_it_with_a_checkpoint() -> None:
    registry: Any = Registry("bcd")
    handle: Any = SimpleNamespace(name="trainer", hosts=("b",))

    async def main() -> None:
        supervisor = Supervisor()
        for host in registry.hosts.values():
            host.name = host.inventory.name
        registry.hosts["c"].is_leaving = True  # while it started
        let_leave(registry, handle, supervisor)
        registry.leaves(registry.hosts["d"])
        assert registry.dismissed == ["c", "d"]
        registry.leaves(registry.hosts["b"])
        with pytest.raises(Interrupted, match="as host b leaves, which runs trainer"):
            await supervisor.run(asyncio.sleep(10))

    asyncio.run(main())
    assert registry.dismissed == ["c", "d"]
