"""`Executor`: the methods that an executor may declare; its host calls these on one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar


class Executor:
    """Base of every executor: a plain class whose public methods can be called through a handle.

    The constructor, all methods and all hooks run on one thread, one at a time, so an executor needs no locks.
    A method may return a `concurrent.futures.Future` to answer later, for example from `work()`. When the caller's
    timeout has passed the host cancels that future; resolve it with
    `if future.set_running_or_notify_cancel(): future.set_result(...)` so that no result goes to nobody.
    """

    SPANS: ClassVar[dict[str, str]] = {}
    """Span name per method (and `work`) that counts as work of the run; other methods leave no span."""
    SHARES_CALLS: ClassVar[bool] = False
    """Whether ranks can put together (`whole`) the arguments of a call of which each has some parts."""

    def work(self) -> bool:
        """One piece of own work, called whenever no call waits.

        True: there may be more, call again. False: sleep until the next call. Raising fails the executor.
        """
        return False

    def whole(self, parts: Mapping[int, bytes], owners: Sequence[int], num_bytes: int) -> bytes | memoryview:
        """Arguments of a call; all ranks make this call together.

        Args:
            parts: those that have come here, by their place.
            owners: the rank that has each part.
            num_bytes: of all.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Gives back what the executor holds; the last thing that runs."""
