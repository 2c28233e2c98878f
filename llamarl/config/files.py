"""Opens files that another user may have placed: without blocking on pipes, and without writing through links."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Any


def open_file(path: str | Path) -> IO[bytes]:
    """Opens a file for reading. Raises OSError, also for pipes and devices, which may block or never end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def open_own(path: str | Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Opens a file in a run's folder for writing, and creates it if needed. Raises OSError for links and pipes: another
    user with write access to the folder could use them to redirect the output."""

    def opener(name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(errno.ELOOP, "it is a link, and llamarl does not write through links", name) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", name)
        return descriptor

    return open(path, mode, buffering, None if "b" in mode else "utf-8", opener=opener)
