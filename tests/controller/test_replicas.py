"""Generators that leave, stand still or come too late, one case each. Executors are fakes; see `fakes`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llamarl.cluster.api import MeshFailed
from llamarl.cluster.port import port
from llamarl.config.schema import WeightSyncConfig
from llamarl.controller.ports import TrainerPort
from llamarl.controller.replicas import Replicas
from llamarl.controller.supervision import Supervisor
from llamarl.controller.sync import choose_transport
from llamarl.executors.replies import Adoption
from llamarl.forecast.simulator.clock import run_virtual
from llamarl.weight_sync.layout import TensorSpec
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
        replicas = Replicas([FakeHandle("generator-0", Generator())], Supervisor(), 5.0)
        (replica,) = replicas.alive
        replica.handle.failed.set_result(MeshFailed("generator-0", (0,), "is gone"))
        with pytest.raises(MeshFailed):
            await replicas.unless_dead(replica, replica.port.collect())
        replicas.lose(replica)
        assert await replicas.unless_dead(replica, replica.port.collect()) is None

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


def test_the_speed_of_a_transport_is_that_of_all_generators_together() -> None:
    class Sampling:
        async def transports(self, same_host: bool, same_process: bool) -> list[str]:
            return ["carrier_pigeon"]

        async def publish_sample(self, version: int, transport: str) -> int:
            return version

        async def choose(self, transport: str) -> None:
            return None

    class Fetching(Generator):
        async def try_sample(self, version: int, address: int) -> None:
            await asyncio.sleep(0.5)

    async def main() -> None:
        handles = [FakeHandle(f"generator-{number}", Fetching()) for number in range(3)]
        replicas = Replicas(handles, Supervisor(), 5.0)
        replicas.layouts = [(TensorSpec.whole("w", (2, 5), "float32"),)] * 2
        trainer = port(TrainerPort, FakeHandle("trainer", Sampling()), 5.0)
        found = await choose_transport(WeightSyncConfig(), trainer, replicas, is_inline=False)
        (measured,) = found.measurements
        assert measured.num_bytes == 3 * 2 * 40
        assert measured.bytes_per_s == pytest.approx(480.0)

    run_virtual(main())
