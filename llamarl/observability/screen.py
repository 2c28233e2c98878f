"""The terminal during a run: drawn live, one line per step, or nothing but warnings."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from typing import Self, TextIO

from llamarl.config import ConfigError
from llamarl.config.ref import part
from llamarl.config.schema import ScreenConfig
from llamarl.observability.formats import duration, number, percent, remaining_s
from llamarl.observability.metrics import EvalMetrics, StepMetrics, held_out, of_sources, unjudged
from llamarl.observability.spans import now_s
from llamarl.observability.view import RunInfo, RunView

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
        print_to(sys.stderr, f"warning: {text}")


def open_screen(config: ScreenConfig, info: RunInfo) -> Screen:
    """The screen that the user asked for; `auto` draws on a terminal and in a notebook, and prints lines elsewhere.

    Raises:
        ConfigError: `live` where nothing can be drawn.
    """
    if config.kind == "none":
        return NullScreen()
    if config.kind == "auto" and _is_notebook():  # whose cell keeps every line
        with suppress(ConfigError):
            return part("page", "NotebookScreen")(info)
    drawable = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and sys.stdout.encoding.lower() == "utf-8"
    if config.kind == "live" and not drawable:
        raise ConfigError("`screen.kind = 'live'` needs a terminal with UTF-8; use `auto` or `lines`")
    if config.kind == "lines" or not drawable:
        return LineScreen(info, sys.stdout, sys.stderr)
    try:
        live = part("page", "LiveScreen")
    except ConfigError:
        if config.kind == "live":
            raise
        return LineScreen(info, sys.stdout, sys.stderr)
    return live(info)


def _is_notebook() -> bool:
    """A kernel runs in this process."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(find(), "kernel", None) is not None


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
            print_to(self._out, line)

    def show(self, view: RunView) -> None:
        self._phase = self._phase_line = ""
        for entry in view.evals[self._num_evals :]:
            print_to(self._out, f"{held_out(entry.name)} at step {entry.step}: {eval_facts(entry)}")
        self._num_evals = len(view.evals)
        if view.metrics and view.metrics.step > self._step:
            self._step = view.metrics.step
            print_to(self._out, step_line(view, view.metrics, self._info))

    def warn(self, text: str) -> None:
        print_to(self._err, f"warning: {text}")


def print_to(stream: TextIO, text: str) -> None:
    """One line; a reader that has gone costs the line alone."""
    encoding = stream.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except OSError:  # the reader has gone (`| head`, a closed session): the run matters more, and its files keep all
        return


def step_line(view: RunView, last: StepMetrics, info: RunInfo) -> str:
    """The last step for a log, about 120 characters. What generators decode is that of recent steps: they tell it with
    their rollouts, some in one step and none in the next."""
    digits, allowed = len(str(info.steps)), f"{last.staleness_limit} (S {info.max_staleness})"
    parts = [
        f"step {last.step:>{digits}}/{info.steps}",
        f"reward {number(last.reward_mean)}{_by_source(last)}",
        f"solved {percent(last.solve_rate)}",
        f"length {number(last.response_tokens_mean)}",
        f"stale {number(last.staleness_mean, 2)} max {last.staleness_max}/{allowed}",
        f"ratio {number(last.update.importance_ratio_mean)} max {number(last.update.importance_ratio_max)}",
        f"grad {number(last.update.grad_norm)}",
        f"{duration(last.step_s)}",
        f"{number(view.generated_tokens_per_s)} tok/s",
        f"eta {duration(remaining_s(info.steps - last.step, view.recent_step_s))}",
    ]
    if last.invalid_share > 0:
        parts.insert(3, f"invalid {percent(last.invalid_share)}")
    return "  ".join(parts)


def _by_source(last: StepMetrics) -> str:
    """Text: the rewards of a mixture's sources."""
    rewards = [f"{label} {number(reward)}" for label, reward in of_sources(last.extra, "reward").items()]
    return f" ({', '.join(rewards)})" if rewards else ""


def eval_facts(entry: EvalMetrics) -> str:
    """Text: what an evaluation found, on one line."""
    num_responses = entry.num_prompts * entry.k
    bad = f"{unjudged(entry.num_invalid, num_responses, entry.invalid_reason)}  " if entry.num_invalid else ""
    at_k = "".join(f"  pass@{k} {percent(share, 1)}" for k, share in entry.chances.items())
    return (
        f"{bad}accuracy {percent(entry.accuracy, 1)} ± {percent(entry.accuracy_error, 1)}{interval(entry)}{at_k}  "
        f"length {number(entry.mean_response_tokens)}  {entry.num_prompts:,} prompts  {duration(entry.wall_s)}"
    )


def interval(entry: EvalMetrics) -> str:
    """Text: the accuracy's interval in brackets; empty: none is known."""
    low, high = entry.accuracy_low, entry.accuracy_high
    if low is None or high is None or math.isnan(low):
        return ""
    return f" (95%: {percent(low, 1)} to {percent(high, 1)})"
