"""What single executors of the simulator do with calls: their order, and what a generator hands over and gives back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from llamarl.cluster.api import CallTimeout, MeshFailed
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.simulator.clock import run_virtual
from llamarl.parts.forecast.simulator.draws import ResponseLengths
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.handles import NOWHERE, SimulatedGenerator, SimulatedTrainer, World
from llamarl.types import GenerationRequest, Rollout, SamplingParams
from tests.parts.forecast.simulator.conftest import run_config

COSTS = Costs(
    decode_base_s=0.1,
    decode_per_rollout_s=0.0,
    prefill_token_s=0.0,
    adopt_s=0.5,
    response_lengths=(3, 4),
    publish_s=9.0,
)


def given(main: Callable[[World], Awaitable[Any]]) -> Any:
    """What `main` finds out on a virtual clock."""
    config = run_config()
    lengths = ResponseLengths(COSTS, 1000, seed=0)
    lengths.draw = lambda group_id, group_size: [3, 4 + 10 * group_id][:group_size]

    async def found() -> Any:
        return await main(World(config=config, costs=COSTS, faults=Faults(), trainer_gpus=1, lengths=lengths))

    return run_virtual(found())


def request(group_id: int, **more: int) -> GenerationRequest:
    prompt_T = np.ones(4, np.int32)
    return GenerationRequest(
        group_id=group_id, prompt_token_ids_T=prompt_T, group_size=2, sampling=SamplingParams(), **more
    )


def facts(rollouts: list[Rollout]) -> list[tuple[int, int, int, str]]:
    return [(one.group_id, one.index, one.num_tokens, str(one.finish_reason)) for one in rollouts]


async def call(handle: Any, method: str, *args: Any, timeout_s: float = 100.0) -> Any:
    return await handle.call(method, *args, timeout_s=timeout_s)


@pytest.mark.parametrize("looks_ahead", [("adopt", 1, NOWHERE), ("abort", [3])], ids=lambda call: call[0])
def test_a_group_is_whole_when_its_last_rollout_has_ended_and_not_in_the_step_before(
    looks_ahead: tuple[Any, ...],
) -> None:
    """Adoptions and aborts look ahead to the next boundary; what ends there is not handed over before it has."""

    async def main(world: World) -> list[Any]:
        generator, replies = SimulatedGenerator("generator-0", world), list[Any]()
        await call(generator, "submit", [request(0), request(3, from_version=9)])

        async def collect() -> None:
            while True:
                collected = await call(generator, "collect", 1)
                replies.append((round(asyncio.get_running_loop().time(), 6), facts(collected.rollouts)))

        collecting = asyncio.ensure_future(collect())
        await asyncio.sleep(0.35)
        await call(generator, *looks_ahead)
        await asyncio.sleep(1.0)
        collecting.cancel()
        return replies

    taken_back = [(0.35, [(3, 0, 0, "aborted"), (3, 1, 0, "aborted")])] if looks_ahead[0] == "abort" else []
    assert given(main) == [*taken_back, (0.4, [(0, 0, 3, "stop"), (0, 1, 4, "stop")])]


@pytest.mark.parametrize("withdrawn", [False, True])
def test_one_reply_waits_for_a_group_that_is_needed_while_it_is_there(withdrawn: bool, monkeypatch) -> None:
    monkeypatch.setattr("llamarl.parts.forecast.simulator.handles.GROUPS_INTERVAL_S", 3600.0)

    async def main(world: World) -> list[Any]:
        found = list[Any]()
        for needed in ([], [1, 10**6]):
            generator = SimulatedGenerator("generator-0", world)
            await call(generator, "submit", [request(0), request(1)])
            reply = asyncio.ensure_future(call(generator, "collect", 1, needed))
            await asyncio.sleep(0.05)
            if needed and withdrawn:
                await call(generator, "abort", [1])
                found += [{one.group_id for one in (await reply).rollouts}]
                reply = asyncio.ensure_future(call(generator, "collect", 1, needed))
            found += [Counter(one.group_id for one in (await reply).rollouts)]
        return found

    alone, *others = given(main)
    assert alone[0] == 2 and alone[1] < 2
    assert others == ([{1}, {0: 2}] if withdrawn else [{0: 2, 1: 2}])


def test_what_is_taken_back_comes_with_its_tokens_and_its_place_is_free() -> None:
    """Whatever waits for a version, waits in line, or runs; what has ended already stays as it is."""

    async def main(world: World) -> list[Any]:
        world.config.generator.__dict__["max_running"] = 1
        generator = SimulatedGenerator("generator-0", world)
        await call(generator, "submit", [request(1), request(2), request(3, from_version=9)])
        await asyncio.sleep(0.55)
        assert generator.num_unfinished == 4
        await call(generator, "abort", [1, 3])
        first = await call(generator, "collect", 0)
        second = await call(generator, "collect", 0)
        end_s = asyncio.get_running_loop().time()
        await call(generator, "adopt", 9, NOWHERE)
        return [facts(first.rollouts), facts(second.rollouts), end_s, generator.num_unfinished]

    first, second, at_s, num_left = given(main)
    assert sorted(first) == [(1, 0, 3, "stop"), (1, 1, 3, "aborted"), (3, 0, 0, "aborted"), (3, 1, 0, "aborted")]
    assert second == [(2, 0, 3, "stop")] and at_s == pytest.approx(0.9) and num_left == 1


def test_calls_take_their_turn_and_one_that_is_too_late_in_line_is_dropped() -> None:
    async def main(world: World) -> tuple[list[Any], int]:
        trainer = SimulatedTrainer("trainer", world)
        calls = [call(trainer, "publish", 1, ()), call(trainer, "publish", 2, (), timeout_s=5.0)]
        calls += [call(trainer, "commit"), call(trainer, "publish", 3, (), timeout_s=12.0)]
        ended = list[Any]()

        async def noted(number: int, one: Awaitable[Any]) -> None:
            try:
                said = await one
            except CallTimeout as error:
                said = error.doing
            ended.append((number, asyncio.get_running_loop().time(), said if isinstance(said, str) else ""))

        await asyncio.gather(*(noted(number, one) for number, one in enumerate(calls)))
        await asyncio.sleep(100.0)
        return ended, len(trainer._spans)

    ended, num_published = given(main)
    busy = "is in publish"
    assert ended == [(1, 5.0, busy), (0, 9.0, ""), (2, 9.0, ""), (3, 12.0, busy)]
    assert num_published == 2, "the second one was never run, the last one was"


def test_one_that_is_given_up_answers_all_who_wait_with_the_reason() -> None:
    async def main(world: World) -> list[BaseException]:
        trainer = SimulatedTrainer("trainer", world)
        waiting = [asyncio.ensure_future(call(trainer, "publish", version, ())) for version in range(3)]
        await asyncio.sleep(1.0)
        await trainer.give_up(MeshFailed("trainer", (0,), "host a is lost"), 1.0)
        return await asyncio.gather(*waiting, call(trainer, "commit"), return_exceptions=True)

    assert [str(error) for error in given(main)] == ["trainer (rank 0): host a is lost"] * 4
