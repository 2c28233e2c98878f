"""What ends every session of tests finds what it is to find."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from mmap import mmap
from pathlib import Path

import pytest

from tests import leftovers


@contextmanager
def process() -> Iterator[None]:
    """Detached, as executors are."""
    code = "import time; print(flush=True); time.sleep(600)"
    running = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    assert running.stdout
    with running.stdout:
        running.stdout.readline()  # its environment can be read: not yet where `Popen` comes back
    yield
    assert running.wait(240) == -9, "it was left running"


@contextmanager
def descriptor() -> Iterator[None]:
    opened = os.memfd_create("llamarl-opened")
    yield
    os.close(opened)


@contextmanager
def mapping() -> Iterator[None]:
    opened = os.memfd_create("llamarl-mapped")
    os.truncate(opened, 4096)
    with mmap(opened, 4096):
        os.close(opened)
        yield


def listener() -> AbstractContextManager[object]:
    return closing(socket.create_server(("127.0.0.1", 0)))


@contextmanager
def listener_at_a_path() -> Iterator[None]:
    path = f"{os.environ['TMPDIR']}/socket"
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.bind(path)
        waiting.listen()
        yield


@contextmanager
def folder() -> Iterator[None]:
    path = Path(os.environ["TMPDIR"], "llamarl-host-1234")
    path.mkdir()
    yield
    assert not path.exists(), "it was left"


LEFT = {
    process: "process ",
    descriptor: "/memfd:llamarl-opened",
    mapping: "/memfd:llamarl-mapped",
    listener: "listening socket:[",
    listener_at_a_path: "listening socket:[",
    folder: "/llamarl-host-1234",
}
"""What a session may leave, and what is said of it."""


def test_what_is_left_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it. As by a session that leaves nothing else, beside others that do the same."""
    mark = f"{tmp_path}-{os.getpid()}"
    monkeypatch.setattr(leftovers, "MARK", f"LLAMARL_TESTS={mark}")
    monkeypatch.setenv("LLAMARL_TESTS", mark)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = leftovers.left_behind(tmp_path, 0.0)
    with ExitStack() as left:
        for leave in LEFT:
            left.enter_context(leave())
        found = list((Counter(leftovers.left_behind(tmp_path, 0.0)) - Counter(before)).elements())
    told = Counter(name for one in found for name in {*LEFT.values()} if name in one)
    assert told >= Counter(LEFT.values()) and told.total() == len(found), found
    assert leftovers.left_behind(tmp_path, 0.0) == before
