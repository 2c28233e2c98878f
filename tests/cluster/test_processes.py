"""What separate processes add: deaths, hangs, orphans, signals. No torch in any worker.

Not covered here: several machines, and executors that hold a GPU.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.cluster import handle as handle_module
from llamarl.cluster import processes, watched
from llamarl.cluster.api import (
    MAX_MESSAGE_BYTES,
    CallTimeout,
    Cluster,
    ExecutorSpec,
    MeshFailed,
    RemoteError,
)
from tests.cluster.harness import CALL_S, HERE, SPAWN_S, Kind, echo, is_alive, run, until
from tests.nightly import NIGHTLY, also, nightly

SOON_S = 60.0
"""Much less than what the executor would otherwise be waited for."""


@pytest.fixture(params=["monarch", *also("processes")])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@nightly("waits for an engine; by day a killed executor is named")
@pytest.mark.parametrize(
    ("ends", "cause"),
    [("os._exit(3)", "ended with exit code 3"), *also(("os.kill(os.getpid(), 9)", "was killed by SIGKILL"))],
)
def test_a_death_before_the_engine_is_up_is_a_sentence(kind: Kind, tmp_path: Path, ends: str, cause: str) -> None:
    """Only the engine, whose report is long, knows Monarch's process by then."""
    name = "monarch" if kind == "monarch" else "llamarl"  # found in the engine's place
    (tmp_path / f"{name}.py").write_text(f"import os\n{ends}\n")

    async def main(cluster: Cluster) -> None:
        with pytest.raises(MeshFailed) as failed:
            await cluster.spawn(ExecutorSpec(name="one", target="executors:Echo", code_paths=(str(tmp_path),)), SPAWN_S)
        assert str(failed.value) == f"one (rank 0): a process {cause} while it started"

    run(main, kind, tmp_path)


def test_ranks_environment_and_log_files(kind: Kind, tmp_path: Path) -> None:
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
        error = await asyncio.wait_for(handle.failed, CALL_S)
        assert str(error) == f"two (rank 1): pid {handle.pids[1]} was killed by SIGKILL"

    run(main, kind, tmp_path)
    assert (tmp_path / "two.0.log").read_text() == (tmp_path / "two.1.log").read_text() == "hello\nhello on stderr\n"


