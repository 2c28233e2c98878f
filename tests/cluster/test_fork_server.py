"""Ranks that a server forks: what is killed, what differs from an ordinary start, what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from llamarl.cluster import fork_server, launcher, watched
from llamarl.cluster.api import Cluster, ExecutorHandle, ExecutorSpec, MeshFailed
from tests.cluster.harness import CALL_S, HERE, SPAWN_S, Kind, echo, forking, is_alive, run, until
from tests.nightly import also, nightly

NUMBER = "OMP_NUM_THREADS"


@pytest.fixture(params=["monarch", *also("processes")])
def kind(request: pytest.FixtureRequest) -> Literal["monarch", "processes"]:
    """Kind of the cluster whose ranks are forked where a server is."""
    return request.param


def served(kind: str) -> Kind:
    return "forked" if kind == "monarch" else "forked processes"


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_forked(handle: ExecutorHandle) -> bool:
    """Whether its ranks have come from a server."""
    return all(parent(pid) != os.getpid() for pid in handle.pids)


def children(of: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{of}/task/{of}/children").read_text().split()]


def launchers() -> list[int]:
    """Processes of this one that stand for a forked rank."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if parent(int(folder.name)) == os.getpid() and b"launcher" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_is_killed_is_named_as_one_that_started_by_itself(kind: Kind, number: signal.Signals) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        (stands,) = launchers()
        assert is_forked(handle)
        child = await handle.call("start_child", timeout_s=CALL_S)
        os.kill(handle.pids[0], number)
        error = await asyncio.wait_for(handle.failed, CALL_S)
        assert isinstance(error, MeshFailed)
        assert error.cause == f"pid {handle.pids[0]} was killed by {number.name}"
        await until(lambda: not is_alive(child) and not is_alive(stands), CALL_S)

    run(main, served(kind))


def test_exit_codes_are_told(kind: Kind) -> None:
    async def main(cluster: Cluster) -> None:
        for code in (0, 3):
            handle = await cluster.spawn(echo(f"exit-{code}"), SPAWN_S)
            with pytest.raises(MeshFailed, match=rf"pid {handle.pids[0]} ended with exit code {code}"):
                await handle.call("exit", code, timeout_s=CALL_S)

    run(main, served(kind))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_ends_with_its_launcher(kind: Kind, stopped: bool) -> None:
    """However that is killed, and whatever the rank is at; also what the rank has started."""

    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        child = await handle.call("start_child", timeout_s=CALL_S)
        if stopped:
            os.kill(handle.pids[0], signal.SIGSTOP)
        (stands,) = launchers()
        os.kill(stands, signal.SIGKILL)
        await asyncio.wait_for(handle.failed, CALL_S)
        await until(lambda: not is_alive(handle.pids[0]) and not is_alive(child), CALL_S)

    run(main, served(kind))


def test_a_signal_to_end_reaches_the_rank(kind: Kind) -> None:
    """Monarch sends it to the process that it knows."""

    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo(), SPAWN_S)
        (stands,) = launchers()
        os.kill(stands, signal.SIGTERM)
        await asyncio.wait_for(handle.failed, CALL_S)
        await until(lambda: not is_alive(handle.pids[0]) and not is_alive(stands), CALL_S)

    run(main, served(kind))


@nightly("waits for a server that is gone; by day a killed rank is named, and nothing outlives the controller")
def test_without_its_server_a_rank_goes_on_and_the_next_starts_by_itself(kind: Kind, tmp_path: Path) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(echo("first"), SPAWN_S)
        assert is_forked(handle)
        os.killpg(server.pid, signal.SIGKILL)
        again = await cluster.spawn(echo("again"), SPAWN_S)
        assert not is_forked(again)
        assert await handle.call("echo", 1, timeout_s=CALL_S) == 1
        assert await again.call("echo", 2, timeout_s=CALL_S) == 2
        os.kill(handle.pids[0], signal.SIGKILL)  # its parent is another one by now
        error = await asyncio.wait_for(handle.failed, CALL_S)
        assert isinstance(error, MeshFailed) and f"pid {handle.pids[0]}" in error.cause

    with forking() as server:
        run(main, kind, tmp_path)
    assert launcher.SERVER_ENDED in (tmp_path / "again.log").read_text()
    assert launcher.SERVER_ENDED not in (tmp_path / "first.log").read_text()


@nightly("more of its ends; by day ranks are killed and end with their launcher")
def test_a_server_that_is_killed_while_it_is_asked_costs_a_start_only(kind: Kind, tmp_path: Path) -> None:
    """Stopped, so that it has the request and does not answer."""

    async def main(cluster: Cluster) -> None:
        await until(lambda: server.is_ready("executors"), CALL_S)
        os.killpg(server.pid, signal.SIGSTOP)
        spawning = asyncio.ensure_future(cluster.spawn(echo(), SPAWN_S))
        await until(lambda: bool(launchers()), CALL_S)
        await asyncio.sleep(0.3)
        os.killpg(server.pid, signal.SIGKILL)
        assert not is_forked(handle := await spawning)
        assert await handle.call("echo", 1, timeout_s=CALL_S) == 1

    with forking() as server:
        run(main, kind, tmp_path)


