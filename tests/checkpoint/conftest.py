"""Processes for the tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import fork_server

sys.path.insert(0, str(Path(__file__).parent))  # so that a child finds the functions that it is to run by name

Start = Callable[..., tuple[ForkServerProcess, Connection]]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(function, *args) runs function(connection, *args) in a process that is killed at the end of the test."""
    context = fork_server()
    started = list[ForkServerProcess]()

    def start_one(function: Callable[..., None], *args: Any) -> tuple[ForkServerProcess, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(theirs, *args))
        process.start()
        theirs.close()
        started.append(process)
        return process, ours

    yield start_one
    for process in started:
        process.kill()
        process.join(240)
