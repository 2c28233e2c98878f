"""`TorchStore`: a client of the rendezvous store for torch's process groups."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from llamarl.distributed.links import ANSWER_S, Rendezvous


class TorchStore(dist.Store):
    """Must live as long as the groups that were made with it, which use it again."""

    def __init__(self, rendezvous: Rendezvous, timeout_s: float, answer_s: float = ANSWER_S) -> None:
        """
        Args:
            timeout_s: longest wait for a value.
            answer_s: time in which the store must answer a request, in addition to its wait.

        Raises the errors in `BROKEN`.
        """
        super().__init__()
        self._connection = rendezvous.connect(timeout_s=answer_s)
        self._timeout_s, self._answer_s = timeout_s, answer_s
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._values([key], self._timeout_s)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._values(keys, min(self._timeout_s, timeout.total_seconds() if timeout else self._timeout_s))

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._call("wait", list(keys), 0.0)

    def has_extended_api(self) -> bool:
        return False

    def close(self) -> None:
        self._connection.close()

    def _values(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        values = self._call("wait", list(keys), timeout_s, wait_s=timeout_s)
        if None in values:
            raise dist.DistStoreError(f"no rank has set {keys[values.index(None)]!r} in {timeout_s:g} s")
        return values

    def _call(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        with self._lock:
            self._connection.send((method, *arguments))
            if not self._connection.poll(wait_s + self._answer_s):
                raise TimeoutError(f"the store did not answer `{method}` in {wait_s + self._answer_s:g} s")
            return self._connection.recv()