@nightly("more of its ends; by day ranks are killed and end with their launcher")
def test_a_server_that_does_not_answer_costs_a_start_only(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when it goes on, it starts no second process for that rank."""
    patient, hasty = f"WAIT_S = {launcher.WAIT_S}", "WAIT_S = 0.3"
    assert patient in watched._LAUNCHER
    monkeypatch.setattr(watched, "_LAUNCHER", watched._LAUNCHER.replace(patient, hasty))

    async def main(cluster: Cluster) -> None:
        await until(lambda: server.is_ready("executors"), CALL_S)
        os.killpg(server.pid, signal.SIGSTOP)
        first = await cluster.spawn(echo(), SPAWN_S)
        assert not is_forked(first)
        os.killpg(server.pid, signal.SIGCONT)
        second = await cluster.spawn(echo("second"), SPAWN_S)
        assert is_forked(second)
        await until(lambda: set(of_server()) == {*second.pids}, CALL_S)

    def of_server() -> list[int]:
        """Ranks below the last stage of the server."""
        (stage,) = children(server.pid)
        return children(stage)

    with forking() as server:
        run(main, kind, tmp_path)
    assert "0.3 s" in (tmp_path / "echo.log").read_text()


def test_a_rank_is_not_started_before_the_server_is_ready(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Monarch waits for a started rank less long than imports may take."""

    async def main(cluster: Cluster) -> None:
        monkeypatch.setattr(server, "is_ready", lambda module: is_ready and module == "executors")
        stages, is_ready = list[str](), False
        spawning = asyncio.ensure_future(cluster.spawn(echo(), SPAWN_S, stages.append))
        await asyncio.sleep(0.5)
        assert not launchers() and stages == ["imports modules"]
        is_ready = True
        assert is_forked(await spawning)

    with forking() as server:
        run(main, kind)


@nightly("more of its ends; by day ranks are killed and end with their launcher")
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({NUMBER: "2", "MKL_NUM_THREADS": "1"}, "MKL_NUM_THREADS"),
        *also(
            ({"MALLOC_ARENA_MAX": "1"}, "MALLOC_ARENA_MAX"),
            ({"PYTHONHASHSEED": "7"}, "PYTHONHASHSEED"),
            ({NUMBER: "2,1"}, NUMBER),
        ),
    ],
)
def test_what_libraries_read_as_they_are_loaded_is_never_another(
    kind: Kind, env: Mapping[str, str], said: str, tmp_path: Path
) -> None:
    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(replace(echo(), env={**env}), SPAWN_S)
        assert not is_forked(handle)
        assert await handle.call("environ", *env, timeout_s=CALL_S) == list(env.values())

    with forking():
        run(main, kind, tmp_path)
    (line,) = (tmp_path / "echo.log").read_text().splitlines()
    assert said in line


def test_an_executor_of_somebody_else_starts_by_itself(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "others.py").write_text("from executors import Echo as Other\n")

    async def main(cluster: Cluster) -> None:
        paths = (str(tmp_path), str(HERE))
        spec = ExecutorSpec(name="other", target="others:Other", code_paths=paths)
        assert not is_forked(await cluster.spawn(spec, SPAWN_S))

    run(main, served(kind))


def test_a_forked_rank_finds_what_one_finds_that_starts_by_itself(kind: Kind) -> None:
    found = list[dict[str, Any]]()

    async def main(cluster: Cluster) -> None:
        handle = await cluster.spawn(
            replace(echo(), env={"LLAMARL_TEST": "1", "TOKENIZERS_PARALLELISM": "no"}), SPAWN_S
        )
        found.append(await handle.call("surroundings", timeout_s=CALL_S))

    run(main, kind)
    run(main, served(kind))
    ordinary, forked = found
    assert forked["environment"].pop("HYPERACTOR_MESH_BOOTSTRAP_ENABLE_PDEATHSIG") == "false"
    changing = {name for name in ordinary["environment"] if name.startswith(("HYPERACTOR_", "BOOTSTRAP_"))}
    for one in found:
        for name in changing:
            del one["environment"][name]
    # An ordinary start inherits what its parent lets it; a forked one holds the pipe by which it is killed.
    more = Counter(forked.pop("descriptors")) - Counter(ordinary.pop("descriptors"))
    assert not more - Counter({"pipe:[N]": 1})
    for name, value in ordinary.items():
        assert forked[name] == value, (name, forked[name], value)


