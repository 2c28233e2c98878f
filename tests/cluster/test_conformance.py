"""What every backend promises, and what separate processes add. No torch in any worker.

Not covered here: several machines, and executors that hold a GPU.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from llamarl.cluster.api import (
    MAX_PAYLOAD_BYTES,
    CallTimeout,
    Cluster,
    ExecutorSpec,
    MeshFailed,
    PayloadTooLarge,
    RemoteError,
    chunks,
    open_cluster,
)
from llamarl.config import ConfigError

Kind = Literal["monarch", "inline"]
HERE = Path(__file__).parent
SPAWN_S = 30.0
CALL_S = 10.0


def echo(name: str = "echo", target: str = "executors:Echo", **options: Any) -> ExecutorSpec:
    return ExecutorSpec(name=name, target=target, options=options, code_paths=(str(HERE),))


def run(main: Callable[[Cluster], Awaitable[None]], kind: Kind, log_folder: Path | None = None) -> None:
    async def within() -> None:
        async with asyncio.timeout(60.0):
            async with open_cluster(kind, log_folder) as cluster:
                await main(cluster)

    asyncio.run(within())


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until the condition holds; fails after `timeout_s`."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < timeout_s, "the condition did not come true in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - start_s


@pytest.fixture(params=["inline", "monarch"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


# ---- every backend ----


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
        assert await handle.call("resolve", "nobody", timeout_s=CALL_S) == [False]

    run(main, kind)


def test_timeout_names_what_runs_and_drops_what_waits(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        sleep = asyncio.ensure_future(handle.call("sleep", 0.6, timeout_s=CALL_S))
        await asyncio.sleep(0)
        with pytest.raises(CallTimeout, match=r"echo\.remember had no answer after 0\.1 s; echo is in sleep") as caught:
            await handle.call("remember", 1, timeout_s=0.1)
        assert (caught.value.executor, caught.value.method, caught.value.timeout_s) == ("echo", "remember", 0.1)
        await sleep
        assert await handle.call("remembered", timeout_s=CALL_S) == []

    run(main, kind)


def test_status_while_busy_and_spans(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(num_work=1), SPAWN_S)
        sleep = asyncio.ensure_future(handle.call("sleep", 0.4, timeout_s=CALL_S))
        queued = asyncio.ensure_future(handle.call("echo", 1, timeout_s=CALL_S))
        await asyncio.sleep(0)
        statuses = [await handle.status(CALL_S)]
        while statuses[-1].doing != "sleep":
            statuses.append(await handle.status(CALL_S))
        status = statuses[-1]
        assert status.queued_calls == 1
        assert 0 <= status.doing_age_s < 0.4
        assert status.rss_bytes > 1 << 20
        assert [status.pid] == handle.pids
        await asyncio.gather(sleep, queued)
        after = await handle.status(CALL_S)
        names = [span.name for status in (*statuses, after) for span in status.spans]
        assert sorted(names) == ["generate", "train"], "one span per busy stretch, none for idling and other methods"
        assert 0.4 <= after.busy_s["generate"] < 2.0
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


def test_payload_cap(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        assert len(await handle.call("zeros", MAX_PAYLOAD_BYTES - 1000, timeout_s=CALL_S)) == MAX_PAYLOAD_BYTES - 1000
        with pytest.raises(PayloadTooLarge, match=r"echo: the result of zeros is 1,048,\d\d\d bytes"):
            await handle.call("zeros", MAX_PAYLOAD_BYTES, timeout_s=CALL_S)
        with pytest.raises(PayloadTooLarge, match="the argument list of echo"):
            await handle.call("echo", bytes(MAX_PAYLOAD_BYTES), timeout_s=CALL_S)
        records = [bytes(index * 1000) for index in range(100)]
        received: list[bytes] = []
        for chunk in chunks(records):
            received += await handle.call("echo", chunk, timeout_s=CALL_S)
        assert received == records

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
        assert re.search(r"slow\.start had no answer after 2 s; slow (is in start for|has not said yet)", slow)
        with pytest.raises(PayloadTooLarge):
            await cluster.spawn(echo(closed_file="x" * MAX_PAYLOAD_BYTES), SPAWN_S)

    run(main, kind)


def test_unknown_cluster_and_inline_ranks_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.kind = 'ray'"):
        open_cluster("ray")  # pyrefly: ignore[bad-argument-type]

    async def main(cluster: Cluster) -> None:
        with pytest.raises(ConfigError, match="one rank per executor"):
            await cluster.spawn(ExecutorSpec(name="two", target="executors:Echo", num_ranks=2), SPAWN_S)

    run(main, "inline")


def test_chunks_keep_order_and_stay_below_the_cap() -> None:
    records = [bytes(size) for size in (10, 400, 400, 400, 10, 900)]
    split = list(chunks(records, max_bytes=1000))
    assert [record for chunk in split for record in chunk] == records
    assert all(sum(map(len, chunk)) <= 1000 for chunk in split)
    assert list(chunks([], max_bytes=1000)) == []
    with pytest.raises(PayloadTooLarge, match="record 1"):
        list(chunks([b"", bytes(2000)], max_bytes=1000))


# ---- separate processes ----


def test_ranks_environment_and_log_files(tmp_path: Path) -> None:
    async def main(cluster: Cluster) -> None:
        spec = ExecutorSpec(
            name="two",
            target="executors:Echo",
            num_ranks=2,
            env={"OMP_NUM_THREADS": "3"},
            code_paths=(str(HERE),),
        )
        handle = await cluster.spawn(spec, SPAWN_S)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
        environs = await handle.call_each("environ", *names, timeout_s=CALL_S)
        assert environs == [["0", "0", "2", "3"], ["1", "1", "2", "3"]]
        assert await handle.call_each("pid", timeout_s=CALL_S) == handle.pids
        assert len({os.getpid(), *handle.pids}) == 3
        assert await handle.call_each("loaded", "torch", timeout_s=CALL_S) == [False, False]
        await handle.call("say", "hello", timeout_s=CALL_S)
        assert [status.pid for status in await handle.status_each(CALL_S)] == handle.pids

        os.kill(handle.pids[1], signal.SIGKILL)
        error = await asyncio.wait_for(handle.failed, 5.0)
        assert str(error) == f"two (rank 1): pid {handle.pids[1]} was killed by SIGKILL"

    run(main, "monarch", tmp_path)
    assert (tmp_path / "two.0.log").read_text() == (tmp_path / "two.1.log").read_text() == "hello\nhello on stderr\n"


def test_kill_is_noticed_and_named_and_the_executor_can_be_spawned_again() -> None:
    async def main(cluster: Cluster) -> None:
        handle, bystander = await asyncio.gather(
            cluster.spawn(echo(), SPAWN_S), cluster.spawn(echo("bystander"), SPAWN_S)
        )
        poll = asyncio.ensure_future(handle.call("poll", timeout_s=CALL_S))
        await handle.call("echo", 1, timeout_s=CALL_S)
        start_s = time.monotonic()
        os.kill(handle.pids[0], signal.SIGKILL)
        error = await asyncio.wait_for(handle.failed, 5.0)
        assert time.monotonic() - start_s < 2.0
        assert isinstance(error, MeshFailed)
        assert error.cause == f"pid {handle.pids[0]} was killed by SIGKILL"
        for call in (poll, handle.call("echo", 1, timeout_s=CALL_S)):
            with pytest.raises(MeshFailed, match="SIGKILL"):
                await call
        await handle.stop(CALL_S)
        again = await cluster.spawn(echo(), SPAWN_S)
        assert await again.call("echo", 2, timeout_s=CALL_S) == 2
        assert await bystander.call("echo", 3, timeout_s=CALL_S) == 3
        assert not bystander.failed.done()

    run(main, "monarch")


def test_a_hanging_method_does_not_hold_up_shutdown_and_nothing_is_left() -> None:
    async def main(cluster: Cluster) -> None:
        handles = await asyncio.gather(*(cluster.spawn(echo(f"echo-{index}"), SPAWN_S) for index in range(2)))
        pids = [pid for handle in handles for pid in handle.pids]
        hang = asyncio.ensure_future(handles[0].call("sleep", 600.0, timeout_s=600.0))
        while (await handles[0].status(CALL_S)).doing != "sleep":
            await asyncio.sleep(0.01)
        start_s = time.monotonic()
        await cluster.shutdown(timeout_s=3.0)
        assert time.monotonic() - start_s < 3.5
        with pytest.raises(MeshFailed):
            await hang
        assert not any(map(is_alive, pids))

    run(main, "monarch")


def test_workers_survive_ctrl_c() -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        os.kill(handle.pids[0], signal.SIGINT)
        assert await handle.call("interrupt_self", timeout_s=CALL_S)
        assert await handle.call("echo", 1, timeout_s=CALL_S) == 1

    run(main, "monarch")


def test_exits_are_named_and_a_worker_that_cannot_start_is_reported() -> None:
    async def main(cluster: Cluster) -> None:
        handles = await asyncio.gather(*(cluster.spawn(echo(f"exit-{code}"), SPAWN_S) for code in (0, 3)))
        for handle, code in zip(handles, (0, 3), strict=True):
            with pytest.raises(MeshFailed, match=rf"pid {handle.pids[0]} ended with exit code {code}"):
                await handle.call("exit", code, timeout_s=CALL_S)
        bare = ExecutorSpec(name="bare", target="executors:Echo", env={"PYTHONHOME": "/nonexistent"})
        with pytest.raises(MeshFailed, match=r"bare .* ended with exit code 1"):
            await cluster.spawn(bare, SPAWN_S)

    run(main, "monarch")


def test_a_dead_worker_takes_the_processes_it_has_started_with_it() -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        child = await handle.call("start_child", timeout_s=CALL_S)
        with pytest.raises(CallTimeout):
            await handle.call("sleep", 600.0, timeout_s=0.1)
        assert is_alive(child)
        await handle.stop(timeout_s=1.0)
        await until(lambda: not is_alive(child) and not is_alive(handle.pids[0]), CALL_S)

        killed = await cluster.spawn(echo("killed"), SPAWN_S)
        child = await killed.call("start_child", timeout_s=CALL_S)
        os.kill(killed.pids[0], signal.SIGKILL)
        await until(lambda: not is_alive(child), CALL_S)

    run(main, "monarch")


def test_many_rounds_in_one_process() -> None:
    pids: list[int] = []

    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        assert await handle.call("echo", 1, timeout_s=CALL_S) == 1
        pids.extend(handle.pids)

    for _ in range(5):
        run(main, "monarch")
    assert len(set(pids)) == 5
    assert not any(map(is_alive, pids))


CONTROLLER = """
import asyncio, sys
from llamarl.cluster.api import ExecutorSpec, open_cluster

