"""Files that somebody else may have put where they are: opened without a wait, and written through no link."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Any


def open_file(path: str | Path) -> IO[bytes]:
    """Opens a file to read. Raises OSError, for what may never end or never begin, too: a pipe, a device."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def open_own(path: str | Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Opens a file of a run's folder to write, which is made if it is not there. Who can write to that folder could
    have put a link or a pipe in its place, and what is written would go where that leads. Raises OSError."""

    def opener(name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(errno.ELOOP, "it is a link, and nothing is written through it", name) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", name)
        return descriptor

    return open(path, mode, buffering, None if "b" in mode else "utf-8", opener=opener)
