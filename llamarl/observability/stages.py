"""Stages of work that takes long: what a thread is at, in a few words, for other threads that ask meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_stages = dict[int, str]()


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Meanwhile this thread is at `text`, such as `loading the model`; also a decorator."""
    thread, outer = threading.get_ident(), stage_of(threading.get_ident())
    _stages[thread] = text
    try:
        yield
    finally:
        _stages[thread] = outer


def stage_of(thread: int | None) -> str:
    """Stage of the thread with this identifier; empty: nothing that has a name."""
    return _stages.get(thread or 0, "")


def stage_here(thread: int) -> str:
    """Returns the stage of a thread, or, if that thread has none, the newest stage of any other thread of this
    process. Empty means that no thread has a stage."""
    return stage_of(thread) or next((text for text in reversed([*_stages.values()]) if text), "")
