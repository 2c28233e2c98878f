"""Episodes over simulated executors: rollouts of several turns, whatever their environment and the generators do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.executors.replies import Replied
from llamarl.parts.episodes.ports import OpenTurn
from llamarl.rewards._base import invalid, right
from llamarl.types import OBSERVED, RAISED
from tests.controller.fakes import Run, config, held_out, kills, prompts
from tests.controller.test_keeping import Killed, killed, newest
from tests.executors.ledger import Generator, Ledgered, Trainer
from tests.journals import journal_of
from tests.nightly import examples, nightly

STEPS, TURN, TURNS = 6, 2, 3
"""Tokens that the policy writes per turn, and its turns per episode."""


def observation(group_id: int, index: int, turn: int) -> list[int]:
    """What the environment answers: some tokens, depending on the episode alone."""
    return [50_000 + (group_id * 31 + index * 7 + turn) % 1000] * (1 + (group_id + index + turn) % 3)


@dataclass(eq=False, repr=False)
class World(Ledgered):
    """An environment that answers `TURNS - 1` times, each episode by itself."""

    reply_s: Callable[[int, int], float] = lambda group_id, index: 0.1
    ends: Callable[[int, int], Any] = lambda group_id, index: None
    """The result of an episode; None: the reward judges."""
    calls_of_tools: tuple[int, int] = (0, 0)
    """In each turn, and errors."""
    turn_reward: float = 0.0
    """Of each turn but the last."""
    asked: list[tuple[int, int, int]] = field(default_factory=list)
    over: list[tuple[int, int]] = field(default_factory=list)
    """Episodes that it has judged after they ended by length."""

    def start(self, name: str) -> Self:
        self._replies, self._collecting = list[Replied](), None
        return super().start(name)

    def do_submit(self, episodes: list[OpenTurn]) -> tuple[float, Any]:
        for episode in episodes:
            self._loop.call_later(self.reply_s(episode.group_id, episode.index), self._reply, episode)
        return 0.0, None

    def _reply(self, episode: OpenTurn) -> None:
        key = episode.group_id, episode.index
        turn = sum(is_sampled for is_sampled, _ in episode.turns)
        self.asked.append((*key, turn))
        if episode.is_over:
            self.over.append(key)
            num_tokens = sum(len(part) for _, part in episode.turns)
            self._replies.append(Replied(*key, num_tokens, None, right(3.0), 0.0))
            self._hand_over()
            return
        assert all(len(part) == TURN for is_sampled, part in episode.turns if is_sampled)
        seen = [part.tolist() for is_sampled, part in episode.turns if not is_sampled]
        assert seen == [observation(*key, n + 1) for n in range(turn - 1)], "the history is not what was said"
        goes_on = turn < TURNS
        observed_T = np.array(observation(*key, turn), np.int32) if goes_on else None
        result, num_tokens = None if goes_on else self.ends(*key), sum(len(part) for _, part in episode.turns)
        took = self.reply_s(*key), self.calls_of_tools, self.turn_reward if goes_on else 0.0
        self._replies.append(Replied(*key, num_tokens, observed_T, result, *took))
        self._hand_over()

    def do_collect(self) -> tuple[float, Any]:
        self._collecting = collecting = self._loop.create_future()
        self._hand_over()
        return 0.0, collecting

    def _hand_over(self) -> None:
        if self._collecting and self._replies:
            self._collecting.set_result(self._replies)
            self._replies, self._collecting = [], None


def run_of(
    tmp_path: Path, world: World, *, staleness: int = 1, segment: int = 0, generators: int = 1, clean: bool = True,
    **more: Any,
) -> Run:  # fmt: skip
    for file in tmp_path.glob("*.jsonl") if clean else ():
        file.unlink()
    environment = {"name": "calculator"} | more.pop("environment", {})
    rollout = {"max_staleness": staleness, "environment": environment, "segment_tokens": segment}
    cluster = {"on_failure": {"generator": "drop"}, "max_restarts": 99}
    wanted = config(tmp_path, steps=STEPS, rollout=rollout, cluster=cluster, checkpoint={"every_steps": 2}, **more)
    run = Run(
        wanted,
        tmp_path,
        [Generator(turn_tokens=TURN, token_s=0.5) for _ in range(generators)],
        models={"environment": world},
    )
    run.start_s = 1.0
    return run


def audit(run: Run) -> None:
    """Every episode has its turns, every token is marked by who wrote it, and each was sampled once."""
    assert [row["step"] for row in run.steps] == list(range(1, STEPS + 1))
    keys = [(row["group_id"], row["index"]) for row in run.rollouts]
    assert len(set(keys)) == len(keys) == 4 * STEPS
    for row in run.rollouts:
        key, at = (row["group_id"], row["index"]), 0
        assert row["turns"] == TURNS and row["finish_reason"] == "stop"
        written = iter(row["token_ids"])
        versions = [version for version, count in row["policy_versions"] for _ in range(count)]
        for turn in range(1, TURNS + 1):
            assert all(version != OBSERVED for version in versions[at : at + TURN])
            [next(written) for _ in range(TURN)]
            at += TURN
            said = observation(*key, turn) if turn < TURNS else []
            assert [next(written) for _ in said] == said
            assert versions[at : at + len(said)] == [OBSERVED] * len(said)
            assert row["behavior_logprobs"][at : at + len(said)] == [0.0] * len(said)
            at += len(said)
        assert at == len(row["token_ids"]) == len(versions)
        said = [len(observation(*key, turn)) for turn in range(1, TURNS)]
        assert row["turn_tokens"] == [[TURN, "policy"], [said[0], "environment"], [TURN, "policy"],
                                      [said[1], "environment"], [TURN, "policy"]]  # fmt: skip
    assert max(row["staleness"] for row in run.rollouts) <= run.steps[0]["staleness_limit"]
    assert run.steps[-1]["extra.turns_mean"] == TURNS and 0 < run.steps[-1]["extra.observed_share"] < 1
    assert not run.complaints


@settings(max_examples=examples(25), deadline=None)
@given(
    st.sampled_from([0, 1, 2]),
    st.sampled_from([0, 1]),
    st.sampled_from([0.0, 0.1, 3.0]),
    st.lists(st.tuples(st.sampled_from(["environment", "generator-1", "trainer", "reward"]), st.floats(0.1, 20)),
             max_size=3),
)  # fmt: skip
def test_whatever_dies(
    tmp_path_factory: pytest.TempPathFactory, staleness: int, segment: int, spread_s: float,
    deaths: list[tuple[str, float]],
) -> None:  # fmt: skip
    world = World(reply_s=lambda group_id, index: 0.05 + spread_s * ((group_id * 5 + index * 3) % 7) / 7)
    run = run_of(tmp_path_factory.getbasetemp(), world, staleness=staleness, segment=segment, generators=2)

    audit(run.train(strike=kills(*deaths)))


def test_what_the_environment_did_is_on_record(tmp_path: Path) -> None:
    """Seconds of each episode, calls of tools, and what those who do nothing wait for."""
    run = run_of(tmp_path, World(reply_s=lambda group_id, index: 0.25, calls_of_tools=(2, 1)), staleness=0).train()
    audit(run)
    assert {row["environment_s"] for row in run.rollouts} == {0.25 * TURNS}
    for row in run.steps:
        assert (row["extra.tool_calls"], row["extra.tool_errors"]) == (2 * 4 * TURNS, 4 * TURNS)
        assert row["extra.environment_wait_s"] > 0.24 * 4 * TURNS


def test_an_episode_stays_where_it_was_computed(tmp_path: Path) -> None:
    """And what has ended is held nowhere."""
    run = run_of(tmp_path, World(), generators=3, staleness=2).train()
    audit(run)
    places = [{key[:2] for key in generator.sampled} for generator in run.generators]
    assert all(len(one) > 4 for one in places)
    trained = {(row["group_id"], row["index"]) for row in run.rollouts}
    assert not any(places[n] & places[m] & trained for n in range(3) for m in range(n))
    assert not any(generator.held & trained for generator in run.generators)


class Queueing(World):
    """It answers one after the other."""

    def do_submit(self, episodes: list[OpenTurn]) -> tuple[float, Any]:
        for episode in episodes:
            self._free_at_s = max(getattr(self, "_free_at_s", 0.0), self._loop.time()) + self.reply_s(0, 0)
            self._loop.call_at(self._free_at_s, self._reply, episode)
        return 0.0, None


def test_a_turn_that_is_asked_for_twice_is_answered_once(tmp_path: Path) -> None:
    """Turns that came while the environment was dead; the second reply comes when the episode waits for the next."""
    for tenth in range(12, 60, 6):
        run = run_of(tmp_path, Queueing(reply_s=lambda *_: 0.4), staleness=2)
        audit(run.train(strike=kills(("environment", tenth / 10))))


@nightly("a controller that is killed; controller/test_keeping.py goes on after one by day")
@pytest.mark.parametrize("segment", [0, 1])
def test_a_controller_that_is_killed_goes_on_with_its_turns(tmp_path: Path, segment: int) -> None:
    """Those that wait for a reply are asked for again; those that go on after one keep it; none is sampled twice."""
    kept, states = 0, set[str]()
    for tenth in range(8, 120, 16):
        folder, disk = tmp_path / f"{tenth}", Trainer()
        folder.mkdir()

        def begun(trainer: Trainer, folder: Path = folder) -> Run:
            world = World(reply_s=lambda group, index: 0.05 + (group * 5 + index * 3) % 7 / 4)
            run = run_of(folder, world, segment=segment, clean=False)
            run.folder, run.trainer = folder, trainer
            return run

        with pytest.raises(Killed):
            begun(disk).train(strike=killed(tenth / 10))
        version, state = newest(disk)
        journal = journal_of(folder, prompts=prompts(1000), saved=[step for step, _ in disk.saved])
        journal.resume(json.loads(state))
        held = [one for group_id in range(99) for one in journal.pop_generated(group_id)[1].values()]
        journal.close()
        states |= {f"{one.finish_reason} after {len(one.turns)}" for one in held}
        run = begun(Trainer(version=version, saved=disk.saved)).train(json.loads(state))
        audit(run)
        known = {(one.group_id, one.index, n) for one in held for n in range(one.num_tokens)}
        assert known.isdisjoint(run.generators[0].sampled)
        kept += len(known)
    assert kept > 50 and states >= {"stop after 1", "stop after 3"}
    assert not segment or states >= {"parked after 1", "parked after 3"}


def test_an_evaluation_is_of_the_versions_that_sampled_it(tmp_path: Path) -> None:
    data = {"train": "jsonl", "eval": "jsonl"}
    run = run_of(tmp_path, World(), data=data, eval={"every_steps": 2, "samples": 2})
    run.problems = replace(run.problems, eval=held_out(run.config, 2))
    audit(run.train())
    assert len(run.evals) >= 2 and all(row["policy_version_min"] >= 0 for row in run.evals)


def test_a_slow_episode_holds_up_nobody_else_s_group(tmp_path: Path) -> None:
    """Nor does it keep a place at the generator: its siblings and all other groups go on."""
    world = World(reply_s=lambda group_id, index: 30.0 if (group_id, index) == (0, 0) else 0.1)
    run = run_of(tmp_path, world, staleness=3)
    running = list[float]()

    async def strike(run: Run) -> None:
        await asyncio.sleep(25.0)
        running.append(run.generators[0].num_running)

    audit(run.train(strike=strike))
    assert running == [0], "whoever waits for a reply does not decode"
    others = [turn for turn in world.asked if turn[0] != 0]
    assert len([turn for turn in world.asked[:30] if turn in others]) > 20


def test_what_the_environment_says_of_an_episode_counts(tmp_path: Path) -> None:
    """In place of the reward: a score, or that it could not be judged."""
    world = World(ends=lambda group_id, index: right(7.0) if index else invalid("it crashed"))
    run = run_of(tmp_path, world, reward={"max_invalid_share": 1.0}).train()
    for row in run.rollouts:
        expected = ("score", 7.0, "") if row["index"] else ("invalid", 0.0, "it crashed")
        assert (row["outcome"], row["reward"], row["reason"]) == expected
    assert run.steps[-1]["invalid_share"] == 0.5


def test_turns_have_rewards_of_their_own(tmp_path: Path) -> None:
    """Beside the end's, and none where the episode cannot be judged."""
    world = World(ends=lambda group_id, index: right(7.0) if index else invalid("it crashed"), turn_reward=0.25)
    run = run_of(tmp_path, world, segment=1, reward={"max_invalid_share": 1.0}).train()
    for row in run.rollouts:
        assert row["reward"] == (7.0 + (TURNS - 1) * 0.25 if row["index"] else 0.0)
        rewards_T = np.array(row["turn_rewards"])
        ends = np.cumsum([count for count, _ in row["turn_tokens"]]) - 1
        assert rewards_T[ends].tolist() == [0.25, 0, 0.25, 0, 0] and rewards_T.sum() == (TURNS - 1) * 0.25


