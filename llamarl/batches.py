"""Consecutive batches of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def batches(items: Iterable[Item], size_of: Callable[[Item], int], max_size: int) -> Iterator[list[Item]]:
    """Splits items into consecutive lists whose sizes add up to `max_size` at most. A larger item is alone."""
    batch, size = list[Item](), 0
    for item in items:
        item_size = size_of(item)
        if batch and size + item_size > max_size:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item_size
    if batch:
        yield batch
