"""`RankGroup`: the processes of one executor. Tensors go by gloo (CPU) or NCCL (GPU), small messages by way of rank 0.

Ranks meet at a file, gone once all have met: a path that does not exist yet, in a folder that only this user may enter.
Two runs cannot collide, and nothing listens but at `host` (torch's TCPStore listens at every address and knows no
password). Across hosts the folder is on a shared file system and `host` is each machine's own address.

There is no default process group: several groups can live in one process, and a failure ends only its own.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.distributed.links import accept, connect

CPU = torch.device("cpu")
BROKEN = (OSError, EOFError, AuthenticationError)
"""What a connection does whose other end is gone, silent, or none of ours."""


class RanksLost(RuntimeError):
    """Ranks of this executor died, failed or stayed silent; the message says who waited for what."""


def own_rank() -> tuple[int, int]:
    """Rank of this process and number of ranks, as a cluster or torchrun has put them into the environment."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class RankGroup:
    """One rank's end. All ranks make the same calls in the same order; not thread-safe."""

    def __init__(
        self,
        meeting: str | Path,
        *,
        rank: int,
        size: int,
        device: torch.device = CPU,
        host: str = "127.0.0.1",
        start_timeout_s: float = 120.0,
        timeout_s: float = 60.0,
    ) -> None:
        """
        Args:
            meeting: the file; the same for all ranks of this executor, and another for each epoch of it.
            device: where the tensors of collectives are.
            start_timeout_s: for all ranks to arrive.
            timeout_s: for one collective, message or reply.

        Raises:
            RanksLost: not all ranks have come.
        """
        assert not Path(meeting).parent.stat().st_mode & 0o077, f"others may enter the folder of {meeting}"
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._links = dict[int, Connection]()
        self._collectives: Any = None
        deadline_s = time.monotonic() + start_timeout_s
        store = dist.FileStore(str(meeting), size)
        store.set_timeout(timedelta(seconds=start_timeout_s))
        try:
            self._connect(store, host, deadline_s)
            self._collectives = process_group(store, rank, size, device, host, timeout_s)
            self.all_reduce(torch.zeros(1, device=device), "meet").item()
        except (RuntimeError, *BROKEN) as error:
            self.close()
            cause = f"{type(error).__name__}: {error}"
            raise RanksLost(f"rank {rank} did not meet all {size} ranks in {start_timeout_s:g} s: {cause}") from error
        finally:
            if rank == 0:
                Path(meeting).unlink(missing_ok=True)

    def all_reduce(self, x: Tensor, what: str) -> Tensor:
        """The sum over all ranks, the same bits on each; may overwrite `x`. Raises RanksLost, which says `what`."""
        x = x.contiguous()
        self._run("allreduce", [x], what=what)
        return x

    def all_gather(self, x: Tensor, what: str) -> Tensor:
        """The `x` of every rank, [ranks, ...]. Raises RanksLost."""
        gathered = x.new_empty((self.size, *x.shape))
        self._run("allgather", [list(gathered.unbind())], [x.contiguous()], what=what)
        return gathered

    def exchange(self, value: Any) -> list[Any]:
        """Gives a small picklable value to all ranks and returns theirs in rank order. Raises RanksLost."""
        if self.rank:
            self.send(0, value)
            return self.receive(0, "collect values")
        values = [value, *(self.receive(rank, "give a value") for rank in range(1, self.size))]
        for rank in range(1, self.size):
            self.send(rank, values)
        return values

    def send(self, rank: int, message: Any) -> None:
        """To rank 0, or from there to any other. Raises RanksLost."""
        try:
            self._link(rank).send(message)
        except BROKEN as error:
            raise RanksLost(f"rank {self.rank} cannot send to rank {rank}: {error}") from error

    def poll(self, rank: int, wait_s: float = 0.0) -> bool:
        """`rank` has sent something, or is gone."""
        return self._link(rank).poll(wait_s)

    def receive(self, rank: int, what: str) -> Any:
        """The next message from `rank`, which is to do `what`. Raises RanksLost."""
        try:
            if self._link(rank).poll(self.timeout_s):
                return self._link(rank).recv()
        except BROKEN as error:
            raise RanksLost(f"rank {self.rank} waited for rank {rank} to {what}, but it is gone") from error
        raise RanksLost(f"rank {self.rank} waited {self.timeout_s:g} s for rank {rank} to {what}")

    def leave_collectives(self) -> None:
        """No collective any more: whoever waits for this rank in one fails at once."""
        if (collectives := self._collectives) is not None:
            self._collectives = None
            collectives.abort()

    def close(self) -> None:
        """Ends all connections; may be called again."""
        self.leave_collectives()
        for link in self._links.values():
            link.close()
        self._links = {}

    def _run(self, name: str, *arguments: Any, what: str) -> None:
        try:
            getattr(self._collectives, name)(*arguments).wait()
        except (RuntimeError, AttributeError) as error:
            cause = error if self._collectives is not None else "it has left them"
            self.leave_collectives()
            raise RanksLost(f"rank {self.rank} of {self.size} could not {what}: {cause}") from error

    def _link(self, rank: int) -> Connection:
        if rank not in self._links:
            raise RanksLost(f"rank {self.rank} has no connection to rank {rank}: it is closed")
        return self._links[rank]

    def _connect(self, store: dist.Store, host: str, deadline_s: float) -> None:
        """Rank 0 listens, the others tell it who they are, and go on once all have come."""
        if self.rank:
            secret, place = store.get("rank 0").decode().split()
            self._links[0] = link = connect(place, secret, self.timeout_s)
            link.send(self.rank)
            if not link.poll(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError("others are missing")
            link.recv()
            return
        secret = secrets.token_hex(16)
        with socket.create_server((host, 0)) as listener:
            store.set("rank 0", f"{secret} {host}:{listener.getsockname()[1]}")
            while len(self._links) < self.size - 1:
                listener.settimeout(max(1e-3, deadline_s - time.monotonic()))
                accepted, _ = listener.accept()
                with suppress(*BROKEN):  # a stranger, or one who will be missed
                    link = accept(accepted, secret, self.timeout_s)
                    self._links[link.recv()] = link
        for link in self._links.values():
            link.send("all have come")


def process_group(store: dist.Store, rank: int, size: int, device: torch.device, host: str, timeout_s: float) -> Any:
    """gloo that listens at `host`, or NCCL on GPUs, beside all other groups. Raises RuntimeError."""
    if device.type != "cpu":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, size, options)