def test_replies_that_raise_are_counted_and_told_once(tmp_path: Path) -> None:
    """A policy that makes them raise is never scored 0."""
    world = World(ends=lambda group_id, index: right(7.0) if index else invalid(f"{RAISED}ValueError: abc"))
    run = run_of(tmp_path, world, reward={"max_invalid_share": 1.0}).train()
    assert [row["extra.replies_raised"] for row in run.steps] == [2] * STEPS
    (said,) = run.warnings
    assert "2 replies of step 1 raised" in said and said.endswith("The first: environment: ValueError: abc")


def test_lengths_are_of_what_was_sampled(tmp_path: Path) -> None:
    """A talkative environment is no longer policy."""
    run = run_of(tmp_path, World()).train()
    for row in run.steps:
        sampled = [[count for count, who in of["turn_tokens"] if who == "policy"] for of in run.rollouts]
        assert row["response_tokens_mean"] == row["response_tokens_max"] == sum(sampled[0]) == TURNS * TURN
        assert row["extra.observed_tokens_mean"] > 0


@pytest.mark.parametrize(("limit", "turns"), [({"max_turns": 2}, 2), ({}, 1)])
def test_limits_end_an_episode_as_too_long(tmp_path: Path, limit: dict[str, int], turns: int) -> None:
    """By turns, or by tokens, of which the observation would have left none."""
    run = run_of(tmp_path, World(), environment=limit)
    if turns == 1:
        sampling = run.config.rollout.model_copy(update={"max_new_tokens": TURN + 1})
        run.config = run.config.model_copy(update={"rollout": sampling})
    run.train()
    assert {row["finish_reason"] for row in run.rollouts} == {"length"}
    assert {row["turns"] for row in run.rollouts} == {turns}
    assert all(row["policy_versions"][-1][0] != OBSERVED for row in run.rollouts), "what ends it was sampled"


