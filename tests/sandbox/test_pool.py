from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import ConfigError
from llamarl.sandbox.pool import Failure, Limits, WorkerPool
from llamarl.sandbox.pool_server import FailureKind
from tests.nightly import nightly, some

FUNCTION = "tests.sandbox.verbs:act"


def alive(pid: int) -> bool:
    """False for zombies too: they run nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def until(condition: Callable[[], bool], what: str, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        os.sched_yield()
        time.sleep(0.005)


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(FUNCTION, Limits(num_workers=2, cpu_s=1, wall_s=200.0))
    yield made
    made.close()


def kinds(results: list[Any]) -> list[FailureKind | None]:
    return [result.kind if isinstance(result, Failure) else None for result in results]


def test_results_in_order_and_any_json(pool: WorkerPool) -> None:
    items = [["echo", value] for value in [1, None, "é\x00\ud800\n", [1.5, {"a": True}], "x" * 3_000_000, *range(200)]]
    assert pool.map(items, 240) == [argument for _, argument in items]
    assert pool.map([], 240) == []
    assert len(children(pool._server.pid)) == 2


def test_failures_are_values_and_the_pool_goes_on(pool: WorkerPool) -> None:
    jobs = [["raise", "no"], ["memory", 4 * 2**30], ["exit", 3], ["spin", 0], ["echo", 1]]
    results = pool.map(jobs, 240)
    assert kinds(results) == [FailureKind.ERROR, FailureKind.ERROR, FailureKind.DIED, FailureKind.CPU, None]
    assert "ValueError: no" in results[0].reason
    assert "MemoryError" in results[1].reason
    assert "exit code 3" in results[2].reason
    assert pool.map([["echo", 2]] * 5, 240) == [2] * 5


@nightly("real time; by day limits are those of items")
def test_waiting_costs_no_cpu_but_has_a_wall_limit() -> None:
    pool = WorkerPool(FUNCTION, Limits(num_workers=2, cpu_s=1, wall_s=2.0))
    try:
        pool.map([["echo", 0]], 240)
        results = pool.map([["sleep", 60], ["echo", 1], ["echo", 2]], 240)
        assert kinds(results) == [FailureKind.WALL, None, None]
    finally:
        pool.close()


@nightly("waits in real time; by day a worker that is late is replaced")
def test_limit_is_per_item_not_per_worker() -> None:
    pool = WorkerPool("tests.sandbox.verbs:burn", Limits(num_workers=1, cpu_s=1, wall_s=240.0))
    try:
        pids = pool.map([0.4] * 5, 240)
        assert len(set(pids)) == 1
    finally:
        pool.close()


@nightly("waits for its limit; by day items fail one by one and the pool goes on")
def test_batch_budget_keeps_what_is_done(pool: WorkerPool) -> None:
    pool.map([["echo", 0]], 240)
    results = pool.map([["echo", 1], ["sleep", 60], ["sleep", 60], ["echo", 2]], 4.0)
    assert results[0] == 1
    assert kinds(results) == [None, *[FailureKind.BATCH] * 3]
    assert pool.map([["echo", 3]], 240) == [3]


def test_workers_are_recycled() -> None:
    pool = WorkerPool(FUNCTION, Limits(num_workers=1, recycle_after=3))
    try:
        pids = pool.map([["pid", 0]] * 10, 240)
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 3, 1]
        assert not any(map(alive, pids[:9]))
    finally:
        pool.close()


@pytest.mark.parametrize("times", [1, 2])
def test_killed_worker_costs_its_item_one_retry(pool: WorkerPool, tmp_path: Path, times: int) -> None:
    mark = tmp_path / "started"
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(pool.map([["wait", str(mark)], *[["echo", 1]] * 50], 240)))
    thread.start()
    for kill in range(times):
        until(lambda kill=kill: mark.exists() and mark.read_text().count("\n") > kill, "an item starts")
        os.kill(int(mark.read_text().split()[kill]), signal.SIGKILL)
    mark.with_suffix(".go").touch()
    thread.join(240)
    started = [int(line) for line in mark.read_text().split()]
    assert len(started) == 2
    if times == 1:
        assert results[0] == started[1]
    else:
        assert results[0].kind is FailureKind.DIED
    assert results[1:] == [1] * 50


def test_idle_workers_killed_between_batches(pool: WorkerPool) -> None:
    pool.map([["echo", 1]] * 10, 240)
    for pid in children(pool._server.pid):
        os.kill(pid, signal.SIGKILL)
    assert pool.map([["echo", value] for value in range(10)], 240) == list(range(10))


def test_idle_server_killed_between_batches(pool: WorkerPool) -> None:
    pool.map([["echo", 1]] * 10, 240)
    os.kill(pool._server.pid, signal.SIGKILL)
    assert pool.map([["echo", value] for value in range(10)], 240) == list(range(10))


def test_an_item_that_kills_servers_costs_two() -> None:
    pool = WorkerPool(FUNCTION, Limits(num_workers=1))
    try:
        results = pool.map([["echo", 1], ["parricide", 0], *[["echo", 2]] * 20], 240)
        assert kinds(results) == [None, FailureKind.DIED, *[None] * 20]
        assert pool.map([["echo", 2]], 240) == [2]
    finally:
        pool.close()


def test_killed_fork_server_is_replaced(pool: WorkerPool, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(pool.map([["wait", str(mark)], ["echo", 5]], 240)))
    thread.start()
    until(mark.exists, "an item starts")
    os.kill(pool._server.pid, signal.SIGKILL)
    until(lambda: mark.read_text().count("\n") == 2, "the item starts again")
    until(lambda: not alive(int(mark.read_text().split()[0])), "the old worker ends, still waiting")
    mark.with_suffix(".go").touch()
    thread.join(240)
    assert results == [int(mark.read_text().split()[1]), 5]


@nightly("real time; by day a stopped server is replaced")
def test_stopped_worker_holds_nobody_up() -> None:
    pool = WorkerPool(FUNCTION, Limits(num_workers=1, wall_s=3.0))
    try:
        pool.map([["echo", 1]], 240)
        os.kill(children(pool._server.pid)[0], signal.SIGSTOP)
        results = pool.map([["echo", "x" * 5_000_000], ["echo", 2]], 240)
        assert kinds(results) == [FailureKind.WALL, None]
    finally:
        pool.close()


def test_stopped_server_is_replaced(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.sandbox.pool._STOP_TIMEOUT_S", 0.2)
    pool.map([["echo", 1]], 240)
    os.kill(pool._server.pid, signal.SIGSTOP)
    assert kinds(pool.map([["echo", 1]], 0.2)) == [FailureKind.BATCH]
    assert pool.map([["echo", 1]], 240) == [1]


def test_worker_that_closes_its_stream() -> None:
    pool = WorkerPool(FUNCTION, Limits(num_workers=2, cpu_s=1, wall_s=240.0))
    try:
        results = pool.map([["closed", 0], ["echo", 1], ["echo", 2]], 240)
        assert kinds(results) == [FailureKind.DIED, None, None]
    finally:
        pool.close()


def test_close_ends_every_process_and_is_idempotent(pool: WorkerPool) -> None:
    pool.map([["echo", 1]] * 10, 240)
    pids = [pool._server.pid, *children(pool._server.pid)]
    assert len(pids) == 3
    pool.close()
    pool.close()
    assert not any(map(alive, pids))
    assert pool._server is None
    with pytest.raises(RuntimeError, match="closed"):
        pool.map([1], 1)


def test_close_during_a_batch(pool: WorkerPool, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(pool.map([["wait", str(mark)]] * 3, 240)))
    thread.start()
    until(mark.exists, "an item starts")
    pool.close()
    thread.join(240)
    assert kinds(results) == [FailureKind.BATCH] * 3
    until(lambda: not any(alive(int(pid)) for pid in mark.read_text().split()), "workers end")


def test_close_during_the_start() -> None:
    pool, results = WorkerPool(FUNCTION, Limits(num_workers=1, cpu_s=240, wall_s=240.0)), []
    thread = threading.Thread(target=lambda: results.extend(pool.map([["spin", 0]], 240)))
    thread.start()
    until(lambda: pool._server is not None, "the server starts")
    pool.close()
    thread.join(240)
    assert kinds(results) == [FailureKind.BATCH]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a kernel that hands orphans to the fork server")
@pytest.mark.parametrize("end", some(["exit", "close", "hang"], 1))
def test_what_a_worker_has_started_ends_with_it(tmp_path: Path, end: str) -> None:
    mark = tmp_path / ("exit" if end == "exit" else "hang")
    pool = WorkerPool(FUNCTION, Limits(num_workers=1, wall_s=8.0 if end == "hang" else 240.0))
    thread = threading.Thread(target=pool.map, args=([["start others", str(mark)]], 240.0))
    thread.start()
    until(lambda: mark.exists() and len(mark.read_text().split()) >= 2, "both to start")
    if end == "close":
        pool.close()
    thread.join()
    pids = [int(pid) for pid in mark.read_text().split()]
    assert len(pids) == (4 if end == "exit" else 2), "an item is tried twice where its worker died"
    until(lambda: not any(map(alive, pids)), "their end")
    pool.close()


def test_a_worker_that_says_what_is_no_json_fails_its_batch_only(pool: WorkerPool) -> None:
    assert kinds(pool.map([["babble", 0]], 240)) == [FailureKind.DIED]
    assert pool.map([["echo", 1]], 240) == [1]


def test_a_worker_has_no_hand_on_the_stream_of_its_pool(pool: WorkerPool) -> None:
    assert pool.map([["input", 0]], 240) == [os.devnull]


def test_two_threads_share_a_pool(pool: WorkerPool) -> None:
    results: dict[int, list[Any]] = {}
    threads = [
        threading.Thread(target=lambda k=k: results.update({k: pool.map([["echo", k]] * 50, 240)})) for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert results == {k: [k] * 50 for k in range(4)}


_HOST = """
import os, sys, threading
from llamarl.sandbox.pool import Limits, WorkerPool
pool = WorkerPool("tests.sandbox.verbs:act", Limits(num_workers=2, cpu_s=600, wall_s=600.0))
def start():
    pool.map([["echo", 1]] * 4, 600)