async def main(code_path, folder):
    def spec(name):
        options = {"closed_file": f"{folder}/{name}"}
        return ExecutorSpec(name=name, target="executors:Echo", options=options, code_paths=(code_path,))

    async with open_cluster("monarch") as cluster:
        handles = await asyncio.gather(*(cluster.spawn(spec(name), 30.0) for name in "ab"))
        print(*(pid for handle in handles for pid in handle.pids), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""


def start_controller(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A controller with two executors in a process group of its own, as a shell would start it, and their pids."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(HERE), str(folder)],
        cwd=HERE.parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    return process, pids


def test_no_orphans_after_the_controller_is_killed(tmp_path: Path) -> None:
    process, pids = start_controller(tmp_path)
    process.kill()
    process.communicate(timeout=CALL_S)
    asyncio.run(until(lambda: not any(map(is_alive, pids)), 10.0))


def test_a_controller_says_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    process, pids = start_controller(tmp_path)
    out, err = process.communicate("", timeout=CALL_S)
    assert (process.returncode, out, err) == (0, "", "")
    assert not any(map(is_alive, pids))


def test_ctrl_c_lets_the_controller_close_its_executors(tmp_path: Path) -> None:
    process, pids = start_controller(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=CALL_S)
    assert process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert [(tmp_path / name).read_text() for name in "ab"] == ["closed", "closed"]
    assert not any(map(is_alive, pids))