@pytest.mark.parametrize("dies_s", [None, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("limit", ["turns", "tokens", "cut"])
def test_an_environment_judges_episodes_that_end_by_length(tmp_path: Path, limit: str, dies_s: float | None) -> None:
    """By turns, by tokens that the observation would take, or because the policy's turn is cut."""
    environment = {
        "name": "tests.parts.episodes.environments.worlds:Judging",
        "max_turns": 2 if limit == "turns" else 9,
    }
    world = World(turn_reward=0.5, reply_s=lambda *_: 0.3)
    run = run_of(tmp_path, world, environment=environment, staleness=2, reward={"parts": ["gsm8k"]})
    if limit == "tokens":
        sampling = run.config.rollout.model_copy(update={"max_new_tokens": TURN + 1})
        run.config = run.config.model_copy(update={"rollout": sampling})
    run.generators[0].is_cut = limit == "cut"
    run.train(strike=kills(*([("environment", dies_s)] if dies_s else [])))
    turns, earned = {"turns": (2, 1.0), "tokens": (1, 0.5), "cut": (1, 0.0)}[limit]
    assert {row["finish_reason"] for row in run.rollouts} == {"length"}
    assert {(row["reward"], row["turns"]) for row in run.rollouts} == {(3.0 + earned, turns)}
    keys = {(row["group_id"], row["index"]) for row in run.rollouts}
    assert len(keys) == len(run.rollouts) == 4 * STEPS and keys <= set(world.over)
    assert not run.complaints and not any(generator.held & keys for generator in run.generators)


def test_a_stall_names_who_waits_for_the_environment(tmp_path: Path) -> None:
    from llamarl.controller.supervision import Stalled

    run = run_of(tmp_path, World(reply_s=lambda *_: 1e6))
    with pytest.raises(Stalled, match=r"8 rollouts wait for the environment, the oldest for 1[12]\d\d s"):
        run.train()
