"""`Watch`: when one rank fails, the collectives of all end at once, and each rank learns why.

Ranks append notes to a file that all can see, and a thread of each looks for it. When there is one, every thread notes
where its rank's work is and ends the collective that this may wait in: gloo's with an error, by shutting down the
connections, as gloo knows no abort (torch 2.13); NCCL's silently, by its abort.

The cause is the first note of a rank that failed by itself. Where there is none, a rank was killed, stopped or hangs.
The others have then lost a connection, or waited in vain; who says nothing, or is in no collective, is at fault.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from llamarl.distributed.groups import RanksLost

LOOK_S = 0.1
"""Between two looks for notes."""
LAST_WORDS_S = 1.0
"""For ranks to say something, once the others have lost them."""
PACKAGE = str(Path(__file__).parents[1])


class Watch:
    """One rank's end; made by the thread whose work is watched, once all ranks have met."""

    def __init__(self, path: Path, rank: int, size: int, sockets: Set[int]) -> None:
        """
        Args:
            path: of the notes; the same for all ranks, and not there yet.
            sockets: of gloo, by their inodes.
        """
        self._path, self._rank, self._size, self._sockets = path, rank, size, sockets
        self._worker = threading.get_ident()
        self._stopped = threading.Event()
        self.fired = False
        """Collectives have been ended."""
        self.lost: RanksLost | None = None
        """Why work ended, when no rank says that it has failed: some may never answer."""
        self._looks = threading.Thread(target=self._look, name="watch", daemon=True)
        self._looks.start()

    def stop(self) -> None:
        """Nothing is ended from now on."""
        self._stopped.set()
        self._looks.join(LAST_WORDS_S)

    def cause(self, error: BaseException) -> RanksLost | None:
        """By what work of all ranks has ended, when it was not by this error of this rank itself, or of all alike."""
        stack, text = traceback.extract_tb(error.__traceback__), f"{type(error).__name__}: {error}"
        if not self.fired and _is_of_a_collective(error):
            self._note(f"waited {_place(stack)}: {text.splitlines()[0]}")
        elif not self.fired:
            traceback.print_exception(error)  # into the executor's log: others hear but one line
            self._note(f"failed: {text}, {_place(stack)}", failure=text)
        deadline_s = time.monotonic() + LAST_WORDS_S
        while True:
            notes = self._notes()
            said = {note["rank"]: note["text"] for note in reversed(notes)}
            failed = next((note for note in notes if note["failure"]), None)
            if failed or len(said) == self._size or time.monotonic() > deadline_s:
                break
            time.sleep(LOOK_S / 2)
        if failed is None:
            # At fault is who does not wait.
            order = sorted(range(self._size), key=lambda rank: said.get(rank, "").startswith("waited"))
            self.lost = RanksLost("; ".join(f"rank {rank} {said.get(rank, 'says nothing')}" for rank in order))
            return self.lost
        is_own = failed["rank"] == self._rank or failed["failure"] == text
        return None if is_own else RanksLost(f"rank {failed['rank']} {failed['text']}")

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_S):
            if self._path.exists():
                self._note(f"was {_place(traceback.extract_stack(sys._current_frames().get(self._worker)))}")
                self.fired = True
                for inode, descriptor in open_sockets().items():
                    if inode in self._sockets:
                        _shut_down(descriptor)
                _abort_process_group()
                return

    def _note(self, text: str, failure: str = "") -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps({"rank": self._rank, "text": text, "failure": failure}).encode() + b"\n")

    def _notes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text().split("\n")[:-1]]


def open_sockets() -> dict[int, int]:
    """Inodes and descriptors of this process's sockets."""
    found = dict[int, int]()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _shut_down(descriptor: int) -> None:
    """Both ends of a TCP connection see its end; one that listens stays, as gloo would end the process."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family != socket.AF_UNIX and one.getpeername():
            one.shutdown(socket.SHUT_RDWR)


def _is_of_a_collective(error: BaseException) -> bool:
    """Other ranks have let it down."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _place(stack: traceback.StackSummary) -> str:
    """The innermost function, and the innermost of this package when that is another one."""
    frames = [stack[-1], *[frame for frame in stack if frame.filename.startswith(PACKAGE)][-1:]]
    named = dict.fromkeys(f"{one.name} ({Path(one.filename).name}:{one.lineno})" for one in frames)
    return f"in {', from '.join(named)}"