thread = threading.Thread(target=start)  # the server must outlive the thread that started it
thread.start(); thread.join()
if os.fork() == 0:  # a forked copy holds the streams open
    os.write(1, f"{os.getpid()}\\n".encode())
    threading.Event().wait(600)
os.write(1, f"{pool._server.pid} server\\n".encode())
pool.map([["spin", 0]] * 2, 600)
"""


def test_nothing_outlives_a_killed_host() -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", _HOST], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert host.stdout is not None
    lines = sorted((host.stdout.readline().split() for _ in range(2)), key=len)
    copy, server = int(lines[0][0]), int(lines[1][0])
    try:
        until(lambda: len(children(server)) == 2, "workers spin")
        pids = [server, *children(server)]
        host.kill()
        host.wait(240)
        until(lambda: not any(map(alive, pids)), "server and workers end")
    finally:
        host.kill()
        os.kill(copy, signal.SIGKILL)
        host.stdout.close()


def test_secrets_and_signal_masks_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    monkeypatch.setenv("LLAMARL_SETTING", "told")
    pool = WorkerPool(FUNCTION, Limits(num_workers=1, cpu_s=1))
    results: list[Any] = []

    def blocked() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXCPU, signal.SIGCHLD])
        results.extend(pool.map([["environment", 0], ["spin", 0]], 240))

    thread = threading.Thread(target=blocked)
    thread.start()
    thread.join(240)
    pool.close()
    assert "SECRET_TOKEN" not in results[0]
    assert results[0]["LLAMARL_SETTING"] == "told"
    assert results[1].kind is FailureKind.CPU


def test_wrong_settings_and_functions() -> None:
    with pytest.raises(ConfigError, match="cpu_s = 0"):
        WorkerPool(FUNCTION, Limits(cpu_s=0))
    pool = WorkerPool("tests.sandbox.no_such_module:act")
    with pytest.raises(RuntimeError, match="did not start"):
        pool.map([1], 240)
    pool.close()
