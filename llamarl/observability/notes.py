"""Technical notes of an executor, such as the kernels that it uses: they go to its log and never between the lines that
a user reads."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path

from llamarl.config import open_own

_files = dict[int, Path]()
"""Log file by thread, of executors that share this process."""


def keep_notes_in(file: Path) -> None:
    """Sends notes of this thread to a file. Without this call they go to standard output, which is an executor's log
    where the executor has its own process."""
    _files[threading.get_ident()] = file


def note(text: str) -> None:
    """Writes a line. A full disk loses the line only."""
    file = _files.get(threading.get_ident())
    with suppress(OSError):
        if file is None:
            sys.stdout.write(f"{text}\n")
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with open_own(file, "a") as log:
            log.write(f"{text}\n")
