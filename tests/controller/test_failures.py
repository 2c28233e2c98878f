"""Deaths, interruptions and resumed runs, over simulated executors."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.cluster.api import CallTimeout, MeshFailed, RemoteError
from llamarl.controller.flight import Replica
from llamarl.controller.supervision import Interrupted, Supervisor
from llamarl.controller.train_loop import NotSaved
from llamarl.controller.weights import Transports
from llamarl.data.sampler import PromptSampler
from llamarl.parts.forecast.simulator.clock import run_virtual
from tests.controller.fakes import Run, config, kills
from tests.executors.ledger import Generator, Model, Trainer
from tests.nightly import some

NUM_STEPS, NUM_TRAIN = 7, 23


@pytest.mark.parametrize("name", ["generator-0", "generator-1", "reward", "trainer"])
def test_a_death_ends_the_run_and_is_what_it_reports(tmp_path: Path, name: str) -> None:
    """At any moment, and never as an error that only follows from it."""
    for tenth in range(0, 90, 13):
        run = Run(config(tmp_path, steps=20), tmp_path, [Generator(), Generator(adopt_s=0.4)])
        with pytest.raises(MeshFailed) as caught:
            run.train(strike=kills((name, tenth / 10)))
        assert str(caught.value) == f"{name} (rank 0): was killed by SIGKILL"
        assert run.wall_s < tenth / 10 + 2.0
        assert not run.complaints, f"killed at {tenth / 10} s"


@pytest.mark.parametrize("name", ["generator-0", "reward"])
def test_a_trainer_that_lives_saves_when_another_dies(tmp_path: Path, name: str) -> None:
    """No completed step is lost, and none that is under way."""
    for tenth in range(10, 140, 17):
        for file in tmp_path.glob("*.jsonl"):
            file.unlink()
        disk = Trainer()
        run = run_of(tmp_path, 1, 3, disk, tenth, every_steps=0)
        run.saves_on_death = True
        with pytest.raises(MeshFailed, match=name):
            run.train(strike=kills((name, tenth / 10)))
        assert [version for version, _ in disk.saved] == [disk.version]
        audit(resumed(tmp_path, 1, 3, disk, tenth + 1000))


@pytest.mark.parametrize(("name", "method"), [("trainer", "publish"), ("generator-0", "adopt"), ("trainer", "step")])
def test_an_exception_in_an_executor_is_what_the_run_reports(tmp_path: Path, name: str, method: str) -> None:
    run = Run(config(tmp_path, steps=50), tmp_path)

    async def strike(run: Run) -> None:
        await asyncio.sleep(5.0)

        def broken(*args: object) -> None:
            raise RemoteError(name, method, "Traceback: boom")

        setattr(run.handles[name], f"do_{method}", broken)

    with pytest.raises(RemoteError) as caught:
        run.train(strike=strike)
    assert str(caught.value) == f"{name}.{method} failed\nTraceback: boom"
    assert not run.complaints


def test_a_call_without_answer_ends_the_run_by_name(tmp_path: Path) -> None:
    run = Run(config(tmp_path, cluster={"timeout_s": 30.0}), tmp_path, trainer=Trainer(step_s=1e6))
    with pytest.raises(
        CallTimeout, match=r"trainer.step had no answer after 30 s \(cluster.timeout_s\); trainer is in step"
    ):
        run.train()


def draws(count: int) -> list[str]:
    """Prompts that an uninterrupted run trains on."""
    sampler = PromptSampler(NUM_TRAIN, 0)
    return [f"p-{sampler.next()}" for _ in range(count)]


def audit(run: Run) -> None:
    """Every prompt that was admitted was trained once, and every step and rollout is on record once."""
    assert [row["step"] for row in run.steps] == list(range(1, NUM_STEPS + 1))
    trained = [row["prompt_id"] for row in run.rollouts if not row["index"]]
    assert Counter(trained) == Counter(draws(2 * NUM_STEPS))
    keys = [(row["group_id"], row["index"]) for row in run.rollouts]
    assert len(set(keys)) == len(keys) == 4 * NUM_STEPS
    assert Counter(row["step"] for row in run.rollouts) == dict.fromkeys(range(1, NUM_STEPS + 1), 4)
    assert max(row["staleness"] for row in run.rollouts) <= run.steps[0]["staleness_limit"]
    assert run.trainer.version == NUM_STEPS


def uneven(seed: int) -> Generator:
    return Generator(duration_s=lambda group_id, index: random.Random(f"{seed}/{group_id}/{index}").uniform(0.2, 4.0))


def run_of(tmp_path: Path, staleness: int, window: int, trainer: Trainer, seed: int, every_steps: int = 2) -> Run:
    settings = config(
        tmp_path,
        steps=NUM_STEPS,
        rollout={"max_staleness": staleness, "window": window},
        checkpoint={"every_steps": every_steps},
    )
    return Run(settings, tmp_path, [uneven(seed)], trainer=trainer, num_train=NUM_TRAIN)


def resumed(tmp_path: Path, staleness: int, window: int, disk: Trainer, seed: int) -> Run:
    """The rest of the run, from the newest checkpoint."""
    version, state = disk.saved[-1] if disk.saved else (0, "null")
    run = run_of(tmp_path, staleness, window, Trainer(version=version, saved=disk.saved), seed)
    if not disk.saved:
        run.metrics_file.unlink(missing_ok=True)
        run.rollouts_file.unlink(missing_ok=True)
    return run.train(json.loads(state))


@pytest.mark.parametrize(("staleness", "window"), some([(0, 1), (1, 1), (1, 4), (3, 6)], 2))
def test_after_a_crash_no_prompt_is_skipped_or_trained_twice(tmp_path: Path, staleness: int, window: int) -> None:
    for moment in range(1, 30, 3):
        for file in tmp_path.glob("*.jsonl"):
            file.unlink()
        disk = Trainer()
        try:
            run_of(tmp_path, staleness, window, disk, moment).train(strike=kills(("generator-0", moment / 1.3)))
        except MeshFailed:
            audit(resumed(tmp_path, staleness, window, disk, moment + 1000))


@pytest.mark.parametrize(("staleness", "window"), some([(0, 1), (1, 4), (3, 6)], 2))
def test_after_an_interruption_no_step_is_lost(tmp_path: Path, staleness: int, window: int) -> None:
    """A step that the trainer works on when the run is asked to end is completed, saved and on record."""
    num_in_step = 0
    for moment in range(1, 32, 3):
        for file in tmp_path.glob("*.jsonl"):
            file.unlink()
        disk = Trainer(step_s=0.9)
        run = run_of(tmp_path, staleness, window, disk, moment)

        async def interrupt(run: Run, at_s: float = moment / 2.1) -> None:
            await asyncio.sleep(at_s)
            run.supervisor.fail(Interrupted("ended by SIGINT"))

        try:
            run.train(strike=interrupt)
        except Interrupted:
            num_in_step += any(begin < moment / 2.1 < end for begin, end in disk.spans)
            assert disk.saved[-1][0] == disk.version
            assert [row["step"] for row in run.steps] == list(range(1, disk.version + 1))
            audit(resumed(tmp_path, staleness, window, disk, moment + 1000))
        assert not run.complaints
    assert num_in_step > 1


class Sleeper(Generator):
    """Takes a while to give its memory up."""

    num_sleeps = 0

    def do_sleep(self) -> tuple[float, Any]:
        self.num_sleeps += 1
        return 2.0, None


def test_an_interruption_while_generators_go_to_sleep_loses_no_prompt(tmp_path: Path) -> None:
    """The groups of a step that has not begun yet are admitted again."""
    generator, disk = Sleeper(duration_s=uneven(1).duration_s), Trainer()
    settings = config(
        tmp_path,
        steps=NUM_STEPS,
        rollout={"max_staleness": 0, "window": 1},
        checkpoint={"every_steps": 2},
        cluster={"placement": "colocated"},
    )

    async def interrupt(run: Run) -> None:
        while generator.num_sleeps < 3:
            await asyncio.sleep(0.5)
        run.supervisor.fail(Interrupted("ended by SIGINT"))

    with pytest.raises(Interrupted):
        Run(settings, tmp_path, [generator], trainer=disk, num_train=NUM_TRAIN).train(strike=interrupt)
    assert disk.saved[-1][0] == disk.version == 2
    audit(resumed(tmp_path, 0, 1, disk, 1001))


@pytest.mark.parametrize("waits_for", ["weights", "critic"])
def test_an_interrupted_run_waits_for_no_weights(tmp_path: Path, waits_for: str) -> None:
    """It is asked to end while it waits for slow generators, or a slow critic, with a step under way."""
    disk = Trainer(step_s=5.0)
    critic = Model(lambda rollout: np.zeros(rollout.num_tokens, np.float32), learn_s=50.0)
    generator = Generator(adopt_s=lambda version: 400.0 if version and waits_for == "weights" else 0.1)
    models = {"critic": critic} if waits_for == "critic" else {}
    run = Run(config(tmp_path, weight_sync={"patience_s": 500.0}), tmp_path, [generator], trainer=disk, models=models)

    async def interrupt(run: Run) -> None:
        while not disk.spans:
            await asyncio.sleep(1.0)
        await asyncio.sleep(2.0)
        run.supervisor.fail(Interrupted("ended by SIGINT"))

    with pytest.raises(Interrupted):
        run.train(strike=interrupt)
    assert [step for step, _ in disk.saved] == [disk.version] == [2]
    assert [row["step"] for row in run.steps] == [1, 2]
    assert [row["extra.value_loss"] for row in run.steps] == [1, 2] if models else run.wall_s < 20.0
    assert not run.complaints


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Each holds the state of its own step, and one is committed before the next is begun."""
    settings = config(tmp_path, steps=9, checkpoint={"every_steps": 2})
    quick = Run(settings, tmp_path).train()
    disk = Trainer(write_s=2.0)
    slow = Run(settings, tmp_path, trainer=disk).train()
    assert [version for version, _ in disk.saved] == [2, 4, 6, 8, 9]
    assert all(json.loads(state)["step"] == version for version, state in disk.saved)
    assert slow.wall_s - quick.wall_s < 2 * 2.0 + 1.0, "only the last one, and one before it, are waited for"
    (tmp_path / "slower").mkdir()
    slower = Trainer(write_s=30.0)
    run = Run(config(tmp_path, steps=40, checkpoint={"every_steps": 2}), tmp_path / "slower", trainer=slower).train()
    versions = [version for version, _ in slower.saved]
    assert versions[0] == 2 and versions[-1] == 40 and len(versions) == 3, "what is due meanwhile is put off"
    assert all(json.loads(state)["step"] == version for version, state in slower.saved)
    longest_s = max(row["step_s"] for row in run.steps)
    assert longest_s < 15.0, "the run waited for the disk"
    (said,) = run.warnings
    assert "a checkpoint is due while the previous one is still being written, so it comes later" in said


