"""`RecordedRun`: the files of a run folder from which durations are measured."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.config import ConfigError, RunConfig, load_recorded
from llamarl.config.section import not_a_run
from llamarl.observability.files import read_run_rows
from llamarl.observability.spans import Span
from llamarl.run.rollouts import rollout_rows

MIN_STEPS = 8
"""Minimum number of steps after the first for a profile, because medians of fewer follow single disturbances."""
COUNTERS = (
    "num_input_tokens",
    "train_s",
    "decode_steps",
    "decode_rows",
    "decode_rows_squared",
    "decode_s",
    "decode_rows_s",
    "prefill_steps",
    "prefill_rows",
    "prefill_tokens",
    "prefill_s",
    "background_s",
    "trainer_background_s",
    "controller_cpu_s",
    "calls",
    "fetch_s",
)
"""Names under `extra.` in metrics.jsonl."""
OF_TRAINING = ("journal.jsonl", "rollouts.jsonl", "trace.json")
"""Files of a run of `llamarl train`. At least one exists."""
_FIX = "profile a run that has ended by itself"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """One run without its first step, which begins with empty generators and cold caches."""

    path: Path
    config: RunConfig
    counters: dict[str, np.ndarray]
    """Each of `COUNTERS`, per step, float64."""
    step_s: np.ndarray
    """Seconds of each step, float64."""
    skips_equal_rewards: bool
    """Some response tokens were not computed because their advantage was 0."""
    groups: list[list[tuple[int, float]]]
    """Tokens and reward of each response, in the order of the groups' prompts, including the first step."""
    spans: dict[str, list[Span]]
    """Spans of each executor, in seconds from a common origin."""


def read_run(path: str | Path) -> RecordedRun:
    """Reads a run folder. Raises ConfigError if it is not a run, a file is missing or damaged, or the run is too
    short."""
    folder = Path(path)
    if not (folder / "config.toml").is_file():
        raise not_a_run(folder)
    if not any((folder / name).exists() for name in OF_TRAINING):
        raise ConfigError(
            f"{folder} has neither rollouts nor generators to measure, as runs of `llamarl sft`; give a run of "
            "`llamarl train`"
        )
    read = [row for _, row in read_run_rows(folder / "metrics.jsonl", _FIX) if row.get("kind") == "step"]
    steps = {row["step"]: row for row in read if row.get("step_s", 0) is not None}  # None: trained again
    rows = [steps[step] for step in sorted(steps)][1:]
    if len(rows) < MIN_STEPS:
        raise ConfigError(
            f"{folder} has {len(steps)} steps, too few to measure; a profile needs {MIN_STEPS + 1}, better 30"
        )
    config = load_recorded(folder / "config.toml")
    if config.cluster.placement != "disaggregated":
        raise ConfigError(f"{folder}: cluster.placement = {config.cluster.placement!r}; profile a disaggregated run")
    return RecordedRun(
        path=folder,
        config=config,
        counters={name: _column(folder, rows, f"extra.{name}") for name in COUNTERS},
        step_s=_column(folder, rows, "step_s"),
        skips_equal_rewards=bool(
            (_column(folder, rows, "extra.num_computed_tokens") < _column(folder, rows, "num_loss_tokens")).any()
        ),
        groups=_groups(folder),
        spans=_spans(folder / "trace.json"),
    )


def _column(folder: Path, rows: list[dict[str, Any]], name: str) -> np.ndarray:
    if any(not isinstance(row.get(name), int | float) for row in rows):
        raise ConfigError(f"{folder / 'metrics.jsonl'} has steps without `{name}`; run it again with this version")
    return np.array([row[name] for row in rows], dtype=np.float64)


def _groups(folder: Path) -> list[list[tuple[int, float]]]:
    groups = defaultdict[int, dict[int, tuple[int, float]]](dict)
    try:
        for row in rollout_rows(folder):
            groups[row["group_id"]][row["index"]] = (len(row["token_ids"]), float(row["reward"]))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: a row is not a rollout ({error!r}); give the folder of a finished run") from None
    return [[groups[number][index] for index in sorted(groups[number])] for number in sorted(groups)]


def _spans(path: Path) -> dict[str, list[Span]]:
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        spans = {name: list[Span]() for name in names.values()}
        for event in events:
            if event["ph"] == "X":
                start_s = event["ts"] * 1e-6
                spans[names[event["pid"]]].append(Span(event["name"], start_s, start_s + event["dur"] * 1e-6))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {path}: {error!r}; {_FIX}") from None
    return {name: sorted(work, key=lambda span: span.start_s) for name, work in spans.items()}
