"""Long arguments leave the caller once, however many ranks get them."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamarl.cluster.api import (
    DEALT_BYTES,
    MAX_DEALT_RANKS,
    MAX_MESSAGE_BYTES,
    CallTimeout,
    Cluster,
    Deal,
    ExecutorHandle,
    ExecutorSpec,
    MeshFailed,
)
from tests.cluster.harness import CALL_S, SPAWN_S, Kind, echo, run
from tests.nightly import also, nightly

NUM_RANKS = 3


@pytest.fixture(params=["monarch", *also("processes")])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def sharing(folder: Path) -> ExecutorSpec:
    return ExecutorSpec(
        name="sharing", target="executors:Sharing", options={"folder": str(folder)}, num_ranks=NUM_RANKS,
        code_paths=echo().code_paths,
    )  # fmt: skip


def counted(handle: ExecutorHandle, num_ranks: int) -> Callable[[], int]:
    """Bytes of arguments that have left the caller since, at the most: each rank may get its own copy."""
    sent, send = list[int](), handle._send

    def count(method: str, payload: bytes, timeout_s: float, rank: int | None = None) -> Any:
        sent.append(len(payload) * (num_ranks if rank is None else 1))
        return send(method, payload, timeout_s, rank)

    handle._send = count
    return lambda: sum(sent)


@nightly("processes; by day rank 0 alone answers")
def test_long_arguments_leave_the_caller_once(kind: Kind, tmp_path: Path) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(sharing(tmp_path), SPAWN_S)
        num_bytes = counted(handle, NUM_RANKS)
        long = os.urandom(4 * MAX_MESSAGE_BYTES + 1000)
        size = len(pickle.dumps(long))
        waiting = [handle.call_each("remember", i, timeout_s=CALL_S) for i in range(20)]
        waiting.insert(10, handle.call_each("remember", long, timeout_s=CALL_S))
        await asyncio.gather(*waiting)
        remembered = await handle.call_each("remembered", timeout_s=CALL_S)
        assert remembered == [[*range(10), long, *range(10, 20)]] * NUM_RANKS  # the order of calls stays
        assert size < num_bytes() < 1.01 * size
        assert await handle.call_each("dealt_here", timeout_s=CALL_S) == [[0, 3], [1, 4], [2]]

    run(main, kind)


@nightly("processes; by day a call is shared, and what a part that is missing does is seen in one of them")
def test_short_arguments_are_nobody_s_to_share(kind: Kind, tmp_path: Path) -> None:
    async def main(cluster: Cluster) -> None:
        several, one = await asyncio.gather(
            cluster.spawn(sharing(tmp_path), SPAWN_S),
            cluster.spawn(echo("one", "executors:Sharing", folder=str(tmp_path)), SPAWN_S),
        )
        await several.call("remember", bytes(DEALT_BYTES // 2), timeout_s=CALL_S)
        await one.call("remember", bytes(3 * MAX_MESSAGE_BYTES), timeout_s=CALL_S)  # one rank has nobody to share with
        assert list(tmp_path.iterdir()) == []

    run(main, kind)


def test_rank_0_alone_answers_a_call_to_all(kind: Kind, tmp_path: Path) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(sharing(tmp_path), SPAWN_S)
        received = list[int]()
        send = handle._send

        def count(*arguments: Any) -> Any:
            replies = send(*arguments)
            replies.add_done_callback(lambda replies: received.extend(len(reply.value) for reply in replies.result()))
            return replies

        handle._send = count
        assert await handle.call("pid", timeout_s=CALL_S) == handle.pids[0]
        assert len(await handle.call("zeros", 3 * MAX_MESSAGE_BYTES, timeout_s=CALL_S)) == 3 * MAX_MESSAGE_BYTES
        assert sum(received) < 3.01 * MAX_MESSAGE_BYTES
        assert await handle.call_each("pid", timeout_s=CALL_S) == handle.pids

    run(main, kind)


@nightly("processes; by day a call is shared, and what a part that is missing does is seen in one of them")
def test_a_rank_that_dies_before_its_part_is_there_ends_the_call(kind: Kind, tmp_path: Path) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(sharing(tmp_path), SPAWN_S)
        os.kill(handle.pids[1], signal.SIGSTOP)
        call = asyncio.ensure_future(handle.call("remember", bytes(4 * MAX_MESSAGE_BYTES), timeout_s=CALL_S))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(call), 0.5)
        os.kill(handle.pids[1], signal.SIGKILL)
        with pytest.raises(MeshFailed, match=r"rank 1\): pid \d+ was killed by SIGKILL"):
            await call

    run(main, kind)


def test_a_part_that_never_comes_ends_with_the_call(kind: Kind, tmp_path: Path) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(sharing(tmp_path), SPAWN_S)
        send = handle._send

        def lose(method: str, payload: bytes, timeout_s: float, rank: int | None = None) -> Any:
            return asyncio.get_running_loop().create_future() if rank == 2 else send(method, payload, timeout_s, rank)

        handle._send = lose
        with pytest.raises(CallTimeout, match="remember"):
            await handle.call("remember", bytes(4 * MAX_MESSAGE_BYTES), timeout_s=1.0)
        await handle.stop(1.0)  # the others still wait for the part

    run(main, kind)


def test_many_ranks_on_many_hosts_cost_no_more() -> None:
    """Counted by what deals: 512 ranks on 64 hosts, a step of 50 MB."""
    num_ranks, per_host, payload = 512, 8, bytes(50_000_000)
    dealt = Deal(1, len(payload), "step").parts(payload, num_ranks)
    assert b"".join(part for _, part in dealt) == payload
    assert max(len(part) for _, part in dealt) <= MAX_MESSAGE_BYTES
    owners = [owner for owner, _ in dealt]
    assert len(set(owners)) == len({owner // per_host for owner in owners}) == MAX_DEALT_RANKS
    assert max(owners.count(owner) for owner in owners) - min(owners.count(owner) for owner in owners) <= 1