def test_a_full_disk_costs_a_warning_and_at_the_end_the_run(tmp_path: Path) -> None:
    disk = Trainer(write_s=0.3, disk_size=2)
    run = Run(config(tmp_path, steps=9, checkpoint={"every_steps": 2}), tmp_path, trainer=disk)
    with pytest.raises(NotSaved, match=r"no checkpoint at step 9: \[Errno 28\] No space left on device; free space"):
        run.train()
    assert [version for version, _ in disk.saved] == [2, 4]
    cause = "[Errno 28] No space left on device; free space on the disk, the run continues"
    assert run.warnings == [f"no checkpoint at step {step}: {cause}" for step in (6, 8)]
    assert not run.complaints


def test_a_finished_run_can_be_resumed_and_extended(tmp_path: Path) -> None:
    disk = Trainer()
    run = run_of(tmp_path, 1, 3, disk, 0)
    run.train()
    again = run_of(tmp_path, 1, 3, Trainer(version=NUM_STEPS, saved=disk.saved), 0)
    state = json.loads(disk.saved[-1][1])
    assert again.train(state).trainer.spans == []
    audit(again)


def test_the_death_of_the_last_generator_ends_the_run(tmp_path: Path) -> None:
    run = Run(config(tmp_path, steps=50, cluster={"on_failure": {"generator": "drop"}}), tmp_path)
    with pytest.raises(MeshFailed, match="generator-0"):
        run.train(strike=kills(("generator-0", 5.0)))
    assert not run.complaints


