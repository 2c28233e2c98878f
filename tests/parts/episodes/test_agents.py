"""Episodes of agents, simulated: whatever they, generators and the gateway do, each token is learnt from once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.cluster.api import ExecutorError
from llamarl.controller.flight import Flight, RolloutState
from llamarl.controller.supervision import Stalled
from llamarl.parts.episodes.gateway.episode import AgentEpisode
from llamarl.parts.episodes.gateway.news import AgentCall, AgentEnd, AgentNews, AgentTask
from llamarl.rewards._base import right
from llamarl.types import OBSERVED, Rollout
from tests.controller.fakes import Run, config, kills
from tests.executors.ledger import Generator, Ledgered
from tests.nightly import examples

STEPS, TURN, SEGMENT = 5, 4, 3
"""Steps of a run, tokens that the policy writes per call, and those after which it is parked."""


def _checked(task: asyncio.Task[None]) -> None:
    assert task.cancelled() or not task.exception(), task.exception()


@dataclass(eq=False, repr=False)
class Gateway(Ledgered):
    """Runs agents that call `calls_of(group, index)` times, and step back now and then."""

    calls_of: Callable[[int, int], int] = lambda group_id, index: 1 + (group_id + index) % 3
    think_s: float = 0.1
    leaves_s: float | None = None
    """So long after a last call, which nobody waits for, episodes end."""
    left: list[int] = field(default_factory=list)
    """Ids of these calls."""

    def start(self, name: str) -> Self:
        self._news, self._answers = AgentNews([], []), dict[int, asyncio.Future[Rollout]]()
        self._agents, self._collecting = set[asyncio.Task[None]](), None
        return super().start(name)

    @property
    def begun(self) -> list[tuple[int, int, int]]:
        return [(task.group_id, task.index, task.attempt) for one in self.calls("submit") for task in one.args[0]]

    def _end(self, error: ExecutorError) -> None:
        super()._end(error)
        for agent in self._agents:
            agent.cancel()

    def do_submit(self, tasks: list[AgentTask]) -> tuple[float, Any]:
        for task in tasks:
            self._agents.add(agent := self._loop.create_task(self._act(task)))
            agent.add_done_callback(_checked)
        return 0.0, None

    def do_answer(self, rollouts: list[Rollout]) -> tuple[float, Any]:
        for rollout in rollouts:
            if answer := self._answers.pop(rollout.group_id, None):  # else a gateway before this one asked
                answer.set_result(rollout)
        return 0.0, None

    def do_collect(self) -> tuple[float, Any]:
        self._collecting = collecting = self._loop.create_future()
        if self._news.calls or self._news.ends:
            self._hand_over()
        return 0.0, collecting

    def _hand_over(self) -> None:
        if self._collecting:
            self._collecting.set_result(self._news)
            self._news, self._collecting = AgentNews([], []), None

    async def _act(self, task: AgentTask) -> None:
        name = f"{task.group_id}/{task.index}/{task.attempt}"
        episode = AgentEpisode(name=name, sampling=task.sampling, segment_tokens=SEGMENT)
        history = [1, 2]
        for number in range(self.calls_of(task.group_id, task.index)):
            await asyncio.sleep(self.think_s)
            prompt_T = np.array([*history, 50 + number], np.int32)
            request = episode.request(prompt_T, task.sampling, self._answers)
            answer = self._answers[request.group_id] = asyncio.get_running_loop().create_future()
            self._news.calls.append(AgentCall(task.group_id, task.index, request))
            self._hand_over()
            rollout = episode.answered(request, prompt_T, await answer)
            assert rollout.num_tokens == TURN
            episode.session.record(prompt_T, rollout.columns)
            if number != 1:  # one answer in three is forgotten
                history = [*prompt_T.tolist(), *rollout.token_ids_T.tolist()]
        if self.leaves_s is not None:
            request = episode.request(np.array([9], np.int32), task.sampling, self._answers)
            self.left.append(request.group_id)
            self._news.calls.append(AgentCall(task.group_id, task.index, request))
            if self.leaves_s:
                self._hand_over()
                await asyncio.sleep(self.leaves_s)
        columns, reason = episode.session.columns(), episode.reason
        whole = Rollout(group_id=task.group_id, index=task.index, columns=columns, finish_reason=reason)
        self._news.ends.append(AgentEnd(whole, right(2.0 + task.index)))
        self._hand_over()


def run_of(tmp_path: Path, gateway: Gateway, *, staleness: int = 1, generators: int = 1, **more: Any) -> Run:
    for file in tmp_path.glob("*.jsonl"):
        file.unlink()
    rollout = {"max_staleness": staleness, "agent": "nowhere:run", "segment_tokens": SEGMENT}
    cluster = {"on_failure": {"generator": "drop"}, "max_restarts": 99}
    more = {"reward": {"parts": ["gsm8k"]}} | more
    wanted = config(tmp_path, steps=STEPS, rollout=rollout, cluster=cluster, **more)
    run = Run(
        wanted,
        tmp_path,
        [Generator(turn_tokens=TURN, token_s=0.25) for _ in range(generators)],
        models={"environment": gateway},
    )
    run.start_s = 1.0
    return run


def audit(run: Run) -> None:
    gateway = run.models["environment"]
    assert [row["step"] for row in run.steps] == list(range(1, STEPS + 1))
    keys = [(row["group_id"], row["index"]) for row in run.rollouts]
    assert len(set(keys)) == len(keys) == 4 * STEPS
    for row in run.rollouts:
        versions = [version for version, count in row["policy_versions"] for _ in range(count)]
        calls = gateway.calls_of(row["group_id"], row["index"])
        sampled = [token for token, version in zip(row["token_ids"], versions, strict=True) if version != OBSERVED]
        assert len(sampled) == len(set(sampled)) == TURN * calls
        assert set(row["sequence"]) == ({0, 1} if calls > 2 else {0})
        assert row["reward"] == 2.0 + row["index"] and row["turns"] == calls
    assert max(row["staleness"] for row in run.rollouts) <= run.steps[0]["staleness_limit"]
    assert run.steps[-1]["extra.turns_mean"] > 1 and not run.complaints


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from([0, 1, 2]),
    st.sampled_from([0.0, 0.1, 3.0]),
    st.lists(st.tuples(st.sampled_from(["environment", "generator-1", "trainer", "reward"]), st.floats(0.1, 20)),
             max_size=3),
)  # fmt: skip
def test_episodes_survive_deaths(
    tmp_path_factory: pytest.TempPathFactory, staleness: int, think_s: float, deaths: list[tuple[str, float]]
) -> None:
    run = run_of(tmp_path_factory.mktemp("agents"), Gateway(think_s=think_s), staleness=staleness, generators=2)
    audit(run.train(strike=kills(*deaths)))


def test_what_a_conversation_has_computed_is_held_until_it_ends(tmp_path: Path) -> None:
    run = run_of(tmp_path, Gateway()).train()
    audit(run)
    assert not run.generators[0].held, "released when the episode ended"


@pytest.mark.parametrize("leaves_s", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("dies", [False, True])
def test_calls_of_episodes_that_are_over_end_with_them(tmp_path: Path, leaves_s: float, dies: bool) -> None:
    run, flights = run_of(tmp_path, gateway := Gateway(leaves_s=leaves_s), generators=2), list[Flight]()

    async def strike(run: Run) -> None:
        flights.append(run.controller.flight)
        await asyncio.sleep(4.0)
        if dies:
            run.handles["generator-1"].die()

    audit(run.train(strike=strike))
    sampled = [key for generator in run.generators for key in generator.sampled if key[0] in gateway.left]
    assert len(gateway.left) >= 4 * STEPS and bool(sampled) == bool(leaves_s)
    if leaves_s < 1:
        assert all(position < 2 for _, _, position in sampled), "a token takes 0.25 s, and a segment three of them"
    left = [row for state in RolloutState for row in flights[0].in_state(state)]
    assert not left, "nothing is remembered of what has come back"


def test_a_gateway_that_dies_costs_the_episodes_under_way(tmp_path: Path) -> None:
    run = run_of(tmp_path, Gateway(think_s=1.0))
    audit(run.train(strike=kills(("environment", 4.0))))
    again = [key for key in run.models["environment"].begun if key[2]]
    assert again and len({key[:2] for key in again}) == len(again)


def test_a_stall_names_the_agents(tmp_path: Path) -> None:
    with pytest.raises(
        Stalled, match=r"8 episodes of agents are under way, 0 wait for the policy, .* silent for (599|60\d) s"
    ):
        run_of(tmp_path, Gateway(think_s=1e6)).train()
