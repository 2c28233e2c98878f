"""A trainer rank and a generator rank joined: a connection for requests, and a process group of two for tensors.

The connection is made first, by the generator; both prove that they know the publisher's secret. The group's own
rendezvous then runs over it, so neither the ranks' worlds nor a store that others can reach take part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

MAX_MESSAGE_BYTES = 1 << 20


def form_group(connection: Connection, rank: int, host: str, device: torch.device, timeout_s: float) -> Any:
    """The group of a trainer rank (0) and a generator rank (1): gloo, listening at `host`, or NCCL on GPUs.

    Both ends call this. Raises RuntimeError.
    """
    return _process_group(_PairStore(connection, timeout_s), rank, 2, device, host, timeout_s)


def _process_group(store: dist.Store, rank: int, size: int, device: torch.device, host: str, timeout_s: float) -> Any:
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


class _PairStore(dist.Store):
    """What a group's rendezvous needs of a store, between two processes: what one sets, the other is sent."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        super().__init__()
        self._connection = connection
        self._timeout_s = timeout_s
        self._values = dict[str, bytes]()

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._connection.send_bytes(key.encode() + b"\0" + self._values[key])

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline_s = time.monotonic() + (timeout.total_seconds() if timeout else self._timeout_s)
        while missing := [key for key in keys if key not in self._values]:
            if not self._connection.poll(max(0.0, deadline_s - time.monotonic())):
                raise RuntimeError(f"the other rank of the pair did not send {missing[0]}")
            key, _, value = self._connection.recv_bytes(MAX_MESSAGE_BYTES).partition(b"\0")
            self._values[key.decode()] = value

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def has_extended_api(self) -> bool:
        return False
