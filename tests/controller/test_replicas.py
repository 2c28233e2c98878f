"""Generators that leave, stand still or come too late, one case each. Executors are fakes; see `fakes`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from llamarl.cluster.api import MeshFailed
from llamarl.cluster.port import port
from llamarl.controller.flight import Flight
from llamarl.controller.journal import Journal
from llamarl.controller.ports import TrainerPort
from llamarl.controller.replicas import Replicas
from llamarl.controller.supervision import Supervisor
from llamarl.controller.sync import Transports
from llamarl.executors.replies import Adoption, Published
from llamarl.parts.forecast.simulator.clock import run_virtual
from llamarl.weight_sync.layout import TensorSpec
from llamarl.weight_sync.select import Selection
from tests.controller.fake_trainer import Trainer
from tests.controller.fakes import FakeHandle, Generator, Run, config


def test_a_version_that_is_no_longer_there_is_not_asked_for_again(tmp_path: Path) -> None:
    asked = list[int]()

    class Late(Generator):
        async def adopt(self, version: int, slot: int) -> Adoption:
            asked.append(version)
            return await super().adopt(version, slot)

    late = Late(outcomes=["adopted", "superseded"])
    run = Run(config(tmp_path, weight_sync={"patience_s": 1.0}), tmp_path, [Generator(), late]).train()
    assert asked == sorted(set(asked)) and late.version == run.version == 6


def test_one_that_answers_again_ends_what_others_have_taken_over(tmp_path: Path) -> None:
    """It is in service again, and does not first finish what nobody wants."""
    thawed_s = list[float]()
    slow = Generator(duration_s=lambda *_: 1.0 if thawed_s else 1e6)

    async def strike(run: Run) -> None:
        while not slow.sampled:
            await asyncio.sleep(0.1)
        run.handles["generator-1"].thawed.clear()
        await asyncio.sleep(40.0)
        thawed_s.append(asyncio.get_running_loop().time())
        run.handles["generator-1"].thawed.set()

    run = Run(config(tmp_path, steps=40), tmp_path, [Generator(), slow]).train(strike=strike)
    assert run.version == 40
    assert any(begin_s > thawed_s[0] + 1.0 for begin_s, _ in slow.spans), "not only what was on its way to it"


def test_a_call_to_one_that_has_left_has_no_effect() -> None:
    """Also where a death ends the run: this is none."""

    async def main() -> None:
        replicas = Replicas([FakeHandle("generator-0", Generator())], flight(), Supervisor(), 5.0)
        (replica,) = replicas.alive
        replica.handle.failed.set_result(MeshFailed("generator-0", (0,), "is gone"))
        with pytest.raises(MeshFailed):
            await replicas.unless_dead(replica, replica.port.collect(0))
        replicas.lose(replica)
        assert await replicas.unless_dead(replica, replica.port.collect(0)) is None

    run_virtual(main())


def test_of_two_that_are_told_to_leave_one_stays(tmp_path: Path) -> None:
    async def strike(run: Run) -> None:
        recovery, leaving = run.controller.recovery, run.controller.replicas.alive[1]
        await leaving.busy.wait()
        first = asyncio.ensure_future(recovery.remove("generator-1", timeout_s=5.0))
        await asyncio.sleep(0)
        assert leaving.is_leaving and not leaving.is_gone
        for name, reason in (("generator-0", "the only generator"), ("generator-1", "unknown")):
            with pytest.raises(ValueError, match=f"{name} cannot be removed: it is {reason}"):
                await recovery.remove(name, timeout_s=5.0)
        await first

    assert Run(config(tmp_path), tmp_path, [Generator(), Generator()]).train(strike=strike).version == 6


def test_the_fetch_of_one_that_has_left_concerns_nobody(tmp_path: Path) -> None:
    """It would end the run when its time is over."""
    leaving = Generator(adopt_s=lambda version: 1e6 if version == 2 else 0.1)
    wanted = config(tmp_path, steps=40, cluster={"call_timeout_s": 20.0}, weight_sync={"patience_s": 1.0})

    async def strike(run: Run) -> None:
        while run.controller.replicas.alive[1].fetching != 2:
            await run.controller.replicas.changed.wait()
        await run.controller.recovery.remove("generator-1", timeout_s=5.0)

    run = Run(wanted, tmp_path, [Generator(), leaving]).train(strike=strike)
    assert run.version == 40 and run.wall_s > 2 * 20.0


def flight() -> Flight:
    return Flight(config(Path()), Journal())


class SamplingTrainer:
    """Has three transports; memory is the fastest."""

    SECONDS: ClassVar = {"memory": 0.1, "pigeon": 0.5, "dove": 0.25}

    def __init__(self) -> None:
        self.chosen = list[tuple[str, bool]]()
        self.layouts = list[tuple[TensorSpec, ...]]()

    async def set_layout(self, rank: int, specs: tuple[TensorSpec, ...]) -> None:
        self.layouts.append(specs)

    async def transports(self, same_host: bool, same_process: bool) -> list[str]:
        return ["memory", "pigeon"] if same_host else ["pigeon", "dove"]

    async def publish_sample(self, version: int, transport: str) -> str:
        return transport

    async def choose(self, transport: str, same_host: bool = True) -> None:
        self.chosen.append((transport, same_host))


class Fetching(Generator):
    async def weight_specs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec.whole("w", (2, 5), "float32"),)

    async def try_sample(self, version: int, address: str) -> None:
        await asyncio.sleep(SamplingTrainer.SECONDS[address])


async def transports_for(
    trainer: SamplingTrainer, places: Sequence[tuple[str, ...]], trainer_hosts: tuple[str, ...]
) -> tuple[Transports, list[Selection], Replicas]:
    handles = [FakeHandle(f"generator-{number}", Fetching()) for number in range(len(places))]
    for handle, hosts in zip(handles, places, strict=True):
        handle.hosts = hosts
    replicas, told = Replicas(handles, flight(), Supervisor(), 5.0), list[Selection]()
    asked = port(TrainerPort, FakeHandle("trainer", trainer), 5.0)
    made = Transports(config(Path(), cluster={"kind": "monarch"}), asked, trainer_hosts, told.append)
    await made.begin(replicas.alive)
    return made, told, replicas


def test_the_speed_of_a_transport_is_that_of_all_generators_together() -> None:
    async def main() -> None:
        _, (found,), _ = await transports_for(SamplingTrainer(), [("",)] * 3, ("",))
        slow = found.measurements[1]
        assert slow.num_bytes == 3 * 40
        assert slow.bytes_per_s == pytest.approx(240.0)

    run_virtual(main())


@pytest.mark.parametrize(
    ("places", "trainer_hosts", "chosen"),
    [
        ([("a",), ("a",)], ("a",), ["memory", "memory"]),
        ([("a",), ("b",), ("c",)], ("a",), ["memory", "dove", "dove"]),
        ([("a",), ("b",)], ("a", "b"), ["dove", "dove"]),
        ([("a",), ("a", "b")], ("a",), ["memory", "dove"]),
    ],
)
def test_each_generator_gets_the_fastest_of_what_it_shares_with_the_trainer(places, trainer_hosts, chosen) -> None:
    """A trainer, or a generator, with ranks on several hosts shares memory with nobody."""

    async def main() -> None:
        trainer = SamplingTrainer()
        _, told, replicas = await transports_for(trainer, places, trainer_hosts)
        assert [one.transport for one in replicas.alive] == chosen
        assert trainer.chosen == list(dict.fromkeys((name, name == "memory") for name in chosen))
        assert [(one.transport, one.same_host) for one in told] == trainer.chosen

    run_virtual(main())


def test_one_that_comes_later_gets_that_of_its_kind_which_is_tried_when_the_kind_is_new() -> None:
    async def main() -> None:
        trainer = SamplingTrainer()
        made, told, replicas = await transports_for(trainer, [("a",)], ("a",))
        for number, (host, is_new) in enumerate([("a", False), ("b", True), ("c", False)], 1):
            handle = FakeHandle(f"generator-{number}", Fetching())
            handle.hosts = (host,)
            assert await made.choose([replicas.add(handle)]) == is_new
        assert [one.transport for one in replicas.alive] == ["memory", "memory", "dove", "dove"]
        assert len(told) == 2 and len(trainer.layouts) == 1

    run_virtual(main())


def test_one_on_another_host_gets_the_weights_that_were_published_before_it_came(tmp_path: Path) -> None:
    """It goes on alone where no step, and so no new version, would come without it."""

    class Publishing(SamplingTrainer, Trainer):
        def __init__(self) -> None:
            SamplingTrainer.__init__(self)
            Trainer.__init__(self)

        async def publish(self, version: int, in_use: tuple[int, ...]) -> Published:
            found = await super().publish(version, in_use)
            return replace(found, addresses={name: found.addresses[""] for name, _ in self.chosen})

    async def strike(run: Run) -> None:
        while run.controller.version < 2:
            await run.controller.replicas.changed.wait()
        run.controller.replicas.alive[0].is_leaving = True  # no new requests, so no new steps
        await asyncio.sleep(10.0)
        await run.add("elsewhere", Fetching(hosts=("b",)))

    trainer = Publishing()
    wanted = config(tmp_path, rollout={"prompts_per_step": 2, "group_size": 2, "max_staleness": 0})
    run = Run(wanted, tmp_path, [Fetching()], trainer=trainer).train(strike=strike)
    assert run.version == 6 and trainer.chosen == [("memory", True), ("dove", False)]
    versions = [version for version, _ in trainer.published]
    assert sorted(set(versions)) == list(range(7)) and len(versions) == 8, "one was published again"


def test_a_slow_one_is_spared_and_is_back_soon_after_it_is_quick(tmp_path: Path) -> None:
    """One of three takes ten times as long from 20 to 200 s: meanwhile it holds up next to nothing."""

    def now_s() -> float:
        return asyncio.get_running_loop().time()

    slow = Generator(duration_s=lambda *_: 20.0 if 20.0 < now_s() < 200.0 else 2.0)
    generators = [slow, *(Generator(duration_s=lambda *_: 2.0) for _ in range(2))]
    run = Run(config(tmp_path, steps=150, rollout={"max_staleness": 1}), tmp_path, generators).train()
    begun_s = [begin for begin, _ in slow.spans]
    meanwhile, later = [n for n in begun_s if 25.0 < n < 200.0], [n for n in begun_s if n > 200.0]
    assert run.version == 150
    assert len(meanwhile) <= 6 < 100 < sum(25.0 < begin < 200.0 for begin, _ in generators[1].spans)
    assert len(later) >= 10, "quick again"
