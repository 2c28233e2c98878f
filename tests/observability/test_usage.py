"""What a process says that it takes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import sys
import threading
from pathlib import Path

import pytest

from llamarl.observability import spans as usages
from llamarl.observability.spans import available_bytes, usage


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_what_is_taken_is_seen() -> None:
    """Threads and files of earlier tests may end meanwhile, so that many are started."""
    before, done = usage(), threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(40)]
    for thread in threads:
        thread.start()
    # A mapping, because malloc keeps memory of earlier tests.
    with mmap.mmap(-1, 50 << 20) as memory, contextlib.ExitStack() as files:
        for _ in threads:
            files.enter_context(open("/proc/self/statm"))
        memory.write(b"x" * len(memory))
        during = usage()
    done.set()
    for thread in threads:
        thread.join()
    assert 20 < during.descriptors - before.descriptors <= 40
    assert 20 < during.threads - before.threads <= 40
    assert during.rss_bytes > before.rss_bytes + (45 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
@pytest.mark.parametrize(("limit", "available"), [("max", None), (1000, 1000 - 700 + 50), (1 << 60, None)])
def test_a_container_s_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: object, available: int | None
) -> None:
    files = {"memory.max": limit, "memory.current": 700, "memory.stat": "anon 650\ninactive_file 50"}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(usages, "GROUPS", tmp_path)
    found = available_bytes()
    assert found == available if available else found > 1 << 24


def test_a_process_without_descriptors_is_still_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its usage goes with every answer to whether it is alive."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("builtins.open", refuse)
    found = usage()
    monkeypatch.undo()
    assert found.rss_bytes > 1 << 20 and found.descriptors == found.threads == 0
