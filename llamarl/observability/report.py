"""Report of a run that has ended: a text for the terminal and `summary.json` for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from llamarl.observability.accounting import SpeedVerdict
from llamarl.observability.files import write_atomically
from llamarl.observability.formats import ABSENT, duration, last_question, number, percent, plain
from llamarl.observability.metrics import EvalMetrics, Row, flat, held_out, of_sources
from llamarl.observability.view import CompletionView

LABEL_WIDTH = 20
COLUMN_WIDTH = 12
COMPLETION_LETTERS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """A file that the run leaves."""

    path: Path
    meaning: str
    """One line for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A whole run."""

    name: str
    """Name of the run."""
    end: Literal["finished", "interrupted", "failed"]
    """All steps done; stopped by the user; ended by an error."""
    end_reason: str = ""
    """One sentence, when it did not finish."""
    steps: int
    """Optimizer steps completed."""
    first_step: int = 1
    """The first one since the run began, or went on."""
    start_s: float
    """Seconds from the command to the start of the loop: processes, models, first evaluation."""
    wall_s: float
    """Seconds of the loop."""
    samples_per_s: float
    """Rollouts that the trainer consumed, per second of `wall_s`."""
    unaccounted_share: float
    """Share of `wall_s` in which no executor worked, 0 to 1."""
    overlap_share: float
    """Share of `wall_s` in which at least two roles worked at once, 0 to 1."""
    busy_share: Mapping[str, float]
    """Share of `wall_s` that each executor worked, 0 to 1, by executor name."""
    staleness_max: int
    """Largest staleness of any rollout that was trained on, in optimizer steps."""
    staleness_limit: int
    """Largest staleness that admission allowed, in optimizer steps."""
    max_staleness: int
    """S: `rollout.max_staleness`."""
    invalid_share: float
    """Share of rollouts that the reward could not judge, 0 to 1."""
    verdict: SpeedVerdict
    """Verdict on what bounded the speed."""
    before: tuple[EvalMetrics, ...] = ()
    """Held-out problems before training, set by set; none without evaluation."""
    after: tuple[EvalMetrics, ...] = ()
    """Held-out problems after training."""
    completions: tuple[CompletionView, ...] = ()
    """A few last responses."""
    files: tuple[RunFile, ...] = ()
    """Files of the run: what lies where."""
    warnings: tuple[str, ...] = ()
    """Warnings that the user has had."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further numbers for `summary.json`."""

    def to_json(self) -> Row:
        """Flat JSON of the numbers; evaluations as `accuracy_before`, `pass_at_k_after` and so on, of named sets as
        `accuracy_before.NAME`."""
        texts = {"verdict", "before", "after", "completions", "files", "warnings"}
        row = {key: value for key, value in flat("summary", self).items() if key not in texts}
        for when, entries in (("before", self.before), ("after", self.after)):
            for entry in entries:
                of_set = f".{entry.name}" if entry.name else ""
                shown = {key: value for key, value in entry.to_json().items() if key not in ("kind", "name")}
                row |= {f"{key}_{when}{of_set}": value for key, value in shown.items()}
        return row | {"bound": self.verdict.bound, "verdict": str(self.verdict), "num_warnings": len(self.warnings)}


