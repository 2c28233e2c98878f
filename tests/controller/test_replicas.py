"""Generators that leave, stand still or come too late, one case each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.cluster.api import MeshFailed, port
from llamarl.controller import weights
from llamarl.controller.flight import Flight, Replicas
from llamarl.controller.ports import TrainerPort
from llamarl.controller.progress import Progress
from llamarl.controller.supervision import Supervisor
from llamarl.controller.weights import Transports
from llamarl.journal.writer import Journal
from llamarl.parts.forecast.simulator.clock import run_virtual
from llamarl.weight_sync.layout import TensorSpec
from llamarl.weight_sync.select import Selection
from tests.controller.fakes import Run, config
from tests.executors.ledger import Generator, Trainer


def test_a_version_that_is_no_longer_there_is_not_asked_for_again(tmp_path: Path) -> None:
    late = Generator(outcomes=["adopted", "superseded"])
    run = Run(config(tmp_path, weight_sync={"patience_s": 1.0}), tmp_path, [Generator(), late]).train()
    asked = [one.args[0] for one in late.calls("adopt")]
    assert not any(row["extra.resyncs"] for row in run.steps), "nothing has failed"
    assert asked == sorted(set(asked)) and late.version == run.version == 6


def test_one_that_answers_again_ends_what_others_have_taken_over(tmp_path: Path) -> None:
    """It is in service again, and does not first finish what nobody wants."""
    thawed_s = list[float]()
    slow = Generator(duration_s=lambda *_: 1.0 if thawed_s else 1e6)

    async def strike(run: Run) -> None:
        while not slow.sampled:
            await asyncio.sleep(0.1)
        slow.freeze()
        await asyncio.sleep(40.0)
        thawed_s.append(asyncio.get_running_loop().time())
        slow.thaw()

    run = Run(config(tmp_path, steps=40), tmp_path, [Generator(), slow]).train(strike=strike)
    assert run.version == 40
    assert any(begin_s > thawed_s[0] + 1.0 for begin_s, _ in slow.spans), "not only what was on its way to it"


def test_a_call_to_one_that_has_left_has_no_effect() -> None:
    """Also where a death ends the run: this is none."""

    async def main() -> None:
        replicas = Replicas([generator := Generator().start("generator-0")], flight(), Supervisor(), Progress(), 5.0)
        (replica,) = replicas.alive
        generator.die()
        with pytest.raises(MeshFailed):
            await replicas.unless_dead(replica, replica.port.collect(0))
        replicas.remove(replica)
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
    wanted = config(tmp_path, steps=40, cluster={"timeout_s": 20.0}, weight_sync={"patience_s": 1.0})

    async def strike(run: Run) -> None:
        while run.controller.replicas.alive[1].fetching != 2:
            await run.controller.replicas.changed.wait()
        await run.controller.recovery.remove("generator-1", timeout_s=5.0)

    run = Run(wanted, tmp_path, [Generator(), leaving]).train(strike=strike)
    assert run.version == 40 and run.wall_s > 2 * 20.0


SECONDS = {"memory": 0.1, "pigeon": 0.5, "dove": 0.25}
"""The transports, of which memory is the fastest."""


def flight() -> Flight:
    return Flight(config(Path()), Journal())


class SamplingTrainer(Trainer):
    """Has three transports, and notes which are chosen."""

    @property
    def chosen(self) -> list[tuple[str, bool]]:
        return [one.args for one in self.calls("choose")]

    def do_set_layout(self, rank: int, specs: tuple[TensorSpec, ...]) -> tuple[float, Any]:
        return 0.0, None

    def do_transports(self, same_host: bool, same_process: bool) -> tuple[float, Any]:
        return 0.0, ["memory", "pigeon"] if same_host else ["pigeon", "dove"]

    def do_publish_sample(self, version: int, transport: str) -> tuple[float, Any]:
        return 0.0, transport

    def do_choose(self, transport: str, same_host: bool) -> tuple[float, Any]:
        return 0.0, None

    def do_publish(self, version: int, in_use: tuple[int, ...]) -> tuple[float, Any]:
        seconds, found = super().do_publish(version, in_use)
        return seconds, replace(found, addresses={name: found.addresses[""] for name, _ in self.chosen})


class Fetching(Generator):
    """Has weights to fetch."""

    def do_weight_specs(self) -> tuple[float, Any]:
        return 0.0, (TensorSpec.whole("w", (2, 5), "float32"),)

    def do_try_sample(self, version: int, address: str) -> tuple[float, Any]:
        return SECONDS[address], None


async def transports_for(
    trainer: SamplingTrainer, places: Sequence[tuple[str, ...]], trainer_hosts: tuple[str, ...]
) -> tuple[Transports, list[Selection], Replicas]:
    handles = [Fetching(hosts=hosts).start(f"generator-{number}") for number, hosts in enumerate(places)]
    replicas, told = Replicas(handles, flight(), Supervisor(), Progress(), 5.0), list[Selection]()
    asked = port(TrainerPort, trainer.start("trainer"), 5.0)
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
            handle = Fetching(hosts=(host,)).start(f"generator-{number}")
            assert await made.choose([replicas.add(handle)]) == is_new
        assert [one.transport for one in replicas.alive] == ["memory", "memory", "dove", "dove"]
        assert len(told) == 2 and len(trainer.calls("set_layout")) == 1

    run_virtual(main())


def test_one_on_another_host_gets_the_weights_that_were_published_before_it_came(tmp_path: Path) -> None:
    """It goes on alone where no step, and so no new version, would come without it."""

    async def strike(run: Run) -> None:
        while run.controller.version < 2:
            await run.controller.replicas.changed.wait()
        run.controller.replicas.alive[0].is_leaving = True  # no new requests, so no new steps
        await asyncio.sleep(10.0)
        await run.add("generator-9", Fetching(hosts=("b",)))

    trainer = SamplingTrainer()
    wanted = config(tmp_path, rollout={"prompts_per_step": 2, "group_size": 2, "max_staleness": 0})
    run = Run(wanted, tmp_path, [Fetching()], trainer=trainer).train(strike=strike)
    assert run.version == 6 and trainer.chosen == [("memory", True), ("dove", False)]
    versions = [version for version, _ in trainer.published]
    assert sorted(set(versions)) == list(range(7)) and len(versions) == 8, "one was published again"


def test_one_that_comes_by_a_new_transport_while_a_step_waits_gets_its_weights_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that has ended waits until generators let go of versions: until then its own stays with the trainer, and
    its row tells how it came to the generators."""
    monkeypatch.setattr(weights, "MAX_HELD_BY_ALL", 2)
    trainer, waited = SamplingTrainer(), list[tuple[int, int]]()

    def waits(run: Run) -> tuple[int, int]:
        """The version that is there, and the one that was published last."""
        return run.controller.version, trainer.published[-1][0]

    async def strike(run: Run) -> None:
        while not trainer.published or len(set(waits(run))) == 1 or trainer.calls("step")[-1].end_s == math.inf:
            await asyncio.sleep(0.25)
        waited.append(waits(run))
        await run.add("generator-9", Fetching(hosts=("b",)))

    holding = Fetching(adopt_s=lambda version: 30.0 if version == 2 else 0.1)
    wanted = config(tmp_path, rollout={"max_staleness": 1})
    run = Run(wanted, tmp_path, [Fetching(), holding], trainer=trainer).train(strike=strike)
    assert waited[0] == (4, 3) and trainer.chosen == [("memory", True), ("dove", False)]
    assert [version for version, _ in trainer.published] == list(range(7)), "step 4 when generators have let go"
    assert {row["step"]: row["fingerprint"] for row in run.steps} == {step: f"{step:016x}" for step in range(1, 7)}
    assert {row["extra.sync_bytes"] for row in run.steps} == {1000}
    assert not run.complaints


def test_a_slow_one_is_spared_and_is_back_soon_after_it_is_quick(tmp_path: Path) -> None:
    """One of three takes ten times as long from 20 to 200 s: meanwhile it holds up next to nothing."""

    generators = [Generator(duration_s=lambda *_: 2.0) for _ in range(3)]

    async def strike(run: Run) -> None:
        for seconds, token_s in ((20.0, 1.0), (180.0, 0.1)):
            await asyncio.sleep(seconds)
            generators[0].slow_down(token_s)

    wanted = config(tmp_path, steps=200, rollout={"max_staleness": 1})
    run = Run(wanted, tmp_path, generators).train(strike=strike)
    begun_s = [begin for begin, _ in generators[0].spans]
    meanwhile, later = [n for n in begun_s if 25.0 < n < 200.0], [n for n in begun_s if n > 200.0]
    assert run.version == 200
    assert len(meanwhile) <= 8 < 100 < sum(25.0 < begin < 200.0 for begin, _ in generators[1].spans)
    assert len(later) >= 10, "quick again"
