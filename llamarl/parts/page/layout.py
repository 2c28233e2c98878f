"""Formats the live screen as text: a pure function of the board, the size of the terminal and the time.

Everything is a `Text` object and never markup, so text of a model cannot change the formatting.
Blocks are stacked. If they do not fit, blank lines are dropped first, then the blocks with the highest `rank`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from rich.cells import cell_len, chop_cells
from rich.text import Text

from llamarl.observability.metrics import (
    EvalMetrics,
    StepMetrics,
    duration,
    last_question,
    number,
    of_sources,
    percent,
    plain,
    remaining_s,
)
from llamarl.observability.screen import CompletionView, ExecutorView, RunInfo, RunView
from llamarl.parts.page.chart import chart

ACCENT, DIM, GOOD, WARN, BAD = "cyan", "dim", "green", "yellow", "red"
LABEL_WIDTH = 13
WIDE = 112
"""Minimum terminal columns for showing the reward chart next to the numbers."""
NUMBERS_WIDTH = 72
"""Width of the numbers next to the chart."""
SILENT_S, LOST_S = 10.0, 30.0
"""Ages of a heartbeat in seconds that are shown as slow and as lost."""
MAX_WARNINGS, MAX_SETS = 3, 5
FALL_ERRORS = 2.0
"""Standard errors by which a held-out accuracy must be below its best to be marked as a drop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseView:
    """A phase before or after the training loop."""

    text: str
    """Description of the phase, for example `starting executors`."""
    started_s: float
    """Time when the phase began, on the clock of `spans.now_s`."""
    done: int | None = None
    """Completed units. None means not countable."""
    total: int | None = None
    """Total units."""
    waits_for: str = ""
    """Names of executors that have not finished, with their state."""
    ended_s: float | None = None
    """Time when the phase ended. None means in progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """All data of a frame."""

    info: RunInfo
    started_s: float
    """Time when the screen was opened, on the clock of `spans.now_s`."""
    view: RunView | None = None
    """State of the training loop. None before it starts."""
    phases: tuple[PhaseView, ...] = ()
    """Phases, oldest first. The last one is in progress unless it has an end."""
    warnings: Mapping[str, int] = field(default_factory=dict)
    """Number of occurrences of each warning, oldest first."""


@dataclass(frozen=True, slots=True)
class _Block:
    rank: int
    """Blocks with rank 0 are never dropped. Blocks with the highest rank are dropped first."""
    lines: list[Text]


def frame(board: Board, width: int, height: int, now_s: float) -> Text:
    """Returns the screen, at most `width` cells wide and `height` lines high."""
    inner = max(width - 2, 1)
    view = board.view
    verdict = view.metrics.verdict if view and view.metrics else None
    blocks = [_Block(0, _header(board, inner, now_s))]
    if view is None:
        blocks.append(_Block(1, _phases(board.phases, inner, now_s)))
    else:
        blocks[0].lines.extend(_progress(board, view, inner, now_s))
        blocks.append(_Block(2, _executors(view.executors, inner, now_s, max(height // 3 - 2, 3))))
        blocks.append(_Block(3, _numbers(view, inner)))
        if verdict:
            blocks.append(_Block(4, _verdict(verdict, inner)))
    if board.warnings:
        blocks.append(_Block(1, _warnings(board.warnings, inner)))
    if view and view.completions:
        room = height - _size(blocks, spaced=True) - 1
        blocks.insert(4 if verdict else 3, _Block(5, _completions(view.completions, inner, room)))
    lines = _stack(blocks, height)
    for line in lines:
        line.rstrip()
        line.truncate(inner, overflow="ellipsis")
    return Text("\n").join(Text(" ").append_text(line) for line in lines)


def _size(blocks: Sequence[_Block], *, spaced: bool) -> int:
    full = [block for block in blocks if block.lines]
    return sum(len(block.lines) for block in full) + (len(full) - 1 if spaced else 0)


def _stack(blocks: Sequence[_Block], height: int) -> list[Text]:
    kept = [block for block in blocks if block.lines]
    while len(kept) > 1 and _size(kept, spaced=False) > height:
        kept.remove(max(kept, key=lambda block: block.rank))
    spaced = _size(kept, spaced=True) <= height
    lines: list[Text] = []
    for block in kept:
        if lines and spaced:
            lines.append(Text())
        lines += block.lines
    return lines[:height]


def _row(label: str, *parts: Text | str) -> Text:
    return Text.assemble((f"{label[: LABEL_WIDTH - 1]:{LABEL_WIDTH}}", DIM), *parts)


def _header(board: Board, inner: int, now_s: float) -> list[Text]:
    left = Text.assemble(
        ("llamarl", f"bold {ACCENT}"), ("  " + board.info.name, "bold"), ("  " + board.info.model, DIM)
    )
    right = Text(duration(now_s - board.started_s))
    if board.view:
        steps_left = board.info.steps - board.view.step - _batch_share(board.info, board.view)
        right.append("   eta ", DIM).append(duration(remaining_s(steps_left, board.view.recent_step_s)))
    left.truncate(max(inner - right.cell_len - 2, 7), overflow="ellipsis", pad=True)
    address = plain(board.info.watch).removeprefix("watch at ")
    watch = [_row("watch", Text(address, ACCENT))] if address else []
    return [Text.assemble(left, "  ", right), *watch]


def _batch_share(info: RunInfo, view: RunView) -> float:
    return min(view.groups_ready / info.groups_per_step, 1.0)


def _progress(board: Board, view: RunView, inner: int, now_s: float) -> list[Text]:
    info = board.info
    lines = [_progress_row("step", view.step, info.steps, inner)]
    if board.phases and board.phases[-1].ended_s is None:
        return lines + _phases(board.phases[-1:], inner, now_s)
    return [*lines, _progress_row("batch", view.groups_ready, info.groups_per_step, inner, "groups")]


def _progress_row(label: str, done: int, total: int, inner: int, unit: str = "") -> Text:
    counts = f"{done:,}/{total:,}" + (f" {unit}" if unit else "")
    return _row(label, counts.ljust(15), _line(done, total, inner - LABEL_WIDTH - 15))


def _line(done: float, total: float, width: int) -> Text:
    """Returns a thin bar, filled to `done` of `total`."""
    share = done / total if total > 0 and math.isfinite(done) else 0.0
    full = round(min(max(share, 0.0), 1.0) * max(width, 0))
    return Text.assemble(("━" * full, ACCENT), ("─" * max(width - full, 0), DIM))


def _phases(phases: Sequence[PhaseView], inner: int, now_s: float) -> list[Text]:
    label_width = max(min(34, inner - 30), 12)
    lines = []
    for phase in phases:
        text = Text(plain(phase.text))
        text.truncate(label_width, overflow="ellipsis", pad=True)
        took = duration((phase.ended_s or now_s) - phase.started_s).rjust(8)
        if phase.ended_s is not None:
            lines.append(Text.assemble(("✓ ", GOOD), text, (took, DIM)))
        elif phase.done is None or not phase.total:
            lines.append(Text.assemble(("› ", ACCENT), text, took))
        else:
            counts = f"  {phase.done:,}/{phase.total:,}".ljust(15)
            thin = _line(phase.done, phase.total, min(inner - label_width - 25, 40))
            lines.append(Text.assemble(("› ", ACCENT), text, took, counts, thin))
        if phase.ended_s is None and phase.waits_for:
            waits_for = wrap(f"waits for {phase.waits_for}", max(inner - 4, 20), max_lines=3, placeholder="…")
            lines += [Text(f"  {line}" if place == 0 else f"    {line}", DIM) for place, line in enumerate(waits_for)]
    return lines


def _executors(executors: Sequence[ExecutorView], inner: int, now_s: float, room: int) -> list[Text]:
    """Returns one line per executor. If there is too little space, the first ones and a count of the rest."""
    shown = executors if len(executors) <= room else executors[: room - 1]
    longest = max((cell_len(plain(one.state)) for one in shown), default=0)
    state_width = min(max(longest + 1, 23), max(inner - LABEL_WIDTH - 24, 1)) if inner >= 56 else 13
    bar_width = max(min(inner - LABEL_WIDTH - 24 - state_width, 24), 0)
    lines = []
    for executor in shown:
        age_s = now_s - executor.heartbeat_s
        age_style = BAD if age_s > LOST_S else WARN if age_s > SILENT_S else DIM
        state = Text(plain(executor.state))
        state.truncate(state_width, overflow="ellipsis", pad=True)
        known = None if math.isnan(executor.busy_share) else executor.busy_share
        busy = Text.assemble(_line(executor.busy_share, 1.0, bar_width), percent(known).rjust(5))
        seen = Text(f"   seen {duration(age_s)} ago" if inner >= 56 else f"  {duration(age_s)}", age_style)
        lines.append(_row(executor.name[: LABEL_WIDTH - 1].ljust(LABEL_WIDTH), state, busy, seen))
    if len(shown) < len(executors):
        lines.append(_row("", Text(f"and {len(executors) - len(shown)} more", DIM)))
    return lines


def _verdict(verdict: str, inner: int) -> list[Text]:
    first, *more = wrap(verdict, max(inner - LABEL_WIDTH, 20), max_lines=2, placeholder="…")
    text = Text(first)
    text.stylize(ACCENT, 0, verdict.find(" "))
    return [_row("verdict", text), *(_row("", line) for line in more)]


def _numbers(view: RunView, inner: int) -> list[Text]:
    wide = inner >= WIDE and len(view.rewards) > 1
    width = NUMBERS_WIDTH if wide else inner
    cell_width = max((width - LABEL_WIDTH) // 3, 16)
    rows = [
        ("generation", _Cell("", f"{number(view.generated_tokens_per_s)} tok/s"), *_queues(view)),
        *(_metric_rows(view.metrics) if view.metrics else ()),
    ]
    lines = [_row(label, *(cell.text(cell_width) for cell in cells)) for label, *cells in rows]
    if view.metrics:
        spark = "" if wide else chart(view.rewards, width - LABEL_WIDTH - 2 * cell_width, 1)[0]
        cells = [cell.text(cell_width) for cell in _reward_cells(view.metrics)]
        lines.append(_row("reward", *cells, Text(spark, ACCENT)))
        if rewards := of_sources(view.metrics.extra, "reward"):
            told = [Text.assemble((f"{label} ", DIM), (number(reward), "bold")) for label, reward in rewards.items()]
            lines.append(_row("sources", Text("   ").join(told)))
        if experts := _expert_cells(view.metrics.extra):
            lines.append(_row("experts", *(cell.text(cell_width) for cell in experts)))
    lines += _held_out(view.evals, width - LABEL_WIDTH)
    return _beside(lines, _reward_chart(view.rewards, inner - width - 4, len(lines)), width) if wide else lines


@dataclass(frozen=True, slots=True)
class _Cell:
    label: str
    value: str
    style: str = ""

    def text(self, width: int) -> Text:
        label = f"{self.label} " if self.label and cell_len(f"{self.label} {self.value}") < width else ""
        text = Text.assemble((label, DIM), (self.value, self.style or ("bold red" if self.value == "nan" else "")))
        text.truncate(width - 1, overflow="ellipsis")
        text.pad_right(width - text.cell_len)
        return text


def _queues(view: RunView) -> tuple[_Cell, _Cell]:
    return _Cell("running", f"{view.running_rollouts:,}"), _Cell("waiting", f"{view.waiting_rollouts:,}")


def _reward_cells(last: StepMetrics) -> tuple[_Cell, _Cell]:
    reward = _Cell("mean", number(last.reward_mean), "bold")
    if last.invalid_share > 0:
        return reward, _Cell("ungraded", percent(last.invalid_share, 1), WARN)
    return reward, _Cell("right", percent(last.solve_rate), "bold")


def _expert_cells(extra: Mapping[str, float]) -> list[_Cell]:
    """Returns cells for the layer with the highest expert load and for the number of idle experts. Empty means a dense
    model."""
    loads, idle = (
        [value for name, value in extra.items() if name.startswith(prefix)]
        for prefix in ("expert_load.", "idle_experts.")
    )
    if not loads:
        return []
    return [_Cell("busiest", f"{number(max(loads))} x mean"), _Cell("idle", f"{sum(idle):.0f}", WARN * (sum(idle) > 0))]


def _metric_rows(last: StepMetrics) -> list[tuple[str, _Cell, _Cell, _Cell]]:
    over = WARN if last.staleness_max > last.staleness_limit else ""
    return [
        (
            "staleness",
            _Cell("mean", number(last.staleness_mean)),
            _Cell("max", f"{last.staleness_max} of {last.staleness_limit}", over),
            _Cell("sync", duration(last.sync_s)),
        ),
        (
            "ratio",
            _Cell("mean", number(last.update.importance_ratio_mean)),
            _Cell("max", number(last.update.importance_ratio_max)),
            _Cell("capped", percent(last.update.capped_share, 1)),
        ),
        (
            "update",
            _Cell("grad norm", number(last.update.grad_norm)),
            _Cell("loss", number(last.update.loss)),
            _Cell("kl", number(last.update.kl_to_behavior, 2)),
        ),
        (
            "length",
            _Cell("mean", number(last.response_tokens_mean)),
            _Cell("max", f"{last.response_tokens_max:,}"),
            _Cell("truncated", percent(last.truncated_share)),
        ),
    ]


def _held_out(evals: Sequence[EvalMetrics], width: int) -> list[Text]:
    """Returns a line for each held-out set. If there is too little space, the first ones and a count of the rest."""
    sets = dict[str, list[EvalMetrics]]()
    for entry in evals:
        sets.setdefault(plain(entry.name or "held-out"), []).append(entry)
    shown = list(sets.items())[: MAX_SETS if len(sets) == MAX_SETS else MAX_SETS - 1]
    lines = [_row(name, _evals(entries, width)) for name, entries in shown]
    if num_more := len(sets) - len(shown):
        lines.append(_row("", Text(f"and {num_more} more sets", DIM)))
    return lines


def _evals(evals: Sequence[EvalMetrics], width: int) -> Text:
    """Returns the newest accuracy, the best one if higher, the first one, and the trend, as far as they fit."""
    first, now = evals[0], evals[-1]
    best = max(evals, key=lambda entry: -1.0 if math.isnan(entry.accuracy) else entry.accuracy)
    is_below = best.accuracy > now.accuracy
    fell = is_below and best.accuracy - now.accuracy > FALL_ERRORS * math.hypot(best.accuracy_error, now.accuracy_error)
    cells = [("now", now, WARN if fell else "bold")]
    cells += [("best", best, WARN if fell else "")] if is_below else []
    cells += [("first", first, "")] if first not in (now, best) else []
    text = Text()
    for label, entry, style in cells:
        cell = Text.assemble((f"{label} ", DIM), (percent(entry.accuracy, 1), style), (f" (step {entry.step})", DIM))
        cell.append(f" {entry.num_invalid:,} ungraded" * bool(entry.num_invalid), WARN)
        if text and text.cell_len + 3 + cell.cell_len > width:
            break
        text.append("   " if text else "").append_text(cell)
    room = min(width - text.cell_len - 3, len(evals))
    if len(evals) > 1 and room >= 2:
        text.append("   ").append(chart([entry.accuracy for entry in evals], room, 1)[0], ACCENT)
    return text


def _reward_chart(rewards: Sequence[float], width: int, height: int) -> list[Text]:
    title = Text(f"{'':8}reward, {len(rewards)} steps", DIM)
    rows = chart(rewards, width - 8, height - 1)
    known = [value for value in rewards if math.isfinite(value)]
    labels = [""] * len(rows)
    if known and rows:
        labels[0], labels[-1] = number(max(known)), number(min(known))
    return [
        title,
        *(Text.assemble((label.rjust(6) + "  ", DIM), (row, ACCENT)) for label, row in zip(labels, rows, strict=True)),
    ]


def _beside(left: Sequence[Text], right: Sequence[Text], left_width: int) -> list[Text]:
    lines = []
    for line, other in zip(left, right, strict=True):
        line.truncate(left_width, overflow="ellipsis", pad=True)
        lines.append(Text.assemble(line, "    ", other))
    return lines


def _completions(completions: Sequence[CompletionView], inner: int, room: int) -> list[Text]:
    """Returns for each completion reward and advantage, the start of the prompt, and the end of the response."""
    completions = completions[: max(room // 2, 0)]
    each = min(room // max(len(completions), 1), 6)
    width = max(inner - LABEL_WIDTH, 8)
    lines = []
    for entry in completions:
        advantage = f"adv {entry.advantage:+.2f}"
        lines.append(
            _row(f"reward {number(entry.reward, 2)}", Text(_first_line(plain(last_question(entry.prompt)), width), DIM))
        )
        pieces = chop_cells(plain(entry.response), width) or [""]
        if len(pieces) > each - 1:
            pieces = chop_cells("…" + "".join(pieces[1 - each :])[1:], width)
        turns = f"{entry.turns} turns" if entry.turns > 1 else ""
        if turns and len(pieces) == 1 < each - 1:
            pieces.append("")
        labels = {0: advantage, 1: turns}
        lines += [_row(labels.get(place, ""), Text(piece)) for place, piece in enumerate(pieces)]
    return lines


def _first_line(text: str, width: int) -> str:
    pieces = chop_cells(text, width)
    return pieces[0][:-1] + "…" if len(pieces) > 1 else text


def _warnings(warnings: Mapping[str, int], inner: int) -> list[Text]:
    lines = []
    for text, times in list(warnings.items())[-MAX_WARNINGS:]:
        counted = f"{plain(text)}  ({times} times)" if times > 1 else plain(text)
        pieces = wrap(counted, max(inner - 2, 20), max_lines=2, placeholder="…")
        lines += [Text("! " + piece if place == 0 else "  " + piece, WARN) for place, piece in enumerate(pieces)]
    return lines