@nightly("four starts that import torch; what libraries read as they are loaded is compared below")
@pytest.mark.parametrize("number", [2, 1])
def test_threads_are_as_many_as_in_one_that_starts_by_itself(kind: Kind, number: int) -> None:
    """Libraries read their number as they are loaded, which was with one thread."""
    found = list[dict[str, int]]()

    async def main(cluster: Cluster) -> None:
        env = {name: str(number) for name in (NUMBER, "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        handle = await cluster.spawn(replace(echo(), env=env), SPAWN_S)
        assert is_forked(handle) == (launcher.SERVER in os.environ)
        found.append(await handle.call("thread_counts", timeout_s=CALL_S))

    run(main, kind)
    with forking("torch"):
        run(main, kind)
    ordinary, forked = found
    assert forked == ordinary
    assert ordinary["torch"] == ordinary["of numpy"] == number


class Pretended:
    """A server that starts nothing."""

    begun, ended = 0, 0
    place = "1:2"

    def __init__(self) -> None:
        Pretended.begun += 1

    def close(self) -> None:
        Pretended.ended += 1


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    monkeypatch.setattr(fork_server, "ForkServer", Pretended)
    monkeypatch.setattr(Pretended, "begun", 0)
    monkeypatch.setattr(Pretended, "ended", 0)
    monkeypatch.delenv(fork_server.SWITCH, raising=False)
    return Pretended


def test_simultaneous_runs_of_a_process_share_a_server(pretended: type[Pretended]) -> None:
    with fork_server.fork_server("monarch"):
        with fork_server.fork_server("monarch"):
            assert os.environ[launcher.SERVER] == pretended.place
        assert os.environ[launcher.SERVER] == pretended.place and (pretended.begun, pretended.ended) == (1, 0)
    assert launcher.SERVER not in os.environ and pretended.ended == 1
    with fork_server.fork_server("monarch"):
        pass
    assert (pretended.begun, pretended.ended) == (2, 2)


@pytest.mark.parametrize(("kind", "switch"), [("inline", "1"), ("hosts", "1"), ("monarch", "0"), ("processes", "0")])
def test_no_server_without_ranks_or_with_the_switch(
    kind: str, switch: str, pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fork_server.SWITCH, switch)
    with fork_server.fork_server(kind):
        assert launcher.SERVER not in os.environ and launcher.ORDINARY not in os.environ
    assert not pretended.begun


def test_a_system_that_lacks_what_the_server_needs_has_none_and_says_so(
    pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with fork_server.fork_server("monarch"):
        assert launcher.SERVER not in os.environ and os.environ[launcher.ORDINARY]
    assert launcher.ORDINARY not in os.environ and not pretended.begun


def test_a_process_with_threads_or_a_device_does_not_fork() -> None:
    code = "from llamarl.cluster import fork_server; print(fork_server.unfit())"
    opens = "import os\nos.open('/dev/zero', os.O_RDONLY)\n"
    starts = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    devices = "fork_server.DEVICES = ('/dev/zero',)"
    for before, said in (("", ""), (opens, "/dev/zero"), (starts, "2 threads")):
        program = f"from llamarl.cluster import fork_server\n{devices}\n{before}{code}"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=CALL_S)
        assert done.returncode == 0 and said in done.stdout and bool(done.stdout.strip()) == bool(said)


CONTROLLER = """
import asyncio, sys
from tests.cluster.harness import SPAWN_S, echo, forking, run
from tests.cluster.test_fork_server import launchers

async def main(cluster):
    handle = await cluster.spawn(echo(), SPAWN_S)
    print(server.pid, *launchers(), *handle.pids, await handle.call("start_child", timeout_s=SPAWN_S), flush=True)
    await asyncio.to_thread(sys.stdin.read)

with forking() as server:
    run(main, sys.argv[1])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, *also(signal.SIGINT, None)])
def test_nothing_outlives_the_controller(kind: Kind, number: signal.Signals | None) -> None:
    """Killed, interrupted, or ended by itself; a rank may be stopped when the controller is killed."""
    command = [sys.executable, "-c", CONTROLLER, kind]
    with subprocess.Popen(
        command, cwd=HERE.parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 4 and all(map(is_alive, pids))
        if number == signal.SIGKILL:
            os.kill(pids[2], signal.SIGSTOP)
            process.kill()
        elif number:
            os.killpg(process.pid, number)
        process.communicate("", timeout=CALL_S)
    asyncio.run(until(lambda: not any(map(is_alive, pids)), CALL_S))


def test_a_server_that_still_imports_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not look at its socket, and a command that is refused would wait for it."""
    (tmp_path / "never_imported.py").write_text(f"import time\ntime.sleep({CALL_S})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fork_server, "_END_S", CALL_S)
    server = fork_server.ForkServer([["never_imported"]])
    started_s = time.monotonic()
    server.close()
    assert time.monotonic() - started_s < CALL_S / 2 and not is_alive(server.pid)
