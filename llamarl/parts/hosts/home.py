"""Messages between the agent of a host and the registry of a run: one JSON object per line, over TLS.

The registry sends a message every `BEAT_S` seconds and the agent answers. Each end gives up after `SILENT_S` of
silence.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import ipaddress
import json
import os
import platform
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from llamarl.config.section import Section
from llamarl.net.entrance import PROOF_S, Proved, Serve
from llamarl.observability.files import code_fingerprint

BEAT_S = 0.5
SILENT_S = 3.0
HUNG_UP = "the other end has closed the connection"
BLAST_S = 30.0
"""Maximum seconds of a bandwidth measurement."""
MAX_LINE_BYTES = 4 << 20
PACKAGES = ("torch", "torchmonarch")
"""Packages whose versions must be equal on all hosts."""


T = TypeVar("T")


class BadMessage(Exception):
    """Invalid message."""


BROKEN = (OSError, EOFError, TimeoutError, BadMessage)
"""Errors of a connection whose other end is gone, silent or sends invalid messages."""


class Inventory(Section):
    """Resources and software of a host."""

    name: str
    address: str
    """Address at which the other hosts reach this one."""
    weights_address: str
    """Address at which its executors send and receive weights."""
    logs: str
    """Folder on the host for the logs of executors."""
    cores: int
    memory_bytes: int
    gpus: int
    code: str
    """Fingerprint of this package's files."""
    python: str
    """Interpreter, with its version."""
    packages: dict[str, str]
    pid: int
    """Process id of the agent."""

    @property
    def room(self) -> str:
        """Addresses and resources of the host as text."""
        gpus = f", {self.gpus} GPUs" if self.gpus else ""
        return f"{self.addresses}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB{gpus}"

    @property
    def addresses(self) -> str:
        """Address of the host, and the address for weights if different."""
        return f"{self.address} (weights: {self.weights_address})" if self.has_own_wire else self.address

    @property
    def has_own_wire(self) -> bool:
        """Whether weights use a separate address."""
        return self.weights_address != self.address


class Line:
    """One end of a connection. Handles TLS itself, because asyncio hides why it rejects the other end."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        context: ssl.SSLContext,
        server_hostname: str | None = None,
    ) -> None:
        """`server_hostname`: name of the other end, given by the connecting end."""
        self._reader, self._writer = reader, writer
        self._in, self._out, self._text = ssl.MemoryBIO(), ssl.MemoryBIO(), bytearray()
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=server_hostname is None, server_hostname=server_hostname
        )

    async def secure(self) -> dict[str, Any]:
        """Performs the handshake. Returns the other end's certificate. Raises errors in `BROKEN`."""
        async with asyncio.timeout(PROOF_S):  # many hosts may connect at once
            await self._done(self._tls.do_handshake)
        return dict(self._tls.getpeercert() or {})

    def tell(self, **message: Any) -> None:
        """Sends a message without waiting."""
        self._tls.write(json.dumps(message).encode() + b"\n")
        self._flush()

    async def hear(self, timeout_s: float = SILENT_S) -> dict[str, Any]:
        """Returns the next message. Raises errors in `BROKEN`."""
        async with asyncio.timeout(timeout_s):  # starts no task, unlike `wait_for`; runs twice a second per host
            line = await self._line()
        try:
            return dict(json.loads(line))
        except (TypeError, ValueError, RecursionError):
            raise BadMessage("it speaks otherwise") from None

    def close(self) -> None:
        """Closes the connection after all messages have been sent. May be called twice."""
        self._writer.close()

    async def _line(self) -> bytes:
        searched = 0
        while (end := self._text.find(b"\n", searched)) < 0:
            searched = len(self._text)
            if searched > MAX_LINE_BYTES:
                raise BadMessage(f"a message has more than {MAX_LINE_BYTES} bytes")
            self._text += await self._done(lambda: self._tls.read(1 << 16))
        line = bytes(self._text[:end])
        del self._text[: end + 1]
        return line

    async def _done(self, step: Callable[[], T]) -> T:
        """Returns the result of a step of TLS that may need more data from the other end."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                raise EOFError(HUNG_UP) from None
            finally:
                self._flush()
            data = b""
            with suppress(ConnectionError):
                data = await self._reader.read(1 << 16)
            if not data:
                raise EOFError(HUNG_UP)
            self._in.write(data)

    def _flush(self) -> None:
        if self._out.pending:
            self._writer.write(self._out.read())


def own_inventory(name: str, address: str, logs: str, gpus: int, weights_address: str = "") -> Inventory:
    """Returns the inventory of this machine, given its number of GPUs. Weights use `address` unless another one is
    given."""
    return Inventory(
        name=name,
        address=address,
        weights_address=weights_address or address,
        logs=logs,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpus=gpus,
        code=code_fingerprint(),
        python=f"{sys.executable} ({platform.python_version()})",
        packages={package: importlib.metadata.version(package) for package in PACKAGES},
        pid=os.getpid(),
    )


def on_loop(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter, Proved], Coroutine[None, None, None]],
    limit: int = 1 << 16,
) -> Serve:
    """Listens for connections and runs a coroutine for each on the current event loop. `limit`: bytes to read ahead."""
    loop = asyncio.get_running_loop()

    async def begin(accepted: socket.socket, proved: Proved) -> None:
        try:
            await serve(*await asyncio.open_connection(sock=accepted, limit=limit), proved)
        finally:
            proved()

    return lambda accepted, proved: asyncio.run_coroutine_threadsafe(begin(accepted, proved), loop)


def address_towards(host: str, port: int) -> str:
    """Returns this machine's address on the route to `host`. Sends nothing. Raises OSError if there is no route."""
    family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def is_ip(address: str) -> bool:
    """Returns whether an address is an IP address and not a DNS name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
