"""`LiveScreen`: the terminal during a run, drawn."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from llamarl.observability.screen import Screen, print_to
from llamarl.observability.spans import now_s
from llamarl.observability.view import RunInfo, RunView
from llamarl.parts.page.layout import Board, PhaseView, frame

REFRESH_PER_S = 2


class LiveScreen(Screen):
    """Draws the whole terminal. What native libraries and child processes print meanwhile goes to `output.log`."""

    def __init__(self, info: RunInfo) -> None:
        self._board = Board(info=info, started_s=now_s())
        self._lock = threading.Lock()
        self._log = info.folder / "output.log"

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._redirect = _Redirect(self._log)
        self._console = Console(file=self._redirect.terminal, highlight=False)
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            screen=True,
            refresh_per_second=REFRESH_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        with suppress(OSError):  # the terminal has gone
            self._live.stop()
        foreign_bytes = self._redirect.close()
        for text, times in self._board.warnings.items():
            print_to(sys.stderr, f"warning: {text}" + (f" ({times} times)" if times > 1 else ""))
        if foreign_bytes:
            print_to(sys.stderr, f"other output of this run: {self._log}")

    def phase(self, text: str, done: int | None = None, total: int | None = None, waits_for: str = "") -> None:
        with self._lock:
            phases = self._board.phases
            if phases and phases[-1].text == text and phases[-1].ended_s is None:
                phases = (*phases[:-1], replace(phases[-1], done=done, total=total, waits_for=waits_for))
            else:
                phase = PhaseView(text=text, started_s=now_s(), done=done, total=total, waits_for=waits_for)
                phases = (*_ended(phases), phase)
            self._board = replace(self._board, phases=phases)

    def show(self, view: RunView) -> None:
        with self._lock:
            self._board = replace(self._board, view=view, phases=_ended(self._board.phases))

    def warn(self, text: str) -> None:
        with self._lock:
            warnings = dict(self._board.warnings)
            warnings[text] = warnings.pop(text, 0) + 1
            self._board = replace(self._board, warnings=warnings)

    def _draw(self) -> Text:
        columns, lines = os.get_terminal_size(self._redirect.terminal.fileno())
        self._console.size = (columns, lines)  # rich would ask stdout, which is not the terminal now
        return frame(self._board, columns, lines, now_s())


def _ended(phases: tuple[PhaseView, ...]) -> tuple[PhaseView, ...]:
    if not phases or phases[-1].ended_s is not None:
        return phases
    return (*phases[:-1], replace(phases[-1], ended_s=now_s()))


class _Redirect:
    """Points stdout and stderr of this process, and of children it starts, to a file; keeps the terminal open."""

    def __init__(self, path: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(1), os.dup(2))
        self.terminal: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._log).st_size
        os.dup2(self._log, 1)
        os.dup2(self._log, 2)

    def close(self) -> int:
        """Give the terminal back. Returns how many bytes went to the file."""
        sys.stdout.flush()
        sys.stderr.flush()
        written = os.fstat(self._log).st_size - self._size
        for saved, standard in zip(self._saved, (1, 2), strict=True):
            os.dup2(saved, standard)
            os.close(saved)
        os.close(self._log)
        self.terminal.close()
        return written
