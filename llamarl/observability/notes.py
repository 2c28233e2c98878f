"""Technical notes of an executor, for example which kernels it uses. They go to its log, not to the user's terminal."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path

from llamarl.config import open_own

_files = dict[int, Path]()
"""Log file by thread, for executors that share this process."""


def keep_notes_in(file: Path) -> None:
    """Sends notes of this thread to a file. By default they go to standard output, which is the log of an executor that
    has its own process."""
    _files[threading.get_ident()] = file


def note(text: str) -> None:
    """Writes a line. On a full disk, only this line is lost."""
    file = _files.get(threading.get_ident())
    with suppress(OSError):
        if file is None:
            sys.stdout.write(f"{text}\n")
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with open_own(file, "a") as log:
            log.write(f"{text}\n")
