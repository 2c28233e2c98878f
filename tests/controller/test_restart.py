"""Executors that die at any moment and are started again, simulated."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamarl.cluster.api import CallTimeout, ExecutorError, ExecutorHandle, HostFailed, MeshFailed, RemoteError
from llamarl.config import ConfigError
from llamarl.config.cluster import ClusterConfig
from llamarl.controller import restart
from llamarl.controller.restart import RestartableHandle, RestartBudget, TooManyRestarts
from llamarl.controller.supervision import Supervisor
from llamarl.controller.train_loop import StepsLost
from llamarl.observability.spans import AWAY, now_s
from tests.controller.fakes import Run, Strike, config, kills
from tests.executors.ledger import Generator, Ledgered, Model, Trainer, logprobs, values
from tests.nightly import crossed, examples, some

STEPS = 8


def run_of(
    tmp_path: Path, *, every_steps: int = 3, staleness: int = 1, mirror: bool = False, max_restarts: int = 99
) -> Run:
    """With a generator, reference and critic, all of which come back after a second."""
    for file in tmp_path.glob("*.jsonl"):
        file.unlink()
    wanted = config(
        tmp_path, steps=STEPS, checkpoint={"every_steps": every_steps},
        rollout={"max_staleness": staleness, "window": 1 + staleness}, cluster={"max_restarts": max_restarts},
    )  # fmt: skip
    models = {"critic": Model(values), "reference": Model(logprobs)}
    generator = Generator(duration_s=lambda group_id, index: 0.3 + (group_id * 7 + index * 3) % 5 / 4, token_s=0.05)
    run = Run(wanted, tmp_path, [generator], trainer=Trainer(mirror={} if mirror else None), models=models)
    run.start_s = 1.0
    return run


def audit(run: Run) -> None:
    """What was learnt is what is on record: each group once, in the steps that say so, by trainer and critic."""
    assert [row["step"] for row in run.steps] == list(range(1, STEPS + 1))
    keys = Counter((row["group_id"], row["index"]) for row in run.rollouts)
    assert set(keys.values()) == {1} and len(keys) == 4 * STEPS
    by_step = [[row["group_id"] for row in run.rollouts if row["step"] == step and not row["index"]]
               for step in range(1, STEPS + 1)]  # fmt: skip
    assert run.trainer.learnt == by_step
    assert run.models["critic"].taught == by_step
    assert len(set(run.generators[0].sampled)) == len(run.generators[0].sampled), "nothing is generated twice"
    assert max(row["staleness"] for row in run.rollouts) <= run.steps[0]["staleness_limit"]
    assert all(name == steps for name, steps in run.trainer.published), "each version means its weights"
    assert not run.complaints


@pytest.mark.parametrize(("name", "staleness"), some(crossed(["trainer", "critic", "reward", "reference"], [0, 2]), 2))
def test_a_death_at_any_moment_changes_nothing_but_the_time(tmp_path: Path, name: str, staleness: int) -> None:
    whole = run_of(tmp_path, staleness=staleness).train()
    learnt = whole.trainer.learnt
    num_lives = 0
    for tenth in range(2, int(10 * whole.wall_s), 11):
        run = run_of(tmp_path, staleness=staleness).train(strike=kills((name, tenth / 10)))
        audit(run)
        assert staleness or run.trainer.learnt == learnt
        assert run.wall_s < whole.wall_s + 8.0
        num_lives += run.lives[name]
        if run.lives[name]:
            assert run.warnings[0] == f"{name} (rank 0): was killed by SIGKILL; it is started again"
            assert run.warnings[1].startswith(f"{name} continues")
    assert num_lives > 3


@settings(max_examples=examples(25), deadline=None)
@example([("trainer", 4.25), ("critic", 5.0)], 1, 2, False)  # while the trainer comes back
@example([("trainer", 4.0), ("critic", 5.0)], 1, 2, False)
@given(
    st.lists(st.tuples(st.sampled_from(["trainer", "critic", "reward", "reference"]), st.floats(0.1, 12)), max_size=5),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0, 2, 3]),
    st.booleans(),
)
def test_several_deaths(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[tuple[str, float]], staleness: int, every: int, mirror: bool
) -> None:
    """Also of those that have just come back, and of some that restore others."""
    folder = tmp_path_factory.getbasetemp()
    run = run_of(folder, every_steps=every, staleness=staleness, mirror=mirror)
    audit(run.train(strike=kills(*deaths)))


def test_with_a_mirror_a_step_at_most_is_taken_again(tmp_path: Path) -> None:
    again = []
    for tenth in range(30, 90, 7):
        run = run_of(tmp_path, every_steps=0, mirror=True).train(strike=kills(("trainer", tenth / 10)))
        audit(run)
        again += [line for line in run.warnings if line.startswith("trainer continues")]
    assert len(again) > 5
    assert all(line.endswith((", 0 steps were trained again", ", 1 steps were trained again")) for line in again)


def test_generators_go_on_while_the_trainer_is_gone(tmp_path: Path) -> None:
    run = run_of(tmp_path, staleness=2)
    run.start_s = 20.0
    run.train(strike=kills(("trainer", 4.0)))
    audit(run)
    assert any(4.0 < end_s < 20.0 for _, end_s in run.generators[0].spans), "no rollout ended meanwhile"


def test_what_nobody_has_fetched_yet_is_published_again(tmp_path: Path) -> None:
    """A fetch fails as the trainer dies; nothing else is to be published before somebody has these weights."""

    def of() -> Run:
        run = run_of(tmp_path, staleness=0)
        run.generators[0].adopt_s = 1.0
        return run

    whole = of().train()
    run = of()
    run.generators[0].outcomes = ["adopted", "adopted", "failed"]  # versions 0, 1 and 2
    died_s = next(end_s for end_s, version in whole.generators[0].adopted if version == 2) - 0.5
    run.train(strike=kills(("trainer", died_s)))
    audit(run)
    assert run.lives["trainer"] == 1 and run.trainer.learnt == whole.trainer.learnt
    assert next(end_s for end_s, version in run.generators[0].adopted if version == 2) > died_s + run.start_s


def hangs(name: str, at_s: float) -> Strike:
    """Stopped, as by SIGSTOP."""

    async def strike(run: Run) -> None:
        await asyncio.sleep(at_s)
        run.handles[name].freeze()

    return strike


@pytest.mark.parametrize("name", ["trainer", "critic", "reward"])
def test_one_that_does_not_answer_is_replaced_after_its_deadline(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path)
    run.config = run.config.model_copy(update={"cluster": run.config.cluster.model_copy(update={"timeout_s": 15.0})})
    run.train(strike=hangs(name, 3.1))
    audit(run)
    assert f"{name}." in run.warnings[0] and "had no answer after 15 s" in run.warnings[0]
    assert run.lives[name] == 1 and 15.0 < run.wall_s < 45.0


def test_a_generator_that_does_not_answer_counts_as_dead(tmp_path: Path) -> None:
    """After its deadline; before that the others take over what it has to do."""
    wanted = config(tmp_path, steps=40, cluster={"on_failure": {"generator": "drop"}, "timeout_s": 15.0})
    run = Run(wanted, tmp_path, [Generator(), Generator()]).train(strike=hangs("generator-1", 3.1))
    assert [row["step"] for row in run.steps] == list(range(1, 41)) and not run.complaints
    (said,) = (line for line in run.warnings if "is left" in line)
    assert said.startswith("generator-1 (rank 0): generator-1.") and "had no answer after 15 s" in said


def test_lost_ranks_are_a_death_and_a_bug_is_none(tmp_path: Path) -> None:
    """Both come as the answer of a call."""

    def raises(error: ExecutorError) -> Strike:
        async def strike(run: Run) -> None:
            await asyncio.sleep(3.0)

            def broken(*args: object) -> None:
                raise error

            run.handles["trainer"].do_step = broken

        return strike

    run = run_of(tmp_path)
    audit(run.train(strike=raises(MeshFailed("trainer", (1,), "rank 1 waits for rank 0 in mesh.py:12"))))
    assert run.warnings[0] == "trainer (rank 1): rank 1 waits for rank 0 in mesh.py:12; it is started again"
    run = run_of(tmp_path)
    with pytest.raises(RemoteError, match="in rank 1\nTraceback: boom"):
        run.train(strike=raises(RemoteError("trainer", "step", "Traceback: boom", 1)))
    assert not run.lives["trainer"]


@pytest.mark.parametrize("name", ["trainer", "reward"])
def test_too_many_deaths_end_the_run_with_all_their_causes(tmp_path: Path, name: str) -> None:
    deaths = [("critic", 1.0), *((name, 2.0 + 3 * n) for n in range(4))]
    run = run_of(tmp_path, max_restarts=2)
    with pytest.raises(TooManyRestarts) as caught:
        run.train(strike=kills(*deaths))
    text = str(caught.value)
    assert (
        f"{name.removesuffix('-0')} died 3 times within 600 s and is not restarted again (cluster.max_restarts = 2)"
        in text
    )
    assert text.count(f"{name}: was killed by SIGKILL") == 3 and "critic: was killed" in text
    assert not run.complaints


def test_who_is_to_stop_the_run_does(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    stop = run.config.cluster.model_copy(update={"on_failure": run.config.cluster.on_failure.model_copy(
        update={"reference": "stop"})})  # fmt: skip
    run.config = run.config.model_copy(update={"cluster": stop})
    with pytest.raises(MeshFailed, match="reference"):
        run.train(strike=kills(("reference", 3.0)))


@pytest.mark.parametrize("mirror", [False, True])
def test_a_lost_host_is_a_death_unless_there_is_no_place_any_more(tmp_path: Path, mirror: bool) -> None:
    """Whatever ran there."""

    def loses(name: str) -> Strike:
        async def strike(run: Run) -> None:
            await asyncio.sleep(3.0)
            run.handles[name].die(HostFailed(name, (0,), "host a is lost"))

        return strike

    async def refuses(name: str) -> Ledgered:
        raise ConfigError("1 hosts are left, and the run needs 2")

    for name in ("trainer", "critic", "reward"):
        audit(run_of(tmp_path, mirror=mirror).train(strike=loses(name)))
        run = run_of(tmp_path)
        run._again = refuses
        with pytest.raises(HostFailed, match="host a is lost; 1 hosts are left, and the run needs 2"):
            run.train(strike=loses(name))


def test_steps_that_are_nowhere_are_not_taken_as_if_they_were(tmp_path: Path) -> None:
    """The newest checkpoint is damaged, so that a new trainer finds an older one than the run has kept groups for."""

    async def strike(run: Run) -> None:
        while len(run.trainer.saved) < 2:
            await asyncio.sleep(0.1)
        run.trainer.weights.clear()
        run.handles["trainer"].die()

    with pytest.raises(StepsLost, match="a new trainer begins at step 0, and steps 1 to 6 cannot be trained again"):
        run_of(tmp_path).train(strike=strike)


class Hearing(Ledgered):
    """Keeps the order of its calls."""

    def do_hear(self, number: int) -> tuple[float, None]:
        return 0.0, None

    @property
    def heard(self) -> list[int]:
        return [one.args[0] for one in self.ledger]


async def hearer(supervisor: Supervisor) -> tuple[RestartableHandle, list[Hearing], list[str]]:
    """An executor that comes back after a second, its lives, and what the user is told of them."""
    lives, told = [Hearing().start("reward")], list[str]()

    async def again(name: str) -> Hearing:
        await asyncio.sleep(1.0)
        lives.append(Hearing().start(name))
        return lives[-1]

    deaths = RestartBudget(ClusterConfig(), 1, told.append)
    return RestartableHandle(lives[0], again, supervisor, deaths), lives, told


def test_a_new_life_says_where_it_is_and_how_long_there_was_none() -> None:
    async def main() -> None:
        one, lives, told = await hearer(supervisor := Supervisor())
        before_s = now_s()
        await one.status_each(1.0)
        heard_s = now_s()
        await asyncio.sleep(0.2)
        spawn = one._spawn

        async def elsewhere(name: str) -> ExecutorHandle:
            life = await spawn(name)
            life.hosts = ("host-c", "host-d")
            return life

        one._spawn = elsewhere
        lives[0].die()
        await one.call("hear", 1, timeout_s=240.0)
        assert told[-1] == "reward continues, on host-c, host-d"
        (status,) = await one.status_each(1.0)
        (away,) = [span for span in status.spans if span.name == AWAY]
        assert before_s <= away.start_s <= heard_s and 1.2 < away.end_s - away.start_s <= now_s() - before_s
        assert not [span for span in (await one.status_each(1.0))[0].spans if span.name == AWAY], "once"
        await supervisor.stop()

    asyncio.run(main())


def test_calls_are_asked_again_in_their_order_ahead_of_new_ones() -> None:
    """Also where a caller has gone meanwhile."""

    async def main() -> None:
        one, lives, told = await hearer(supervisor := Supervisor())
        lives[0].die()
        callers = [asyncio.create_task(one.call("hear", n, timeout_s=240.0)) for n in range(4)]
        await asyncio.sleep(0.5)
        callers[2].cancel()
        while "reward continues" not in told:  # beside the loop that brings it back
            await asyncio.sleep(0)
        await one.call("hear", 9, timeout_s=240.0)
        await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 240.0)
        assert lives[1].heard == [0, 1, 3, 9]
        await supervisor.stop()

    asyncio.run(main())


def test_a_call_brings_the_result_of_rank_0_alone_unless_each_is_asked() -> None:
    class Ranks(Hearing):
        async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
            return "rank 0's"

        async def call_each(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
            return ["each"] * 3

    async def main() -> None:
        one, *_ = await hearer(supervisor := Supervisor())
        one._use(Ranks().start("reward"))
        assert await one.call("hear", 1, timeout_s=240.0) == "rank 0's"
        assert await one.call_each("hear", 1, timeout_s=240.0) == ["each"] * 3
        await supervisor.stop()

    asyncio.run(main())


def test_a_caller_that_goes_as_the_executor_comes_back() -> None:
    async def main() -> None:
        one, lives, _ = await hearer(supervisor := Supervisor())
        caller = list[asyncio.Task[None]]()

        async def restore(life: ExecutorHandle) -> str:
            caller[0].cancel()
            return "nothing"

        one.restore = restore
        lives[0].die()
        caller += [asyncio.create_task(one.call("hear", n, timeout_s=240.0)) for n in range(2)]
        await asyncio.wait_for(caller[1], 240.0)
        assert lives[1].heard == [1]
        await supervisor.stop()

    asyncio.run(main())


def test_a_critic_that_dies_before_it_saves_saves_the_step_that_is_due(tmp_path: Path) -> None:
    """The next step begins while it is gone."""
    run = run_of(tmp_path, every_steps=3, staleness=2)
    generator, run.start_s = run.generators[0], 8.0
    generator.duration_s = lambda group_id, index: 0.1  # whose groups are ready for step 4
    generator.adopt_s = 1.0  # which step 3 waits for before it is saved

    async def strike(run: Run) -> None:
        critic, reference = run.handles["critic"], run.handles["reference"]
        assert isinstance(critic, Model) and isinstance(reference, Model)
        while len(critic.learnt) < 3 or min(len(critic.asked), len(reference.asked)) < 8:
            await asyncio.sleep(0.01)
        critic.die()

    audit(run.train(strike=strike))
    assert run.lives["critic"] == 1 and 3 in run.models["critic"].weights


def test_deaths_long_ago_and_those_of_hosts_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "RESTART_WINDOW_S", 0.2)

    async def main() -> None:
        deaths = RestartBudget(ClusterConfig(max_restarts=1), 1, lambda text: None)
        for _ in range(3):
            deaths.count(MeshFailed("reward", (0,), "boom"))
            deaths.count(HostFailed("reward", (0,), "host a is lost"))
            await asyncio.sleep(0.25)
        deaths.count(MeshFailed("reward", (0,), "boom"))
        with pytest.raises(TooManyRestarts, match=r"died 2 times within 0\.2 s"):
            deaths.count(MeshFailed("reward", (0,), "boom"))
        several = RestartBudget(ClusterConfig(max_restarts=1), 2, lambda text: None)
        for n in range(2):
            several.count(MeshFailed(f"generator-{n}", (0,), "boom"))
        with pytest.raises(TooManyRestarts, match="generator died 3 times"):
            several.count(MeshFailed("generator-7", (0,), "boom"))

    asyncio.run(main())


def test_a_start_that_fails_is_tried_again(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    starts = run._again
    failures: list[Exception] = [CallTimeout("reward", "start", 1.0, "is in start"), MeshFailed("reward", (0,), "boom")]

    async def again(name: str):
        if failures:
            raise failures.pop(0)
        return await starts(name)

    run._again = again
    audit(run.train(strike=kills(("reward", 3.0))))
    assert not failures and sum("it is started again" in line for line in run.warnings) == 3
