"""`Watch`: when one rank fails, the collectives of all end at once, and each rank learns why.

Ranks send notes to the rendezvous store, which passes them on to all and knows of itself when the process of one has
ended. At the first note every rank notes where its work is and ends the collective that this may wait in.

The cause is the first note of a rank that failed by itself, or else is gone. Where there is none, a rank was stopped or
hangs, and the others have waited in vain; who says nothing, or is in no collective, is at fault.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from llamarl.distributed.links import BROKEN, RanksLost
from llamarl.distributed.rendezvous import Note

LAST_WORDS_S = 1.0
"""Seconds that ranks have to say something, once the others have lost them."""
FOLDER, PACKAGE = map(str, Path(__file__).parents[:2])


class Watch:
    """One rank's end; made by the thread whose work is watched, once all ranks have met."""

    def __init__(self, connection: Connection, rank: int, size: int, end: Callable[[], None]) -> None:
        """
        Args:
            connection: to the store; closed by `stop`.
            end: ends collectives of this process, whatever thread waits in them.
        """
        self._connection, self._rank, self._size, self._end = connection, rank, size, end
        self._worker = threading.get_ident()
        self._stopped = threading.Event()
        self._heard = threading.Condition()
        self._notes = list[Note]()
        self.fired = False
        """Collectives have been ended."""
        self.lost: RanksLost | None = None
        """Why work ended, when no rank says that it has failed: some may never answer."""
        self._listener = threading.Thread(target=self._listen, name="watch", daemon=True)
        self._listener.start()

    def stop(self) -> None:
        """Nothing is ended from now on, and others do not miss this rank."""
        self._stopped.set()
        with suppress(*BROKEN):
            self._connection.send(None)
        self._listener.join(LAST_WORDS_S)
        self._connection.close()

    def cause(self, error: BaseException) -> RanksLost | None:
        """The loss that ended the work of all ranks; None where this rank's own error did, or one of all alike."""
        stack, text = traceback.extract_tb(error.__traceback__), f"{type(error).__name__}: {error}"
        if not self.fired and _is_of_a_collective(error):
            self._tell("waited", f"{_place(stack)}: {text.splitlines()[0]}")
        elif not self.fired:
            traceback.print_exception(error)  # into the executor's log: others hear but one line
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
        silent = [f"rank {rank} says nothing" for rank in range(self._size) if rank not in said]
        # At fault is who does not wait.
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
                self._end()
            if note.kind == "gone" and note.rank == self._rank:
                return

    def _tell(self, kind: Literal["failed", "waited", "was"], text: str, error: str = "") -> None:
        verb = f"{kind}:" if kind == "failed" else kind
        with suppress(*BROKEN):
            self._connection.send(Note(self._rank, kind, f"rank {self._rank} {verb} {text}", error))


def _is_of_a_collective(error: BaseException) -> bool:
    """Other ranks have let it down."""
    return isinstance(error, RanksLost | dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _place(stack: traceback.StackSummary) -> str:
    """The innermost function, and the innermost of this package when that is another one."""
    frames = [stack[-1], *[frame for frame in stack if frame.filename.startswith(PACKAGE)][-1:]]
    named = dict.fromkeys(f"{one.name} ({Path(one.filename).name}:{one.lineno})" for one in frames)
    return f"in {', from '.join(named)}"
