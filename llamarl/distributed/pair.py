"""`Pair`: two processes joined for tensors, beside the worlds of both."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch import Tensor

from llamarl.distributed.links import local_host
from llamarl.distributed.rendezvous import Rendezvous
from llamarl.distributed.store import TorchStore


class Pair:
    """A connection for requests, and a gloo group of two for tensors, on the addresses of that connection."""

    def __init__(
        self,
        connection: Connection,
        rendezvous: Rendezvous,
        name: str,
        rank: int,
        timeout_s: float,
    ) -> None:
        """Both ends make one.

        Args:
            connection: closed by `close`.
            name: of this pair among those that meet there.
            timeout_s: for the other end to come, and for each send or receive.

        Raises:
            RuntimeError, or what is in `BROKEN`: the other end is gone or silent.
        """
        self.connection, self._other = connection, 1 - rank
        self._store = TorchStore(rendezvous, timeout_s, answer_s=timeout_s)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=local_host(connection))]
        self.group = gloo(dist.PrefixStore(name, self._store), rank, 2, options)

    def send(self, x: Tensor) -> dist.Work:
        """Begins to."""
        return self.group.send([x], self._other, 0)

    def receive(self, x: Tensor) -> dist.Work:
        """Begins to fill `x`."""
        return self.group.recv([x], self._other, 0)

    def close(self) -> None:
        """Leaves the other end; may be called again."""
        self.connection.close()
        self._store.close()
