"""`Watch`: when one rank fails, the collectives of all ranks end at once, and each rank learns the cause.

Ranks send notes to the rendezvous store, which forwards them to all ranks, and adds a note when the process of a rank
has ended. At the first note, every rank reports where its work is, and ends the collective that it may be waiting in.

The cause is the first note of a rank that failed by itself, or else that is gone. Without such a note, a rank was
stopped or hangs and the others have waited in vain. Then a rank that sends no note, or is in no collective, is at
fault.

`end_collectives` ends the wait in a collective: NCCL's by its abort, gloo's with an error. torch 2.13 cannot abort
gloo: `abort` and `shutdown` of its groups return at once, while another thread waits until the time limit. A closed
connection ends the wait, so `end_collectives` shuts down the connections that were opened with the groups.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Set
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from llamarl.distributed.links import BROKEN, Note, RanksLost

QUIET_S = 0.05
"""Connections are shut down once no byte has moved for this time."""
PATIENCE_S = 2.0
"""Longest wait for QUIET_S before connections are shut down."""
_SO_ATTACH_FILTER = 26
_TCP_INFO, _BYTES = 11, slice(120, 136)
"""Linux's option with statistics of a connection, and the place of the acknowledged and received bytes in its
answer."""
LAST_WORDS_S = 1.0
"""Longest wait for notes of the ranks that were lost."""
END_S = 60.0
"""Longest wait until collectives have ended, which `end_collectives` and NCCL's abort take."""
OF_GLOO = ("gloo", "Application timeout caused pair closure")
"""Parts of the messages of gloo's errors: most name a file of gloo. The second is the error of all further collectives
of a rank once one has reached its time limit."""
FOLDER, PACKAGE = map(str, Path(__file__).parents[:2])


def open_sockets() -> dict[int, int]:
    """Returns the descriptors of this process's sockets by inode."""
    found = dict[int, int]()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def drop_incoming(sockets: Set[int]) -> None:
    """Makes the listening ones of `sockets` drop all incoming packets.

    gloo listens on after all ranks have connected, accepts any connection, and ends the process if accepting fails.
    """
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # a filter's instruction: keep 0 bytes
    program = struct.pack("HL", 1, ctypes.addressof(nothing))
    for inode, descriptor in open_sockets().items():
        if inode in sockets:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # closed in the meantime
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def end_collectives(sockets: Set[int]) -> None:
    """Ends the collectives that this process waits in.

    Args:
        sockets: inodes of the ranks' connections.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    before = None
    while (moved := _traffic(sockets)) != before and time.monotonic() < deadline_s:
        before = moved
        time.sleep(QUIET_S)
    for inode, descriptor in open_sockets().items():
        if inode in sockets:
            _shut_down(descriptor)
    _abort_process_group()


def _traffic(sockets: Set[int]) -> dict[int, bytes]:
    """Returns raw counters of the traffic through each socket, by inode."""
    found = dict[int, bytes]()
    for inode, descriptor in open_sockets().items():
        if inode in sockets:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # closed meanwhile, or not TCP
                found[inode] = one.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES.stop)[_BYTES]
    return found


def _shut_down(descriptor: int) -> None:
    """Shuts down a TCP connection, for both ends. Skips a listening socket, since gloo would end the process."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family != socket.AF_UNIX and one.getpeername():
            one.shutdown(socket.SHUT_RDWR)


