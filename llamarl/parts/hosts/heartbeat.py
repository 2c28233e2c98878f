"""A file whose age tells a scheduler whether an agent or a controller still works: the probe of a container."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

VARIABLE = "LLAMARL_HEARTBEAT"
"""Environment variable with the path of the file. Without it there is no file."""
BEAT_S = 5.0
"""Seconds between two touches. A probe should allow for at least ten times as many."""


async def beat() -> None:
    """Touches the file as long as the event loop runs. Consumes and waits for nothing; ends with the event loop, and at
    once without the variable."""
    path = os.environ.get(VARIABLE, "")
    while path:
        with suppress(OSError):  # a full disk is no reason to end
            Path(path).touch()
        await asyncio.sleep(BEAT_S)
