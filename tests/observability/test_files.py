"""Files that are whole, whoever else writes them."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from llamarl.observability.files import last_lines, remedy, write_atomically


def test_two_processes_may_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one begins and ends while the first is at it; neither fails, and the last one stands."""
    sync, path = os.fsync, tmp_path / "report.html"

    def beside(descriptor: int) -> None:
        pid = os.fork()
        if not pid:
            monkeypatch.setattr(os, "fsync", sync)
            write_atomically(path, "second")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert path.read_text() == "second"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", beside)
    write_atomically(path, "first")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_so_may_two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs side by side in one process keep the same reward."""
    sync, path = os.fsync, tmp_path / "reward.py"

    def beside(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        (other := threading.Thread(target=write_atomically, args=(path, "second"))).start()
        other.join()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", beside)
    write_atomically(path, "first")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("torn", ["", '{"step": 9'])
def test_lines_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: str) -> None:
    """Across blocks of any size; what has no end yet is no line."""
    path, said = tmp_path / "rows.jsonl", [f'{{"step": {step}}}' for step in range(20)]
    path.write_text("".join(f"{line}\n" for line in said) + torn)
    for size in (1, 7, 64, 1 << 16):
        monkeypatch.setattr("llamarl.observability.files._BLOCK_BYTES", size)
        assert [line.decode() for line in last_lines(path)] == said[::-1]
    path.write_text(torn)
    assert [*last_lines(path)] == []


@pytest.mark.parametrize(
    ("number", "word"), [(errno.EEXIST, "move"), (errno.EROFS, "allow"), (errno.ENOSPC, "space"), (errno.EIO, "space")]
)
def test_what_to_do_about_a_file_that_cannot_be_written(number: int, word: str) -> None:
    assert word in remedy(OSError(number, "no", "/runs/journal"))
    assert ("/runs/journal" in remedy(OSError(number, "no", "/runs/journal"))) == (word != "space")
