"""Starts the process of the Hub's client and sends it requests."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Self

from llamarl.child import Child
from llamarl.config.errors import ConfigError
from llamarl.config.hub import HubName, Kind
from llamarl.parts.hub.progress import FetchProgress

COMMAND = ("-m", "llamarl.parts.hub.client")
STALL_S = 1800.0
"""Maximum seconds without progress. The client writes 10 MiB at a time and gives up much earlier."""
LIST_S = 600.0
"""Maximum seconds for a listing. Listings have pages, and those of a million files take minutes."""
SLOWEST_BYTES = 1 << 20
"""Bytes of files that must arrive within the maximum wait."""
_LOOK_S = 0.25


class NotAnswered(ConfigError):
    """The Hub did not answer. A cached answer may be used instead."""


class Client:
    """The client's process. Starts at the first request. Leaving the context kills it at once."""

    def __init__(self) -> None:
        self._process: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._process is not None:
            self._process.end()

    def ask(
        self,
        name: HubName,
        kind: Kind,
        progress: FetchProgress,
        *,
        done: Callable[[], int] | None = None,
        stall_s: float | None = None,
        **order: Any,
    ) -> dict[str, Any]:
        """Sends a request. Returns the answer.

        Args:
            done: returns the bytes on disk.
            stall_s: maximum wait for a message or for `SLOWEST_BYTES`. None means `LIST_S` or `STALL_S`.

        Raises:
            ConfigError: cause and fix. NotAnswered if a cached answer may be used.
        """
        process = self._process = self._process or Child(*COMMAND)
        order |= {"repo": name.repo, "revision": name.revision, "kind": kind}
        stall_s = stall_s or (LIST_S if order["order"] == "list" else STALL_S)
        process.stream.settimeout(stall_s)
        with suppress(ConnectionError, TimeoutError):  # it has ended, or does not listen, as is seen below
            process.stream.sendall(json.dumps(order).encode() + b"\n")
        last_s, had, has = time.monotonic(), 0, 0
        for line in _lines(process.stream):
            if done is not None and (now := done()) != has:
                progress.at(has := now)
                if has < had or has - had >= SLOWEST_BYTES:
                    last_s, had = time.monotonic(), has
            if line is None and time.monotonic() - last_s > stall_s:
                raise NotAnswered(
                    f"the Hub has sent {has - had:,} bytes of files in {stall_s:.0f} s and not all that it was asked "
                    "for; check the network, and start again"
                )
            if line is None:
                continue
            last_s, answer = time.monotonic(), json.loads(line)
            if answer["event"] == "failed":
                raise (ConfigError if answer["is_lasting"] else NotAnswered)(answer["text"])
            if answer["event"] != "waits":
                return answer
            progress.say(answer["text"])
        raise NotAnswered(
            f"the Hub's client ended with exit code {process.wait(10)}, and says why above; pip install -U "
            "huggingface_hub may fix it"
        )


def _lines(stream: socket.socket) -> Iterator[bytes | None]:
    """Yields lines, and None after each interval without one. Ends with the stream."""
    rest = b""
    stream.settimeout(_LOOK_S)
    with suppress(ConnectionResetError):  # the other end has not read all that was sent
        while True:
            try:
                piece = stream.recv(1 << 16)
            except TimeoutError:
                yield None
                continue
            if not piece:
                return
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
