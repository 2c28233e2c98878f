"""`Channel`: a bounded first-in-first-out edge inside the controller."""

from __future__ import annotations

import asyncio
import heapq
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
        self._filled = asyncio.Event()
        """Set while there may be items."""
        self._drained = asyncio.Event()
        """Set while there may be room."""

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: T) -> None:
        """Waits while the channel is full. Raises ChannelClosed."""
        while len(self._items) >= self.capacity and not self._closed:
            self._drained.clear()
            await self._drained.wait()
        if self._closed:
            raise ChannelClosed(self.name)
        self._items.append(item)
        self._filled.set()

    async def get_batch(self, max_items: int) -> list[T]:
        """Waits for at least one item and takes up to `max_items`. Raises ChannelClosed once closed and drained."""
        while not self._items and not self._closed:
            self._filled.clear()
            await self._filled.wait()
        if not self._items:
            raise ChannelClosed(self.name)
        batch = [self._items.popleft() for _ in range(min(max_items, len(self._items)))]
        self._drained.set()
        return batch

    async def close(self) -> None:
        """No more puts; what is inside can still be taken."""
        self._closed = True
        self._filled.set()
        self._drained.set()


def deal(items: Iterable[T], loads: list[int], weight: int) -> list[list[T]]:
    """Scatters `items`, in order, each to the least loaded receiver, whose load then grows by `weight`."""
    dealt = [list[T]() for _ in loads]
    queue = [(load, receiver) for receiver, load in enumerate(loads)]
    heapq.heapify(queue)
    for item in items:
        load, receiver = queue[0]
        dealt[receiver].append(item)
        heapq.heapreplace(queue, (load + weight, receiver))
    return dealt
