"""`Entrance`: a listening port that costs the process next to nothing, however many strangers come to it.

Nobody can keep strangers from connecting. One who says nothing is left to the system, where it costs no descriptor: so
who connects to a port of ours speaks first. Who has said something has to prove itself, whatever that means where it
wants to go, and of those that have not yet the oldest is put out for the newest, and nobody else let in until it has
gone. Running out of descriptors, whoever took them, ends no entrance.
"""

from __future__ import annotations

import errno
import itertools
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

MAX_UNPROVED, MOST_UNPROVED = 64, 1024
"""Connections at one entrance: a sixteenth of the descriptors that this process may have, between these."""
YOUNG_S = 0.02
"""Nobody is put out before: of many who come at once the first may not have had a turn yet."""
PROOF_S = 10.0
"""Seconds for one message of a proof, on a busy machine too."""
BACKLOG = 4096
"""Connections that the system keeps until they are accepted; of more those that say nothing are accepted too."""
SILENT_S = 3600
"""So long the system keeps one that says nothing; what is said later is heard."""
CLOSE_S = 1.0
"""Seconds that the thread has to close the port."""
PAUSE_S = 0.002
"""Before the next try, where the process has no descriptor left: for one that was put out to be closed."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def listen(host: str, port: int = 0) -> socket.socket:
    """Raises OSError."""
    listener = socket.create_server((host, port), backlog=BACKLOG)
    ignore_silent(listener)
    return listener


def ignore_silent(listener: socket.socket) -> None:
    """Who connects to it is accepted when he has said something; where the system cannot, at once."""
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S)


def num_unproved() -> int:
    """Most connections without a proof that one entrance of this process holds."""
    return max(MAX_UNPROVED, min(MOST_UNPROVED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))


Proved = Callable[[], None]
Serve = Callable[[socket.socket, Proved], object]
"""Gets a connection, which it must not wait for, and what to call once that has proved itself or is over, at the latest
before its descriptor is closed by any other way than the socket's own."""


class Entrance:
    """Accepts in a thread of its own, until `close`."""

    def __init__(self, listener: socket.socket, serve: Serve, wait_s: float | None = None) -> None:
        """
        Args:
            listener: closed in the end.
            serve: called in that thread; what it is to call may be called by any.
            wait_s: it ends when nobody has come for so long.
        """
        self._listener, self._serve = listener, serve
        self._listener.settimeout(wait_s)
        self._unproved = dict[int, tuple[float, socket.socket]]()
        """The oldest first, each with the time at which it came."""
        self._leaving = set[int]()
        """Connections that were put out and still have their descriptors."""
        self._room = num_unproved()
        self._numbers, self._changed = itertools.count(), threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._listen, name="entrance", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody can come any more; those that are here stay. May be called again."""
        self._is_open = False
        with self._changed:
            self._changed.notify_all()
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in it
        self._thread.join(CLOSE_S)

    def _listen(self) -> None:
        with self._listener:
            while self._is_open:
                try:
                    self._accept()
                except TimeoutError:
                    return
                except (OSError, RuntimeError) as error:  # closed, a caller that has gone, or nothing is left
                    if self._is_open and (isinstance(error, RuntimeError) or error.errno in _EXHAUSTED):
                        self._put_out_oldest(0, 0.0)
                        time.sleep(PAUSE_S)

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        if _has_left(accepted):
            accepted.close()
            return
        number = next(self._numbers)
        with self._changed:
            self._unproved[number] = time.monotonic(), accepted
        self._put_out_oldest(self._room, YOUNG_S)
        try:
            self._serve(accepted, partial(self._forget, number))
        except RuntimeError:
            self._forget(number)
            accepted.close()
            raise
        with self._changed:
            self._changed.wait_for(lambda: len(self._leaving) < self._room or not self._is_open, PROOF_S)

    def _put_out_oldest(self, room: int, young_s: float) -> None:
        """Unless there is room for all; waits until it is so old."""
        with self._changed:
            came_s = next((came_s for came_s, _ in self._unproved.values()), 0.0)
            left_s = max(came_s + young_s - time.monotonic(), 0.0)
            if not self._changed.wait_for(lambda: len(self._unproved) <= room, left_s):
                number = next(iter(self._unproved))
                _, oldest = self._unproved.pop(number)
                self._leaving.add(number)
                with suppress(OSError):  # it has gone by itself
                    oldest.shutdown(socket.SHUT_RDWR)

    def _forget(self, number: int) -> None:
        with self._changed:
            self._unproved.pop(number, None)
            self._leaving.discard(number)
            self._changed.notify()


def _has_left(accepted: socket.socket) -> bool:
    """Without a word, as many do at once who were silent."""
    try:
        return not accepted.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
