"""What every cluster promises. No torch in any worker."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import time
from pathlib import Path

import pytest

from llamarl.cluster import rank
from llamarl.cluster.api import (
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    CallTimeout,
    Cluster,
    ExecutorSpec,
    MeshFailed,
    PayloadTooLarge,
    RemoteError,
    Reply,
)
from llamarl.config import ConfigError
from tests.cluster.harness import CALL_S, SPAWN_S, Kind, echo, run
from tests.nightly import also, nightly


@pytest.fixture(params=["inline", "forked", *also("monarch", "processes", "forked processes")])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def test_calls_carry_values_in_order_and_work_runs_between_them(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(num_work=5), SPAWN_S)
        assert await handle.call("echo", {"a": [1, None]}, timeout_s=CALL_S, twice=True) == [{"a": [1, None]}] * 2
        assert await handle.call_each("echo", 7, timeout_s=CALL_S) == [7]
        await asyncio.gather(*(handle.call("remember", index, timeout_s=CALL_S) for index in range(200)))
        assert await handle.call("remembered", timeout_s=CALL_S) == list(range(200))
        while await handle.call("worked", timeout_s=CALL_S) < 5:
            await asyncio.sleep(0.01)

    run(main, kind)


def test_arguments_and_results_are_copies(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        await handle.call("remember", 1, timeout_s=CALL_S)
        (await handle.call("remembered", timeout_s=CALL_S)).append(2)
        assert await handle.call("remembered", timeout_s=CALL_S) == [1]

    run(main, kind)


def test_deferred_reply_leaves_the_thread_free_and_is_canceled_when_its_caller_has_gone(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        poll = asyncio.ensure_future(handle.call("poll", timeout_s=CALL_S))
        assert await handle.call("echo", 1, timeout_s=CALL_S) == 1
        assert not poll.done()
        assert await handle.call("resolve", "late", timeout_s=CALL_S) == [True]
        assert await poll == "late"
        with pytest.raises(CallTimeout, match="echo is idle"):
            await handle.call("poll", timeout_s=0.05)
        while await handle.call("abandoned", timeout_s=CALL_S) != [True]:  # its time began when the call had arrived
            await asyncio.sleep(0.01)
        assert await handle.call("resolve", "nobody", timeout_s=CALL_S) == [False]

    run(main, kind)


def test_timeout_names_what_runs_and_drops_what_waits(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        sleep = asyncio.ensure_future(handle.call("sleep", 1.0, timeout_s=CALL_S))
        await asyncio.sleep(0)
        with pytest.raises(
            CallTimeout,
            match=r"echo\.remember had no answer after 0\.1 s \(cluster\.timeout_s\); echo is in sleep for [\d.]+ s "
            r"at sleep \(executors\.py:\d+\), ",
        ) as caught:
            await handle.call("remember", 1, timeout_s=0.1)
        assert (caught.value.executor, caught.value.method, caught.value.timeout_s) == ("echo", "remember", 0.1)
        await sleep
        assert await handle.call("remembered", timeout_s=CALL_S) == []

    run(main, kind)


def test_status_while_busy_and_spans(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        start_s = time.monotonic()
        handle = await cluster.spawn(echo(num_work=1), SPAWN_S)
        sleep = asyncio.ensure_future(handle.call("sleep", 2.0, timeout_s=CALL_S))
        queued = asyncio.ensure_future(handle.call("echo", 1, timeout_s=CALL_S))
        await asyncio.sleep(0)
        statuses = [await handle.status(CALL_S)]
        while statuses[-1].doing != "sleep":
            statuses.append(await handle.status(CALL_S))
        status = statuses[-1]
        assert status.queued_calls == 1
        assert 0 <= status.doing_age_s < 2.0
        assert status.usage.rss_bytes > 1 << 20 and status.usage.descriptors > 2 and status.usage.threads > 1
        assert [status.pid] == handle.pids
        await asyncio.gather(sleep, queued)
        after = await handle.status(CALL_S)
        names = [span.name for status in (*statuses, after) for span in status.spans]
        assert sorted(names) == ["generate", "train"], "one span per busy stretch, none for idling and other methods"
        assert 2.0 <= after.busy_s["generate"] <= time.monotonic() - start_s
        assert (await handle.status(CALL_S)).spans == []

    run(main, kind)


def test_an_exception_comes_with_its_traceback_and_type_and_the_executor_goes_on(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        with pytest.raises(RemoteError, match=r"(?s)echo\.fail failed.*in fail.*LookupError: no such row") as caught:
            await handle.call("fail", "no such row", timeout_s=CALL_S)
        assert isinstance(caught.value.__cause__, LookupError)
        with pytest.raises(RemoteError, match="Local: cannot travel") as caught:
            await handle.call("fail_unpicklable", timeout_s=CALL_S)
        assert caught.value.__cause__ is None
        with pytest.raises(RemoteError, match="no_such_method"):
            await handle.call("no_such_method", timeout_s=CALL_S)
        assert await handle.call("echo", 1, timeout_s=CALL_S) == 1
        assert not handle.failed.done()

    run(main, kind)


def test_an_exception_in_work_fails_the_executor(kind: Kind, tmp_path: Path) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(closed_file=str(tmp_path / "closed")), SPAWN_S)
        poll = asyncio.ensure_future(handle.call("poll", timeout_s=CALL_S))
        trigger = asyncio.ensure_future(handle.call("fail_in_work", "out of tokens", timeout_s=CALL_S))
        error = await asyncio.wait_for(handle.failed, CALL_S)
        assert isinstance(error, RemoteError)
        assert error.method == "work"
        assert isinstance(error.__cause__, RuntimeError)
        for call in (poll, handle.call("echo", 1, timeout_s=CALL_S)):
            with pytest.raises(RemoteError, match=r"(?s)echo\.work failed.*out of tokens"):
                await call
        await asyncio.wait((trigger,))
        trigger.exception()
        await handle.stop(CALL_S)
        assert (tmp_path / "closed").read_text() == "closed", "a failed executor still gives back what it holds"

    run(main, kind)


def test_long_arguments_and_results_travel_in_parts(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        long = os.urandom(3 * MAX_MESSAGE_BYTES + 5)
        values = [long[: 7 * MAX_MESSAGE_BYTES // 2], b"short", long[5:], long[:MAX_MESSAGE_BYTES], b""]
        replies = [handle.call("echo", value, timeout_s=CALL_S) for value in values]
        assert await asyncio.gather(*replies) == values, "parts of one call are not taken for another's"
        await asyncio.gather(*(handle.call("remember", value, timeout_s=CALL_S) for value in values))
        assert await handle.call("remembered", timeout_s=CALL_S) == values, "calls stay in order"

    run(main, kind)


@pytest.mark.parametrize("kind", ["monarch", "processes"])
def test_ranks_may_answer_at_different_length(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        two = ExecutorSpec(name="two", target="executors:Echo", num_ranks=2, code_paths=echo().code_paths)
        handle = await cluster.spawn(two, SPAWN_S)
        lengths = [len(value) for value in await handle.call_each("zeros_of_rank", MAX_MESSAGE_BYTES, timeout_s=CALL_S)]
        assert lengths == [0, 3 * MAX_MESSAGE_BYTES]

    run(main, kind)


def test_payload_cap(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        with pytest.raises(PayloadTooLarge, match=r"echo: the result of zeros is 268,435,\d\d\d bytes"):
            await handle.call("zeros", MAX_PAYLOAD_BYTES, timeout_s=CALL_S)
        with pytest.raises(PayloadTooLarge, match="the argument list of echo"):
            await handle.call("echo", bytes(MAX_PAYLOAD_BYTES), timeout_s=CALL_S)
        assert await handle.call("echo", 1, timeout_s=CALL_S) == 1

    run(main, kind)


def test_stop_closes_and_later_calls_are_refused(kind: Kind, tmp_path: Path) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(closed_file=str(tmp_path / "closed")), SPAWN_S)
        poll = asyncio.ensure_future(handle.call("poll", timeout_s=CALL_S))
        await handle.call("echo", 1, timeout_s=CALL_S)
        await asyncio.gather(handle.stop(CALL_S), handle.stop(CALL_S))
        assert (tmp_path / "closed").read_text() == "closed"
        for call in (poll, handle.call("echo", 1, timeout_s=CALL_S), handle.status(CALL_S)):
            with pytest.raises(MeshFailed, match="stopped by the controller"):
                await call
        assert not handle.failed.done(), "a stop is no failure"
        bad = await cluster.spawn(echo("bad", "executors:BadClose"), SPAWN_S)
        with pytest.raises(RemoteError, match=r"(?s)bad\.close failed.*disk full"):
            await bad.stop(CALL_S)

    run(main, kind)


def test_a_start_tells_what_it_is_at(kind: Kind, tmp_path: Path) -> None:
    """While it is at it: it goes on once that was heard."""
    heard, go = list[str](), tmp_path / "go"

    def tell(stage: str) -> None:
        heard.append(stage)
        if stage == "waits for a file":
            go.touch()

    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(target="executors:Patient", file=str(go)), SPAWN_S, tell)
        assert "waits for a file" in heard
        assert (await handle.status(CALL_S)).stage == "", "that is over"

    run(main, kind)


def test_spawn_reports_what_went_wrong(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        results = await asyncio.gather(
            cluster.spawn(echo("broken", "executors:Broken"), SPAWN_S),
            cluster.spawn(echo("missing", "no_such_module:Thing"), SPAWN_S),
            cluster.spawn(echo("slow", "executors:Slow", duration_s=3.0), 2.0),
            return_exceptions=True,
        )
        broken, missing, slow = map(str, results)
        assert re.search(r"(?s)broken\.__init__ failed.*ValueError: no such checkpoint", broken)
        assert re.search(r"(?s)missing\.__init__ failed.*no_such_module", missing)
        assert re.search(
            r"slow\.start had no answer after [\d.]+ s \(cluster.timeout_s\); slow (is in|has not)",
            slow,
        )
        with pytest.raises(PayloadTooLarge):
            await cluster.spawn(echo(file=bytes(MAX_PAYLOAD_BYTES)), SPAWN_S)

    run(main, kind)


def test_inline_ranks_are_config_errors() -> None:
    async def main(cluster: Cluster) -> None:
        with pytest.raises(ConfigError, match="one rank per executor"):
            await cluster.spawn(ExecutorSpec(name="two", target="executors:Echo", num_ranks=2), SPAWN_S)

    run(main, "inline")


@nightly("real time; by day results travel in parts")
def test_a_long_result_that_nobody_takes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "ABANDONED_S", 0.0)
    one = rank.ExecutorRank(echo(target="tests.cluster.executors:Echo"))
    one.submit(rank.READY, b"", 0.0).result(CALL_S)

    def asked(size: int, timeout_s: float) -> Reply:
        return one.submit("zeros", pickle.dumps(((size,), {}, True)), timeout_s).result(CALL_S)

    first = asked(3 * MAX_MESSAGE_BYTES, 3.0)
    assert len(first.value) == MAX_MESSAGE_BYTES and first.rest_of == 1
    time.sleep(3.0)  # until nobody can be waiting any more
    asked(1, CALL_S)
    assert one.submit(rank.REST, pickle.dumps(1), 0.0).result(CALL_S) == Reply()
    one.submit(rank.CLOSE, b"", 0.0).result(CALL_S)