@pytest.mark.parametrize(
    ("rank", "others_wait_s", "in_work"),
    [*itertools.product((0, 1), (0.0, 0.5), (False, True))] if NIGHTLY else [(0, 0.5, False), (1, 0.0, True)],
)  # fmt: skip
def test_what_one_rank_raises_is_the_error_whichever_it_is(
    kind: Kind, rank: int, others_wait_s: float, in_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what follows from it in the others, which may be heard first."""
    for module in (handle_module, watched):
        monkeypatch.setattr(module, "CAUSE_S", 200.0)

    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(replace(echo("two"), num_ranks=2), SPAWN_S)
        start_s = time.monotonic()
        call = handle.call("fail_in_rank", rank, others_wait_s, in_work, timeout_s=CALL_S)
        if in_work:
            with suppress(RemoteError):
                await call
            error = await asyncio.wait_for(handle.failed, CALL_S)
        else:
            with pytest.raises(RemoteError) as caught:
                await call
            error = caught.value
        assert time.monotonic() - start_s < SOON_S, "as long as for a cause that may still come"
        assert isinstance(error, RemoteError) and isinstance(error.__cause__, LookupError)
        assert error.rank == rank
        method = "work" if in_work else "fail_in_rank"
        assert str(error).startswith(f"two.{method} failed in rank {rank}\nTraceback")
        assert str(error).endswith(f"LookupError: no such row in rank {rank}")
        if in_work:
            with pytest.raises(RemoteError, match="no such row"):
                await handle.call("echo", 1, timeout_s=CALL_S)

    run(main, kind)


@nightly("processes; by day a controller that is killed and one that is interrupted leave nobody")
@pytest.mark.parametrize("in_work", [False, *also(True)])
def test_ranks_that_have_but_lost_others_are_dead(kind: Kind, monkeypatch: pytest.MonkeyPatch, in_work: bool) -> None:
    """Of what is known to have befallen the others, or else of what they say."""
    monkeypatch.setattr(handle_module, "CAUSE_S", 0.5)
    monkeypatch.setattr(watched, "CAUSE_S", 0.5)

    async def main(cluster: Cluster) -> None:
        two, killed = await asyncio.gather(
            *(cluster.spawn(replace(echo(name), num_ranks=2), SPAWN_S) for name in ("two", "killed"))
        )
        with suppress(MeshFailed):
            await two.call("fail_in_rank", 7, 0.0, in_work, timeout_s=CALL_S)
        error = await asyncio.wait_for(two.failed, CALL_S)
        assert isinstance(error, MeshFailed) and error.cause == "rank 7 is gone"
        with pytest.raises(MeshFailed, match="rank 7 is gone"):
            await two.call("echo", 1, timeout_s=CALL_S)
        call = asyncio.ensure_future(killed.call("fail_in_rank", 7, 0.0, in_work, timeout_s=CALL_S))
        await asyncio.sleep(0.2)
        os.kill(killed.pids[1], signal.SIGKILL)
        with suppress(MeshFailed):
            await call
        error = await asyncio.wait_for(killed.failed, CALL_S)
        assert str(error) == f"killed (rank 1): pid {killed.pids[1]} was killed by SIGKILL"

    run(main, kind)


def test_kill_is_noticed_and_named_and_the_executor_can_be_spawned_again(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle, bystander = await asyncio.gather(
            cluster.spawn(echo(), SPAWN_S), cluster.spawn(echo("bystander"), SPAWN_S)
        )
        poll = asyncio.ensure_future(handle.call("poll", timeout_s=CALL_S))
        await handle.call("echo", 1, timeout_s=CALL_S)
        start_s = time.monotonic()
        os.kill(handle.pids[0], signal.SIGKILL)
        error = await asyncio.wait_for(handle.failed, CALL_S)
        assert time.monotonic() - start_s < SOON_S
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

    run(main, kind)


@nightly("waits for processes that end; by day a killed one is named and starts again")
def test_a_hanging_method_does_not_hold_up_shutdown_and_nothing_is_left(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handles = await asyncio.gather(*(cluster.spawn(echo(f"echo-{index}"), SPAWN_S) for index in range(2)))
        pids = [pid for handle in handles for pid in handle.pids]
        hang = asyncio.ensure_future(handles[0].call("sleep", 600.0, timeout_s=600.0))
        while (await handles[0].status(CALL_S)).doing != "sleep":
            await asyncio.sleep(0.01)
        start_s = time.monotonic()
        await cluster.shutdown(timeout_s=3.0)
        assert time.monotonic() - start_s < SOON_S, "as long as the method takes"
        with pytest.raises(MeshFailed):
            await hang
        assert not any(map(is_alive, pids))

    run(main, kind)


def test_workers_survive_ctrl_c(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        os.kill(handle.pids[0], signal.SIGINT)
        assert await handle.call("interrupt_self", timeout_s=CALL_S)
        assert await handle.call("echo", 1, timeout_s=CALL_S) == 1

    run(main, kind)


@nightly("waits for processes that end; by day a killed one is named and starts again")
def test_exits_are_named_and_a_worker_that_cannot_start_is_reported(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        handles = await asyncio.gather(*(cluster.spawn(echo(f"exit-{code}"), SPAWN_S) for code in (0, 3)))
        for handle, code in zip(handles, (0, 3), strict=True):
            with pytest.raises(MeshFailed, match=rf"pid {handle.pids[0]} (ended with exit code {code}|has ended)"):
                await handle.call("exit", code, timeout_s=CALL_S)
        bare = ExecutorSpec(name="bare", target="executors:Echo", env={"PYTHONHOME": "/nonexistent"})
        with pytest.raises(MeshFailed, match=r"bare .* ended with exit code 1"):
            await cluster.spawn(bare, SPAWN_S)

    run(main, kind)


@nightly("waits for processes that end; by day a killed one is named and starts again")
def test_a_dead_worker_takes_the_processes_it_has_started_with_it(kind: Kind) -> None:
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

    run(main, kind)


@nightly("processes; by day a controller that is killed and one that is interrupted leave nobody")
def test_many_rounds_in_one_process(kind: Kind) -> None:
    pids: list[int] = []

    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        assert await handle.call("echo", 1, timeout_s=CALL_S) == 1
        pids.extend(handle.pids)

    for _ in range(2):
        run(main, kind)
    assert len(set(pids)) == 2
    assert not any(map(is_alive, pids))


CONTROLLER = """
import asyncio, sys
from llamarl.cluster.api import ExecutorSpec
from llamarl.cluster.open import open_cluster
from llamarl.config.cluster import ClusterConfig

async def main(kind, code_path, folder):
    def spec(name):
        options = {"closed_file": f"{folder}/{name}"}
        return ExecutorSpec(name=name, target="executors:Echo", options=options, code_paths=(code_path,))

    async with open_cluster(ClusterConfig(kind=kind)) as cluster:
        handles = await asyncio.gather(*(cluster.spawn(spec(name), 240.0) for name in "ab"))
        print(*(pid for handle in handles for pid in handle.pids), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""


def start_controller(kind: Kind, folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A controller with two executors in a process group of its own, as a shell would start it, and their pids."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, kind, str(HERE), str(folder)],
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


def test_no_orphans_after_the_controller_is_killed(kind: Kind, tmp_path: Path) -> None:
    process, pids = start_controller(kind, tmp_path)
    process.kill()
    process.communicate(timeout=CALL_S)
    asyncio.run(until(lambda: not any(map(is_alive, pids)), CALL_S))


def test_a_stopped_rank_ends_with_its_controller(tmp_path: Path) -> None:
    """The kernel kills the rank, which cannot read the end of its socket."""
    process, pids = start_controller("processes", tmp_path)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.communicate(timeout=CALL_S)
    asyncio.run(until(lambda: not any(map(is_alive, pids)), CALL_S))


def test_a_process_that_cannot_be_started_is_a_dead_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(cluster: Cluster) -> None:
        start, started = subprocess.Popen, list[int]()

        def refuse(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
            if started:
                raise BlockingIOError("too many processes")
            started.append((process := start(*arguments, **options)).pid)
            return process

        monkeypatch.setattr(processes.subprocess, "Popen", refuse)
        with pytest.raises(MeshFailed, match=r"two \(rank 1\): a process cannot be started: too many processes"):
            await cluster.spawn(replace(echo("two"), num_ranks=2), SPAWN_S)
        assert not is_alive(started[0])

    run(main, "processes")


def test_plain_processes_open_no_place_to_connect_to() -> None:
    async def main(cluster: Cluster) -> None:
        before = listening(os.getpid())
        handle = await cluster.spawn(echo(), SPAWN_S)
        assert listening(os.getpid()) == before and not listening(handle.pids[0])

    run(main, "processes")


def listening(pid: int) -> set[str]:
    """Unix sockets of a process to which another could connect."""
    of_machine = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    inodes = {f"socket:[{fields[6]}]" for fields in of_machine if int(fields[3], 16) & 0x10000}  # __SO_ACCEPTCON
    found = set[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing
            found.add(os.readlink(link))
    return found & inodes


def test_work_continues_while_the_controller_does_not_read(tmp_path: Path) -> None:
    """Results of several times the size of a socket's buffer wait in the rank, and not on its executor's thread."""

    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        calls = [handle.call("zeros", MAX_MESSAGE_BYTES, timeout_s=CALL_S) for _ in range(8)]
        waiting = asyncio.gather(*calls, handle.call("touch", str(tmp_path / "done"), timeout_s=CALL_S))
        await asyncio.sleep(0)  # the calls are sent
        deadline_s = time.monotonic() + CALL_S
        while not (tmp_path / "done").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)  # and not `asyncio.sleep`, in which replies would be read
        await waiting

    run(main, "processes")


@nightly("processes; by day a controller that is killed and one that is interrupted leave nobody")
def test_a_controller_says_nothing_and_leaves_nothing(kind: Kind, tmp_path: Path) -> None:
    process, pids = start_controller(kind, tmp_path)
    out, err = process.communicate("", timeout=CALL_S)
    assert (process.returncode, out, err) == (0, "", "")
    assert not any(map(is_alive, pids))


def test_ctrl_c_lets_the_controller_close_its_executors(kind: Kind, tmp_path: Path) -> None:
    process, pids = start_controller(kind, tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=CALL_S)
    assert process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert [(tmp_path / name).read_text() for name in "ab"] == ["closed", "closed"]
    assert not any(map(is_alive, pids))
