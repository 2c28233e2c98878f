"""The program of a rank that `cluster/processes.py` starts, and the messages between the two.

Standard input is a socket to the controller. It brings one byte with the pipe that ends this process, the specification
of the executor, and then calls. Replies return on it in any order, by the number of their call.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import struct
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import IO

from llamarl.child import stream_to_parent
from llamarl.cluster import start_up
from llamarl.cluster.api import Reply
from llamarl.cluster.rank import CLOSE, ExecutorRank

LENGTH = struct.Struct("!I")
"""Precedes each message: its size in bytes."""


def framed(message: bytes) -> bytes:
    """Returns a message with its length."""
    return LENGTH.pack(len(message)) + message


def main() -> None:
    """Runs a rank. Returns when it has closed and the controller has ended the connection. Kills this process's group
    when the connection ends before."""
    stream = stream_to_parent()
    _, (until,), _, _ = socket.recv_fds(stream, 1, 1)
    start_up.die_with(until)  # also while the executor's thread never lets another one run
    incoming = stream.makefile("rb")
    rank = ExecutorRank(pickle.loads(_specification(incoming)))
    outgoing: queue.SimpleQueue[tuple[int, Reply]] = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(stream, outgoing), name="replies", daemon=True).start()
    closed: Future[Reply] | None = None
    while message := _message(incoming):
        number, method, payload, timeout_s = pickle.loads(message)
        reply = rank.submit(method, payload, timeout_s)
        if method == CLOSE:
            closed = reply
        reply.add_done_callback(partial(_reply, outgoing, number))
    if closed is None:
        os.killpg(0, signal.SIGKILL)
    else:
        closed.result()


def _specification(incoming: IO[bytes]) -> bytes:
    """Reads the pickled specification, which comes in several messages after its size. Ends this process if the
    controller ends first."""
    (num_bytes,) = LENGTH.unpack(_message(incoming) or os._exit(1))
    packed = b""
    while len(packed) < num_bytes:
        packed += _message(incoming) or os._exit(1)
    return packed


def _message(incoming: IO[bytes]) -> bytes:
    """Returns the next message. Empty means that the connection has ended."""
    try:
        head = incoming.read(LENGTH.size)
        return incoming.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else b""
    except ConnectionError:
        return b""


def _reply(outgoing: queue.SimpleQueue[tuple[int, Reply]], number: int, reply: Future[Reply]) -> None:
    outgoing.put((number, reply.result()))


def _answer(stream: socket.socket, outgoing: queue.SimpleQueue[tuple[int, Reply]]) -> None:
    """Sends replies, so that the executor's thread does not wait for a controller that is busy or stopped."""
    with suppress(OSError):  # the controller has ended
        while True:
            stream.sendall(framed(pickle.dumps(outgoing.get(), pickle.HIGHEST_PROTOCOL)))


if __name__ == "__main__":
    main()