class Watch:
    """One rank's end. Created by the thread whose work is watched, once all ranks have connected."""

    def __init__(self, connection: Connection, rank: int, size: int, end: Callable[[], None]) -> None:
        """
        Args:
            connection: connection to the store; closed by `stop`.
            end: ends collectives of this process, in whatever thread they wait.
        """
        self._connection, self._rank, self._size, self._end = connection, rank, size, end
        self._worker = threading.get_ident()
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        """Held while collectives are ended, which must not overlap with the end of their groups."""
        self._heard = threading.Condition()
        self._notes = list[Note]()
        self.fired = False
        """Whether collectives have been ended."""
        self.lost: RanksLost | None = None
        """Why work was ended, if no rank reports its own failure. None means that it was not; some ranks may never
        answer."""
        self._listener = threading.Thread(target=self._listen, name="watch", daemon=True)
        self._listener.start()

    def stop(self) -> bool:
        """Stops watching. The other ranks do not treat this rank as lost.

        Returns whether the process's groups may now be destroyed: no collective is being ended, nor will be.
        """
        self._stopped.set()
        with suppress(*BROKEN):
            self._connection.send(None)
        if is_quiet := self._ending.acquire(timeout=END_S):
            self._ending.release()
        self._listener.join(LAST_WORDS_S)
        self._connection.close()
        return is_quiet

    def cause(self, error: BaseException) -> RanksLost | None:
        """Returns the loss that ended the work of all ranks. None means that this rank's own error did, or an error of
        all ranks alike."""
        stack, text = traceback.extract_tb(error.__traceback__), f"{type(error).__name__}: {error}"
        if not self.fired and _is_of_a_collective(error):
            self._tell("waited", f"{_place(stack)}: {text.splitlines()[0]}")
        elif not self.fired:
            traceback.print_exception(error)  # into the executor's log: other ranks get one line
            self._tell("failed", f"{text}, {_place(stack)}", text)
        with self._heard:
            self._heard.wait_for(self._is_clear, LAST_WORDS_S)
            notes = list(self._notes)
        failed = next((note for note in notes if note.kind == "failed"), None)
        if failed is None:
            self.lost = RanksLost(self._lost(notes))
            return self.lost
        is_own = failed.rank == self._rank or failed.error == text
        return None if is_own else RanksLost(failed.text)

    def _is_clear(self) -> bool:
        ends = any(note.kind in ("failed", "gone") for note in self._notes)
        return ends or len({note.rank for note in self._notes}) == self._size

    def _lost(self, notes: list[Note]) -> str:
        if gone := [note.text for note in notes if note.kind == "gone"]:
            return gone[0]
        said = {note.rank: note for note in reversed(notes)}
        silent = [f"rank {rank} sends nothing" for rank in range(self._size) if rank not in said]
        # A rank that does not wait is at fault.
        ordered = sorted(said.values(), key=lambda note: (note.kind == "waited", note.rank))
        return "; ".join([*silent, *(note.text for note in ordered)])

    def _listen(self) -> None:
        while not self._stopped.is_set():
            try:
                self._connection.poll(None)
                note = self._connection.recv()
            except BROKEN:
                note = Note(self._rank, "gone", "the store where ranks meet is gone")
            if self._stopped.is_set():
                return
            with self._heard:
                self._notes.append(note)
                self._heard.notify_all()
            if not self.fired:
                stack = traceback.extract_stack(sys._current_frames().get(self._worker))
                waits = any(frame.filename.startswith(FOLDER) for frame in stack)
                self._tell("waited" if waits else "was", _place(stack))
                self.fired = True
                with self._ending:
                    if self._stopped.is_set():  # the process may have new groups by now
                        return
                    self._end()
            if note.kind == "gone" and note.rank == self._rank:
                return

    def _tell(self, kind: Literal["failed", "waited", "was"], text: str, error: str = "") -> None:
        verb = f"{kind}:" if kind == "failed" else kind
        with suppress(*BROKEN):
            self._connection.send(Note(self._rank, kind, f"rank {self._rank} {verb} {text}", error))


def _is_of_a_collective(error: BaseException) -> bool:
    """Returns whether the error was caused by other ranks in a collective."""
    if isinstance(error, RuntimeError) and any(one in str(error) for one in OF_GLOO):
        return True
    return isinstance(error, RanksLost | dist.DistError)


def _place(stack: traceback.StackSummary) -> str:
    """Returns the innermost function and, if it is another one, the innermost function of this package."""
    frames = [stack[-1], *[frame for frame in stack if frame.filename.startswith(PACKAGE)][-1:]]
    named = dict.fromkeys(f"{one.name} ({Path(one.filename).name}:{one.lineno})" for one in frames)
    return f"in {', from '.join(named)}"
