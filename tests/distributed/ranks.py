"""Real processes for the ranks of a group; none is left behind, whatever happens."""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from llamarl.distributed.links import Rendezvous, RendezvousStore
from tests.fork_server import fork_server

if TYPE_CHECKING:
    from llamarl.distributed.mesh import RankMesh

WAIT_S = 240.0


class Worker:
    """A process that runs functions of importable modules, one after the other."""

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        context = fork_server()
        self._connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._connection.send_bytes(pickle.dumps((function, arguments)))

    def result(self) -> Any:
        """What it returned, or the exception that it raised; EOFError, with the exit code, when the process is gone."""
        assert self._connection.poll(WAIT_S), f"no answer in {WAIT_S} s"
        try:
            return pickle.loads(self._connection.recv_bytes())
        except EOFError:
            self.process.join(WAIT_S)
            raise EOFError(f"process {self.process.pid} is gone, with exit code {self.process.exitcode}") from None

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)
        self._connection.close()


def _serve(connection: Connection) -> None:
    import torch

    faulthandler.enable()
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:  # the tests are over, or were killed
            return
        try:
            result = function(*arguments)
        except Exception as error:  # shown to the test
            result = error
        # Not `send`: torch would share each tensor's memory, over a connection of its own.
        connection.send_bytes(pickle.dumps(result))


class Workers:
    """Processes that tests share: what they have imported, compiled and connected stays."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self._all: list[Worker] = []

    @contextmanager
    def take(self, count: int) -> Iterator[list[Worker]]:
        """Those that still live afterwards and have answered everything can be taken again."""
        while len(self._idle) < count:
            self._all.append(Worker())
            self._idle.append(self._all[-1])
        taken, self._idle = self._idle[:count], self._idle[count:]
        try:
            yield taken
        except BaseException:
            for worker in taken:
                worker.kill()
            raise
        self._idle += [worker for worker in taken if worker.process.is_alive()]

    def close(self) -> None:
        for worker in self._all:
            worker.kill()


def num_ranks(sizes: Mapping[str, int]) -> int:
    """Processes of a layout; those of ep are among them."""
    return math.prod(size for axis, size in sizes.items() if axis != "ep")


@contextmanager
def rendezvous() -> Iterator[Rendezvous]:
    """Where ranks meet."""
    with closing(RendezvousStore()) as store:
        yield store.rendezvous


def join(where: Rendezvous, rank: int, sizes: Mapping[str, int], **options: Any) -> RankMesh:
    """As rank `rank`, which a cluster would have put into the environment."""
    from llamarl.distributed.mesh import CPU, join_mesh

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks(sizes))}
    return join_mesh(sizes, where, CPU, **options)


def results(workers: Sequence[Worker]) -> list[Any]:
    return [worker.result() for worker in workers]
