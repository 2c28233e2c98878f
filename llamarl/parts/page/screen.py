"""`LiveScreen`: draws the terminal during a run."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from llamarl.observability.screen import RunInfo, RunView, Screen, print_to
from llamarl.observability.spans import now_s
from llamarl.parts.page.layout import Board, PhaseView, frame

REFRESH_PER_S = 2
CELL_REFRESH_S, CELL_COLUMNS, CELL_LINES = 0.5, 110, 30
"""Seconds between two updates in a notebook, and the size of the block in columns and lines."""


class BoardScreen(Screen):
    """Collects the data of the live screen."""

    def __init__(self, info: RunInfo) -> None:
        self._board = Board(info=info, started_s=now_s())
        self._lock = threading.Lock()

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

    def warnings(self) -> Iterator[str]:
        """Yields a line for each warning."""
        for text, times in self._board.warnings.items():
            yield f"warning: {text}" + (f" ({times} times)" if times > 1 else "")


class LiveScreen(BoardScreen):
    """Draws on the whole terminal. Output of native libraries and child processes goes to `output.log`."""

    def __init__(self, info: RunInfo) -> None:
        super().__init__(info)
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
        with suppress(OSError):  # the terminal is closed
            self._live.stop()
        foreign_bytes = self._redirect.close()
        for line in self.warnings():
            print_to(sys.stderr, line)
        if foreign_bytes:
            print_to(sys.stderr, f"other output of this run: {self._log}")

    def _draw(self) -> Text:
        columns, lines = os.get_terminal_size(self._redirect.terminal.fileno())
        self._console.size = (columns, lines)  # rich would ask stdout, which is not the terminal now
        return frame(self._board, columns, lines, now_s())


class NotebookScreen(BoardScreen):
    """Draws one self-updating block in a notebook cell."""

    def __enter__(self) -> Self:
        from IPython.display import display

        self._is_over = threading.Event()
        self._handle: Any = display(self._drawn(), raw=True, display_id=True)
        self._thread = threading.Thread(target=self._renew, name="notebook", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=CELL_REFRESH_S)
        self._handle.update(self._drawn(), raw=True)

    def _renew(self) -> None:
        while not self._is_over.wait(CELL_REFRESH_S):
            self._handle.update(self._drawn(), raw=True)

    def _drawn(self) -> dict[str, str]:
        """Returns the block in the media types that a notebook may show."""
        console = Console(
            file=io.StringIO(), width=CELL_COLUMNS, record=True, highlight=False, force_jupyter=False
        )  # fmt: skip
        console.print(frame(self._board, CELL_COLUMNS, CELL_LINES, now_s()))
        html = console.export_html(inline_styles=True, clear=False, code_format="<pre>{code}</pre>")
        return {"text/plain": console.export_text(), "text/html": html}


def _ended(phases: tuple[PhaseView, ...]) -> tuple[PhaseView, ...]:
    if not phases or phases[-1].ended_s is not None:
        return phases
    return (*phases[:-1], replace(phases[-1], ended_s=now_s()))


class _Redirect:
    """Redirects stdout and stderr of this process and its children to a file, and keeps the terminal open."""

    def __init__(self, path: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(1), os.dup(2))
        self.terminal: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        self._size = os.fstat(self._log).st_size
        os.dup2(self._log, 1)
        os.dup2(self._log, 2)

    def close(self) -> int:
        """Restores the terminal. Returns the number of bytes written to the file."""
        sys.stdout.flush()
        sys.stderr.flush()
        written = os.fstat(self._log).st_size - self._size
        for saved, standard in zip(self._saved, (1, 2), strict=True):
            os.dup2(saved, standard)
            os.close(saved)
        os.close(self._log)
        self.terminal.close()
        return written