def write_summary(path: Path, summary: RunSummary) -> None:
    """`summary.json`, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(path, json.dumps(summary.to_json(), indent=2, allow_nan=False) + "\n")


def render_summary(summary: RunSummary) -> str:
    """The end of a run, for people; plain text that survives a log, lines of any length."""
    sections = [
        _headline(summary),
        _held_out(summary),
        _time(summary),
        _completions(summary),
        [f"warning: {plain(text)}" for text in summary.warnings],
        _files(summary),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _headline(summary: RunSummary) -> list[str]:
    first, last = summary.first_step, summary.steps
    steps = f"{last:,} steps" if first == 1 else f"steps {first:,} to {last:,}" if last >= first else "no new step"
    took = f"{steps} in {duration(summary.wall_s)}, after a start-up of {duration(summary.start_s)}"
    if summary.end == "finished":
        return [f"{summary.name}: finished {took}"]
    why = f": {plain(summary.end_reason)}" if summary.end_reason else ""
    return [f"{summary.name}: {summary.end.upper()}{why}", f"after {took}"]


def _held_out(summary: RunSummary) -> list[str]:
    sets = list(dict.fromkeys(entry.name for entry in (*summary.before, *summary.after)))
    before, after = ({entry.name: entry for entry in entries} for entries in (summary.before, summary.after))
    return [line for name in sets for line in _of_set(before.get(name), after.get(name))]


def _of_set(before: EvalMetrics | None, after: EvalMetrics | None) -> list[str]:
    known = after or before
    assert known is not None

    def cells(show: Callable[[EvalMetrics], str]) -> tuple[str, str]:
        return show(before) if before else ABSENT, show(after) if after else ABSENT

    lines = [
        _table(f"{held_out(known.name)} ({known.num_prompts:,})", "before", "after", "change"),
        _table("accuracy", *cells(lambda entry: percent(entry.accuracy, 1)), _change(before, after)),
        *(_table(f"pass@{k}", *cells(partial(_chance, k=k))) for k in known.chances),
        _table("mean tokens", *cells(lambda entry: number(entry.mean_response_tokens))),
    ]
    if bad := [entry for entry in (after, before) if entry and entry.num_invalid]:
        lines += [_table("invalid", *cells(lambda entry: f"{entry.num_invalid:,}"), plain(bad[0].invalid_reason or ""))]
    return lines


def _chance(entry: EvalMetrics, k: int) -> str:
    return percent(entry.chances[k], 1) if k in entry.chances else ABSENT


def _table(label: str, before: str, after: str, change: str = "") -> str:
    room = LABEL_WIDTH + COLUMN_WIDTH - len(name := label.ljust(LABEL_WIDTH))
    cells = f"{name} {before.rjust(room - 1)}{after.rjust(COLUMN_WIDTH)}"
    return (cells + "    " + change).rstrip()


def _change(before: EvalMetrics | None, after: EvalMetrics | None) -> str:
    """Difference in points with its standard error, as if both were independent."""
    if before is None or after is None or math.isnan(before.accuracy + after.accuracy):
        return ""
    error = math.hypot(before.accuracy_error, after.accuracy_error)
    return f"{100 * (after.accuracy - before.accuracy):+.1f} points (standard error {100 * error:.1f})"


def _time(summary: RunSummary) -> list[str]:
    idle = ", ".join(f"{name} {percent(1 - share)}" for name, share in summary.busy_share.items())
    return [
        _fact("verdict", str(summary.verdict)),
        _fact("idle", idle or ABSENT),
        _fact(
            "overlap",
            f"{percent(summary.overlap_share)} of the time; all idle {percent(summary.unaccounted_share, 1)}",
        ),
        _fact("speed", f"{number(summary.samples_per_s)} rollouts/s"),
        _fact("staleness", f"at most {summary.staleness_max} of {summary.staleness_limit} (S {summary.max_staleness})"),
        _fact("invalid rewards", percent(summary.invalid_share, 1)),
        *_sources(summary.extra),
    ]


def _sources(extra: Mapping[str, float]) -> list[str]:
    """A line for each source of a mixture."""
    rewards, *shares = (of_sources(extra, name) for name in ("reward", "share", "right", "flat", "invalid"))
    what = ("of the groups", "right", "flat groups", "invalid")
    lines = list[str]()
    for label in shares[0]:
        told = [f"{percent(of.get(label))} {one}" for of, one in zip(shares, what, strict=True)]
        lines.append(
            _fact("" if lines else "sources", f"{label}: reward {number(rewards.get(label))}, {', '.join(told)}")
        )
    return lines


def _fact(label: str, text: str) -> str:
    return label.ljust(LABEL_WIDTH) + text


def _completions(summary: RunSummary) -> list[str]:
    lines = []
    for entry in summary.completions:
        lines.append(
            _fact(f"reward {number(entry.reward)}", "> " + _short(plain(last_question(entry.prompt)), from_end=False))
        )
        lines.append(_fact(f"advantage {entry.advantage:+.2f}", "  " + _short(plain(entry.response), from_end=True)))
    return lines


def _short(text: str, *, from_end: bool) -> str:
    if len(text) <= COMPLETION_LETTERS:
        return text
    return "…" + text[-COMPLETION_LETTERS:] if from_end else text[:COMPLETION_LETTERS] + "…"


def _files(summary: RunSummary) -> list[str]:
    """One line: the folder, and the names of the files in it."""
    if not summary.files:
        return []
    folder = summary.files[0].path.parent
    return [_fact("files", f"{folder}: {', '.join(file.path.name for file in summary.files)}")]
