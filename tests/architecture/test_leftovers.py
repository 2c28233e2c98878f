"""What ends every session of tests finds what it is to find."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from mmap import mmap
from pathlib import Path

import pytest

from tests import leftovers


@contextmanager
def process() -> Iterator[None]:
    """Detached, as executors are."""
    code = "import time; time.sleep(60)"
    running = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    yield
    assert running.wait(5) == -9, "it was left running"


@contextmanager
def descriptor() -> Iterator[None]:
    opened = os.memfd_create("llamarl-weights")
    yield
    os.close(opened)


@contextmanager
def mapping() -> Iterator[None]:
    opened = os.memfd_create("llamarl-weights")
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


@pytest.mark.parametrize(
    ("leave", "name"),
    [
        (process, "process "),
        (descriptor, "/memfd:llamarl-weights"),
        (mapping, "/memfd:llamarl-weights"),
        (listener, "listening socket:["),
        (listener_at_a_path, "listening socket:["),
        (folder, "/llamarl-host-1234"),
    ],
)
def test_what_is_left_is_found(
    leave: Callable[[], AbstractContextManager[object]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a session that leaves nothing else, beside others that do the same."""
    mark = f"{tmp_path}-{os.getpid()}"
    monkeypatch.setattr(leftovers, "MARK", f"LLAMARL_TESTS={mark}")
    monkeypatch.setenv("LLAMARL_TESTS", mark)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = leftovers.left_behind(tmp_path, 0.0)
    with leave():
        found = list((Counter(leftovers.left_behind(tmp_path, 0.0)) - Counter(before)).elements())
    assert found and all(name in one for one in found)
    assert leftovers.left_behind(tmp_path, 0.0) == before
