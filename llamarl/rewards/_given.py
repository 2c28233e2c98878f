"""Reads files into which `llamarl.train` has pickled functions, if they are the files in the settings."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

MAX_FILE_BYTES = 1 << 30
"""Largest size of a file that is read."""


def given_bytes(path: str | Path, digest: str, *, trusted: bool = False) -> bytes:
    """Returns the content of a file.

    Loading it executes its code, so it is read only if its owner is this user or root, and if its SHA-256 is that of
    the settings.

    Args:
        digest: hexadecimal SHA-256 in the settings.
        trusted: whether any content is accepted.

    Raises:
        ValueError: the file is missing, or another user may have written it. The message names the fix.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            data = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except FileNotFoundError:
        raise ValueError(f"file = {str(path)!r} is not there; {_AGAIN}, with its reward") from None
    except OSError as error:
        raise ValueError(f"file = {str(path)!r} cannot be read ({error.strerror}); {_AGAIN}") from None
    if not stat.S_ISREG(status.st_mode) or len(data) > MAX_FILE_BYTES:
        raise ValueError(f"file = {str(path)!r} is not a file that a run has written; {_AGAIN}")
    if trusted:
        return data
    if status.st_uid not in (os.getuid(), 0):
        raise ValueError(f"file = {str(path)!r} is owned by user {status.st_uid}, and loading it runs code; {_TRUST}")
    if not digest:
        raise ValueError(f"file = {str(path)!r} has no digest on record, and loading it runs code; {_TRUST}")
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"file = {str(path)!r} is not what the run has on record, and loading it runs code; {_TRUST}")
    return data


_AGAIN = "start the run from Python again"
_TRUST = f"{_AGAIN}; `replay` and `--resume` take it with --trust, if you trust who wrote it"
