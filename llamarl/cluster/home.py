"""What the agent of a host and the registry of a run tell each other: a JSON object per line, over TLS.

The registry asks each `BEAT_S`, the agent answers; whoever hears nothing for `SILENT_S` has lost the other.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import xxhash

from llamarl.config.errors import ConfigError
from llamarl.config.section import Section

BEAT_S = 0.5
SILENT_S = 3.0
BLAST_S = 30.0
"""Longest measurement of a wire."""
MAX_LINE_BYTES = 4 << 20
BROKEN = (OSError, EOFError, TimeoutError, ValueError)
"""What a line does whose other end is gone, silent, or none of ours."""
COUNT_S = 120.0
"""For a process that imports torch and counts."""
PACKAGES = ("torch", "torchmonarch")
"""Of which all hosts have the same version."""


class Inventory(Section):
    """What a host has."""

    name: str
    address: str
    """Where the other hosts reach it."""
    logs: str
    """Folder there that its executors write to."""
    cores: int
    memory_bytes: int
    gpus: int
    code: str
    """Fingerprint of this package's files."""
    python: str
    """Interpreter, with its version."""
    packages: dict[str, str]
    pid: int
    """Of the agent."""

    @property
    def room(self) -> str:
        """For people."""
        gpus = f", {self.gpus} GPUs" if self.gpus else ""
        return f"{self.address}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB{gpus}"


class Line:
    """One end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def tell(self, **message: Any) -> None:
        """Sends without waiting."""
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def hear(self, timeout_s: float = SILENT_S) -> dict[str, Any]:
        """The next message. Raises what is in `BROKEN`."""
        text = await asyncio.wait_for(self._reader.readline(), timeout_s)
        if not text.endswith(b"\n"):
            raise EOFError("the other end has closed the connection")
        message = json.loads(text)
        if not isinstance(message, dict):
            raise ValueError("a message is a JSON object")
        return message

    def close(self) -> None:
        """Ends the connection, what was told last included; may be called again."""
        self._writer.close()


def own_inventory(name: str, address: str, logs: str, gpus: int) -> Inventory:
    """Of this machine, whose GPUs have been counted."""
    return Inventory(
        name=name,
        address=address,
        logs=logs,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpus=gpus,
        code=code_fingerprint(),
        python=f"{sys.executable} ({platform.python_version()})",
        packages={package: importlib.metadata.version(package) for package in PACKAGES},
        pid=os.getpid(),
    )


def code_fingerprint() -> str:
    """Of every Python and C++ file of this package, names and contents."""
    package, digest = Path(__file__).parents[1], xxhash.xxh3_64()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def count_devices() -> int:
    """GPUs that an executor would see. Raises ConfigError."""
    code = "import torch; print(torch.cuda.device_count())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=COUNT_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(f"torch cannot count the GPUs of this host: {error}; use device = 'cpu'") from None
    return int(done.stdout.split()[-1])
