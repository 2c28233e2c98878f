"""Stages of work that takes long: what a thread is at, in a few words, for other threads that ask meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_stages = dict[int, str]()
DELAY_S = 8.0
"""Nothing that a user has written keeps a command, or a call from Python, silent for longer."""


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


@contextmanager
def told_of_delay(command: str, work: str = "checking the settings") -> Iterator[Callable[[], None]]:
    """Prints a line on stderr from time to time that names what is being done, until the end of the block or the first
    call of the function that it yields.

    Args:
        command: of llamarl; empty for a call from Python.
        work: is named where no stage is known.
    """
    thread, is_over = threading.get_ident(), threading.Event()

    def tell() -> None:
        while not is_over.wait(DELAY_S):
            doing = stage_here(thread) or work
            sys.stderr.write(f"{f'llamarl {command}'.rstrip()}: still {doing}; Ctrl-C ends it\n")
            sys.stderr.flush()

    threading.Thread(target=tell, name="delay", daemon=True).start()
    try:
        yield is_over.set
    finally:
        is_over.set()