class Respawning(Run):
    """Generators start again, in two seconds."""

    def new_generators(self) -> dict[str, Any]:
        return {"spawn_generator": self.spawn, "free_generator_slots": lambda: 1}

    async def spawn(self, number: int) -> Generator:
        await asyncio.sleep(2.0)
        return self.added(f"generator-{number}", Generator())


@pytest.mark.parametrize(
    ("number", "deaths", "policy", "says"),
    [
        (1, 1, "respawn", r"its work \(\d unfinished groups?\) waits for a new generator, which starts"),
        (2, 1, "respawn", r"its work \(\d unfinished groups?\) goes to generator-1 and a new generator starts"),
        (2, 2, "respawn", r"its work \(\d unfinished groups?\) waits for a new generator, which starts"),
        (2, 1, "drop", r"its work \(\d unfinished groups?\) goes to generator-1 and 1 generator is left"),
        (3, 1, "drop", r"its work \(\d unfinished groups?\) goes to the others and 2 generators are left"),
    ],
)
def test_what_follows_a_generators_death_is_said(
    tmp_path: Path, number: int, deaths: int, policy: str, says: str
) -> None:
    """Also when no other is left."""
    settings = config(tmp_path, steps=12, cluster={"on_failure": {"generator": policy}})
    run = Respawning(settings, tmp_path, [Generator() for _ in range(number)])
    run.train(strike=kills(*((f"generator-{one}", 3.0 + one / 10) for one in range(deaths))))
    assert run.version == 12 and not run.complaints
    said = [text for text in run.warnings if "was killed" in text]
    assert len(said) == deaths
    assert re.fullmatch(rf"generator-{deaths - 1} \(rank 0\): was killed by SIGKILL; {says}", said[-1]), said


