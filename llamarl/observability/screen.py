"""The terminal during a run: drawn live, one line per step, or nothing but warnings."""

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

from llamarl.config import ConfigError
from llamarl.config.schema import ScreenConfig
from llamarl.observability.formats import duration, number, percent, remaining_s
from llamarl.observability.metrics import EvalMetrics, StepMetrics, unjudged
from llamarl.observability.spans import now_s
from llamarl.observability.view import RunInfo, RunView
from llamarl.parts.page.layout import Board, PhaseView, frame

REFRESH_PER_S = 2
PHASE_LINE_S, WAIT_LINE_S = 10.0, 1.0
"""Least time between two lines about the same phase, also of one that waits for somebody."""


class Screen:
    """Shows a run. All calls return at once and may come from any thread; use it as a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        return None

    def phase(self, text: str, done: int | None = None, total: int | None = None, waits_for: str = "") -> None:
        """Work outside the loop, and who has not done it yet. It ends with the next phase of another text, or with
        `show`."""

    def show(self, view: RunView) -> None:
        """The loop's newest snapshot; replaces the last one."""

    def warn(self, text: str) -> None:
        """Something that the user should know; never lost."""
        _print(sys.stderr, f"warning: {text}")


def open_screen(config: ScreenConfig, info: RunInfo) -> Screen:
    """The screen that the user asked for; `auto` draws on a terminal and prints lines elsewhere.

    Raises:
        ConfigError: `live` where nothing can be drawn.
    """
    if config.kind == "none":
        return NullScreen()
    drawable = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and sys.stdout.encoding.lower() == "utf-8"
    if config.kind == "live" and not drawable:
        raise ConfigError("`screen.kind = 'live'` needs a terminal with UTF-8; use `auto` or `lines`")
    if config.kind == "lines" or not drawable:
        return LineScreen(info, sys.stdout, sys.stderr)
    return LiveScreen(info)


class NullScreen(Screen):
    """Shows nothing; warnings still reach stderr."""


class LineScreen(Screen):
    """One line per step, evaluation and phase: for logs."""

    def __init__(self, info: RunInfo, out: TextIO, err: TextIO) -> None:
        self._info = info
        self._out = out
        self._err = err
        self._step = 0
        self._num_evals = 0
        self._phase = ""
        self._phase_line = ""
        self._phase_line_s = 0.0

    def phase(self, text: str, done: int | None = None, total: int | None = None, waits_for: str = "") -> None:
        line = text if done is None or total is None else f"{text} {done:,}/{total:,}"
        line += f", waits for {waits_for}" if waits_for else ""
        least_s = WAIT_LINE_S if waits_for else PHASE_LINE_S
        due = text != self._phase or done == total or now_s() - self._phase_line_s >= least_s
        if due and line != self._phase_line:
            self._phase, self._phase_line, self._phase_line_s = text, line, now_s()
            _print(self._out, line)

    def show(self, view: RunView) -> None:
        self._phase = self._phase_line = ""
        for entry in view.evals[self._num_evals :]:
            _print(self._out, f"held-out at step {entry.step}: {eval_facts(entry)}")
        self._num_evals = len(view.evals)
        if view.metrics and view.metrics.step > self._step:
            self._step = view.metrics.step
            _print(self._out, step_line(view.metrics, self._info, view.recent_step_s))

    def warn(self, text: str) -> None:
        _print(self._err, f"warning: {text}")


def _print(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except OSError:  # the reader has gone (`| head`, a closed session): the run matters more, and its files keep all
        return


def step_line(last: StepMetrics, info: RunInfo, recent_step_s: float) -> str:
    """One step for a log, about 120 characters."""
    digits, allowed = len(str(info.steps)), f"{last.staleness_limit} (S {info.max_staleness})"
    parts = [
        f"step {last.step:>{digits}}/{info.steps}",
        f"reward {number(last.reward_mean)}",
        f"solved {percent(last.solve_rate)}",
        f"length {number(last.response_tokens_mean)}",
        f"stale {number(last.staleness_mean, 2)} max {last.staleness_max}/{allowed}",
        f"ratio {number(last.update.importance_ratio_mean)} max {number(last.update.importance_ratio_max)}",
        f"grad {number(last.update.grad_norm)}",
        f"{duration(last.step_s)}",
        f"{number(last.generated_tokens_per_s)} tok/s",
        f"eta {duration(remaining_s(info.steps - last.step, recent_step_s))}",
    ]
    if last.invalid_share > 0:
        parts.insert(3, f"invalid {percent(last.invalid_share)}")
    return "  ".join(parts)


def eval_facts(entry: EvalMetrics) -> str:
    """What an evaluation found, on one line."""
    num_responses = entry.num_prompts * entry.k
    bad = f"{unjudged(entry.num_invalid, num_responses, entry.invalid_reason)}  " if entry.num_invalid else ""
    at_k = f"  pass@{entry.k} {percent(entry.pass_at_k, 1)}" if entry.k > 1 else ""
    return (
        f"{bad}accuracy {percent(entry.accuracy, 1)} ± {percent(entry.accuracy_error, 1)}{at_k}  "
        f"length {number(entry.mean_response_tokens)}  {entry.num_prompts:,} prompts  {duration(entry.wall_s)}"
    )


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
            _print(sys.stderr, f"warning: {text}" + (f" ({times} times)" if times > 1 else ""))
        if foreign_bytes:
            _print(sys.stderr, f"other output of this run: {self._log}")

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
