"""Processes for the tests."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that a child finds the functions of `weight_processes` by name

import weight_processes as processes

from llamarl.weight_sync.base import plan_writers
from llamarl.weight_sync.layout import Address, lay_out
from tests.fork_server import fork_server

Worker = tuple[ForkServerProcess, Connection]
Start = Callable[..., Worker]
DEADLINE_S = 240.0


def receive(connection: Connection) -> Any:
    assert connection.poll(DEADLINE_S), "the other process does not answer"
    return connection.recv()


@pytest.fixture(scope="session")
def context() -> ForkServerContext:
    return fork_server()


def begin(context: ForkServerContext, function: Callable[..., None], *args: Any) -> Worker:
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *args))
    process.start()
    theirs.close()
    return process, ours


def end(workers: Sequence[Worker]) -> None:
    for process, _ in workers:
        process.kill()
    for process, _ in workers:
        process.join(DEADLINE_S)


@pytest.fixture
def start(context: ForkServerContext) -> Iterator[Start]:
    """start(function, *args) runs function(connection, *args) in a process that is killed at the end of the test."""
    started = list[Worker]()

    def start_one(function: Callable[..., None], *args: Any) -> Worker:
        started.append(begin(context, function, *args))
        return started[-1]

    yield start_one
    end(started)


@pytest.fixture(scope="session")
def idle(context: ForkServerContext) -> Iterator[list[Worker]]:
    """Processes that wait for work; whoever takes one puts it back."""
    workers = [begin(context, processes.work) for _ in range(6)]
    yield list(workers)
    end(workers)


@pytest.fixture
def lend(idle: list[Worker]) -> Iterator[Start]:
    """Like `start`, in processes that serve many tests: nobody may kill them, and None must end `function`."""
    lent = list[Worker]()

    def lend_one(function: Callable[..., None], *args: Any) -> Worker:
        worker = idle.pop()
        lent.append(worker)
        worker[1].send((function, args))
        return worker

    yield lend_one
    for _, connection in reversed(lent):
        connection.send(None)
    for _, connection in lent:
        while receive(connection) != "done":
            pass
    idle += lent


def exchange_among(connections: Sequence[Connection]) -> None:
    """Carries values between trainer ranks until all are ready."""
    while True:
        answers = [receive(connection) for connection in connections]
        if all(kind == "ready" for kind, _ in answers):
            return
        for connection in connections:
            connection.send([value for _, value in answers])


class World:
    """Trainer ranks and generator ranks in processes of their own."""

    def __init__(
        self, start: Start, transport: str, trainer: tuple[int, int, int], dtype: str, folder: Path, share: float
    ) -> None:
        self._start, self._transport, self._dtype = start, transport, dtype
        self._folder, self._share = folder, share
        self._options = {"delta": True} if share < 1 else {}
        self._held = processes.held(*trainer)
        self.generators = list[tuple[ForkServerProcess, Connection, int]]()
        self.trainers = list[tuple[ForkServerProcess, Connection]]()

    def begin(self, tp: int, replicas: int) -> World:
        self.specs = processes.wanted(tp, self._dtype)
        self.restart_trainer()
        for rank in [rank for _ in range(replicas) for rank in range(tp)]:
            self.add_generator(rank)
        return self

    def restart_trainer(self) -> None:
        plans = plan_writers([lay_out(specs) for specs in self.specs], self._held)
        options = self._options | ({"folder": self._folder} if self._transport == "file" else {})
        self.trainers = [
            self._start(processes.trainer, self._transport, plan, specs, options, self._share)
            for plan, specs in zip(plans, self._held, strict=True)
        ]
        exchange_among([connection for _, connection in self.trainers])

    def add_generator(self, rank: int, **more: Any) -> None:
        options = self._options | ({"timeout_s": DEADLINE_S} if self._transport != "file" else {}) | more
        self.generators.append((*self._start(processes.generator, self.specs[rank], rank, options), rank))

    def publish(self, version: int, in_use: Sequence[int] = ()) -> Address:
        for _, connection in self.trainers:
            connection.send((version, in_use))
        addresses = [receive(connection) for _, connection in self.trainers]
        assert all(address == addresses[0] for address in addresses)
        return addresses[0]

    def fetch(self, version: int, address: Address) -> list[Any]:
        for _, connection, _ in self.generators:
            connection.send((version, address))
        return [receive(connection) for _, connection, _ in self.generators]

    def wrong(self, version: int, answers: Sequence[Any]) -> list[str]:
        """Tensors that are not, bit for bit, what was trained."""
        weights, faults = processes.whole(version, self._share), list[str]()
        for (_, _, rank), answer in zip(self.generators, answers, strict=False):
            if isinstance(answer, Exception):
                raise answer
            expected = processes.cut(weights, self.specs[rank])
            faults += [f"{key} on {rank}" for key, tensor in expected.items() if processes.bits(tensor) != answer[key]]
        return faults


@pytest.fixture
def world(lend: Start, start: Start, tmp_path: Path) -> Callable[..., World]:
    """world(transport, (fsdp, tp, pp), generator tp, replicas, dtype); with `mortal`, its processes may be killed.

    With a `share` below 1 only so many weights change, and deltas of them are sent.
    """

    def make(
        transport: str,
        trainer: tuple[int, int, int],
        tp: int,
        replicas: int = 1,
        dtype: str = "float32",
        mortal: bool = False,
        share: float = 1.0,
    ) -> World:
        chosen = start if mortal else lend
        return World(chosen, transport, trainer, dtype, tmp_path / uuid.uuid4().hex, share).begin(tp, replicas)

    return make
