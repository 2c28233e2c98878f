"""`Entrance`: a listening port that costs the process little, whatever number of unknown clients connect to it.

Unknown clients can always connect. The kernel holds a connection that has sent no data, which costs no descriptor; so
our own processes send first. A client that has sent data must authenticate, in the way of the service behind the port.
Among the unauthenticated clients, the oldest is closed for the newest, and no other is accepted until it is gone. An
entrance survives a process without free descriptors, whatever took them.
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
"""Limits of the unauthenticated connections at one entrance, which are a sixteenth of the process's descriptors."""
YOUNG_S = 0.02
"""No connection is closed before this age: the thread of the first of many simultaneous clients may not have run
yet."""
PROOF_S = 10.0
"""Seconds for one message of the authentication, on a busy machine, too."""
BACKLOG = 4096
"""Connections that the kernel queues until they are accepted. It queues clients without data only up to this number."""
SILENT_S = 3600
"""How long the kernel holds a connection that has sent no data. Later data is still delivered."""
CLOSE_S = 1.0
"""Seconds that the thread has to close the port."""
PAUSE_S = 0.002
"""Pause before the next try of a process without free descriptors, in which a closed connection can free one."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def listen(host: str, port: int = 0) -> socket.socket:
    """Listens at an address. Raises OSError."""
    listener = socket.create_server((host, port), backlog=BACKLOG)
    defer_accept(listener)
    return listener


def defer_accept(listener: socket.socket) -> None:
    """Accepts connections only after they have sent data. Systems other than Linux accept at once."""
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S)


def max_unauthenticated() -> int:
    """Returns the limit of unauthenticated connections at one entrance of this process."""
    return max(MAX_UNPROVED, min(MOST_UNPROVED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))


Proved = Callable[[], None]
Serve = Callable[[socket.socket, Proved], object]
"""Receives a connection and a callback, and must not block. The callback must be called once the connection is
authenticated or over, and before its descriptor is closed in any other way than the socket's own."""


class Entrance:
    """Accepts connections in its own thread, until `close`."""

    def __init__(self, listener: socket.socket, serve: Serve, wait_s: float | None = None) -> None:
        """
        Args:
            listener: closed at the end.
            serve: called in that thread. Its callback may be called in any thread.
            wait_s: closes the entrance after this time without a new connection. None means never.
        """
        self._listener, self._serve = listener, serve
        self._listener.settimeout(wait_s)
        self._unproved = dict[int, tuple[float, socket.socket]]()
        """Connections and the times of their arrival, the oldest first."""
        self._leaving = set[int]()
        """Connections that were closed for newer ones and still have their descriptors."""
        self._room = max_unauthenticated()
        self._numbers, self._changed = itertools.count(), threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._listen, name="entrance", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops accepting. Open connections stay. May be called again."""
        self._is_open = False
        with self._changed:
            self._changed.notify_all()
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join(CLOSE_S)

    def _listen(self) -> None:
        with self._listener:
            while self._is_open:
                try:
                    self._accept()
                except TimeoutError:
                    return
                except (OSError, RuntimeError) as error:  # closed, the client left, or no descriptor or thread is free
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
        """Closes the oldest connection if there are more than `room`, once it is `young_s` old."""
        with self._changed:
            came_s = next((came_s for came_s, _ in self._unproved.values()), 0.0)
            left_s = max(came_s + young_s - time.monotonic(), 0.0)
            if not self._changed.wait_for(lambda: len(self._unproved) <= room, left_s):
                number = next(iter(self._unproved))
                _, oldest = self._unproved.pop(number)
                self._leaving.add(number)
                with suppress(OSError):  # the client has disconnected
                    oldest.shutdown(socket.SHUT_RDWR)

    def _forget(self, number: int) -> None:
        with self._changed:
            self._unproved.pop(number, None)
            self._leaving.discard(number)
            self._changed.notify()


def _has_left(accepted: socket.socket) -> bool:
    """Returns whether the client has disconnected without sending data, as many do at once after a long silence."""
    try:
        return not accepted.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
