"""`Channel`: a bounded first-in-first-out edge inside the controller."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class ChannelClosed(RuntimeError):
    """The channel was closed and is empty."""


class Channel(Generic[T]):
    """Carries records of one type from any number of producers to one consumer, who takes them in batches."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._items = deque[T]()
        self._closed = False
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: T) -> None:
        """Waits while the channel is full. Raises ChannelClosed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or len(self._items) < self.capacity)
            if self._closed:
                raise ChannelClosed(self.name)
            self._items.append(item)
            self._changed.notify_all()

    async def get_batch(self, max_items: int) -> list[T]:
        """Waits for at least one item and takes up to `max_items`. Raises ChannelClosed once closed and drained."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or bool(self._items))
            if not self._items:
                raise ChannelClosed(self.name)
            batch = [self._items.popleft() for _ in range(min(max_items, len(self._items)))]
            self._changed.notify_all()
            return batch

    async def close(self) -> None:
        """No more puts; what is inside can still be taken."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()


def deal(items: Iterable[T], loads: list[int], weight: int) -> list[list[T]]:
    """Scatters `items`, in order, each to the least loaded receiver, whose load then grows by `weight`."""
    dealt = [list[T]() for _ in loads]
    loads = list(loads)
    for item in items:
        receiver = loads.index(min(loads))
        dealt[receiver].append(item)
        loads[receiver] += weight
    return dealt
