"""The terminal during a run: drawn live, one line per step, or warnings only. The controller replaces its `RunView`."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

from llamarl.config import ConfigError
from llamarl.config.ref import part
from llamarl.config.schema import ScreenConfig
from llamarl.observability.metrics import (
    EvalMetrics,
    StepMetrics,
    duration,
    held_out,
    number,
    of_sources,
    percent,
    remaining_s,
    unjudged,
)
from llamarl.observability.spans import now_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """Constant facts of a run."""

    name: str
    """Name of the run."""
    model: str
    """Trained model in a few words, for example `llama 0.63M`."""
    folder: Path
    """The run's folder. While a live screen is drawn, other output goes to `output.log` in it."""
    steps: int
    """Total optimizer steps."""
    groups_per_step: int
    """P: groups per step."""
    max_staleness: int
    """S: `rollout.max_staleness`. The window adds to the bound."""
    watch: str = ""
    """Address of the page that shows the run in a browser. Empty means that there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorView:
    """Current state of one executor."""

    name: str
    """`generator-0`, `reward`, `trainer`."""
    state: str
    """State in a few words: `decoding`, `waits for rollouts`."""
    busy_share: float
    """`StepMetrics.busy_share` of the last step. NaN means unknown."""
    heartbeat_s: float
    """Time of its last sign of life, on the clock of `spans.now_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionView:
    """One response to show."""

    prompt: str
    """Rendered prompt. Its start is shown."""
    response: str
    """Decoded response. Its end is shown."""
    reward: float
    """The reward. NaN means an invalid reward."""
    advantage: float
    """Its advantage in its group."""
    turns: int = 1
    """Turns of the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """Snapshot of the loop, which the controller replaces whenever something changes. Screens only read it."""

    step: int
    """Optimizer steps completed."""
    recent_step_s: float = math.nan
    """Mean seconds of the last steps, for the ETA. NaN before the first."""
    groups_ready: int = 0
    """Scored groups for the next step, 0 to P (more if the trainer is behind)."""
    executors: tuple[ExecutorView, ...] = ()
    """All executors, in display order."""
    generated_tokens_per_s: float = 0.0
    """Current tokens per second of all generators."""
    running_rollouts: int = 0
    """Rollouts being decoded."""
    waiting_rollouts: int = 0
    """Rollouts queued at the generators."""
    metrics: StepMetrics | None = None
    """Metrics of the last step. None before the first."""
    rewards: tuple[float, ...] = ()
    """Mean reward of each step so far."""
    evals: tuple[EvalMetrics, ...] = ()
    """Evaluations so far, oldest first."""
    completions: tuple[CompletionView, ...] = ()
    """A few responses of the last step."""


PHASE_LINE_S, WAIT_LINE_S = 10.0, 1.0
"""Least time between two lines about the same phase, and if the phase waits for somebody."""


class Screen:
    """Shows a run, as a context manager. All calls return at once and may come from any thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        return None

    def phase(self, text: str, done: int | None = None, total: int | None = None, waits_for: str = "") -> None:
        """Shows work outside the loop, and who is still missing. The phase ends with `show`, or with a phase of another
        text."""

    def show(self, view: RunView) -> None:
        """Shows the newest snapshot of the loop in the place of the last one."""

    def warn(self, text: str) -> None:
        """Shows a warning to the user. Warnings are never lost."""
        print_to(sys.stderr, f"warning: {text}")


def open_screen(config: ScreenConfig, info: RunInfo) -> Screen:
    """Opens the screen that the user chose. `auto` draws on a terminal and in a notebook, and prints lines elsewhere.

    Raises:
        ConfigError: `live` without a terminal.
    """
    if config.kind == "none":
        return NullScreen()
    if config.kind == "auto" and _is_notebook():  # a notebook cell would keep every line
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
    """Returns whether a notebook kernel runs in this process."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(find(), "kernel", None) is not None


class NullScreen(Screen):
    """Shows nothing but warnings, on stderr."""


class LineScreen(Screen):
    """Prints one line per step, evaluation and phase, for logs."""

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
    """Prints one line. If the reader has closed the stream, only this line is lost."""
    encoding = stream.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except OSError:  # the reader is gone (`| head`, a closed session), and the files of the run keep everything
        return


def step_line(view: RunView, last: StepMetrics, info: RunInfo) -> str:
    """Returns a log line of about 120 characters for the last step. Tokens per second are those of recent steps,
    because generators report them with their rollouts, unevenly over steps."""
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
    """Returns text with the rewards of a mixture's sources."""
    rewards = [f"{label} {number(reward)}" for label, reward in of_sources(last.extra, "reward").items()]
    return f" ({', '.join(rewards)})" if rewards else ""


def eval_facts(entry: EvalMetrics) -> str:
    """Returns the results of an evaluation on one line."""
    num_responses = entry.num_prompts * entry.k
    bad = f"{unjudged(entry.num_invalid, num_responses, entry.invalid_reason)}  " if entry.num_invalid else ""
    at_k = "".join(f"  pass@{k} {percent(share, 1)}" for k, share in entry.chances.items())
    return (
        f"{bad}accuracy {percent(entry.accuracy, 1)} ± {percent(entry.accuracy_error, 1)}{interval(entry)}{at_k}  "
        f"length {number(entry.mean_response_tokens)}  {entry.num_prompts:,} prompts  {duration(entry.wall_s)}"
    )


def interval(entry: EvalMetrics) -> str:
    """Returns the accuracy's interval in parentheses. Empty means unknown."""
    low, high = entry.accuracy_low, entry.accuracy_high
    if low is None or high is None or math.isnan(low):
        return ""
    return f" (95%: {percent(low, 1)} to {percent(high, 1)})"