def test_supervisor_reports_the_first_failure_and_ends_the_others() -> None:
    ended = list[str]()

    async def wait(name: str) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(name)

    async def fail() -> None:
        await asyncio.sleep(1)
        raise ValueError("first")

    async def fail_later() -> None:
        await asyncio.sleep(2)
        raise ValueError("second")

    async def main() -> None:
        supervisor = Supervisor()
        for coroutine in (wait("background"), fail(), fail_later()):
            supervisor.start(coroutine, "one of three")
        try:
            await supervisor.run(wait("main"))
        finally:
            await supervisor.stop()
        raise AssertionError("the failure was lost")

    with pytest.raises(ValueError, match="first"):
        run_virtual(main())
    assert ended == ["main", "background"]


class BreaksAtOnce(Generator):
    """Cannot take over weights."""

    def do_adopt(self, version: int, slot: Any) -> tuple[float, Any]:
        raise RemoteError("generator-9", "adopt", "Traceback: no memory left")


@pytest.mark.parametrize("policy", ["stop", "drop"])
@pytest.mark.parametrize("how", ["raises", "dies", "dies as its transport is tried"])
def test_a_generator_that_joins_and_fails_before_it_serves_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, how: str
) -> None:
    """Whoever let it in hears of it, and the run goes on with the others."""
    heard = list[str]()

    async def tries(_: object, replicas: Sequence[Replica]) -> bool:
        if replicas[0].name == "generator-9":
            raise MeshFailed("generator-9", (0,), "was killed by SIGKILL")
        return False

    if how.endswith("tried"):
        monkeypatch.setattr(Transports, "choose", tries)

    async def strike(run: Run) -> None:
        await asyncio.sleep(1.3)
        late = BreaksAtOnce() if how == "raises" else Generator(adopt_s=1e6)
        joins = asyncio.ensure_future(run.add("generator-9", late))
        await asyncio.sleep(0.5)
        if how == "dies":
            run.handles["generator-9"].die()
        with pytest.raises((RemoteError, MeshFailed)) as caught:
            await asyncio.wait_for(joins, 60.0)
        heard.append(type(caught.value).__name__)
        assert [one.name for one in run.controller.replicas.alive] == ["generator-0"]

    run = Run(config(tmp_path, cluster={"on_failure": {"generator": policy}}), tmp_path).train(strike=strike)
    assert run.version == 6 and not run.complaints
    assert heard == ["RemoteError" if how == "raises" else "MeshFailed"]
