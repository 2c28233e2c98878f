"""Records a supervised run: start, warnings and end in `events.jsonl`, and `summary.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

from llamarl.controller.supervision import Interrupted
from llamarl.observability.files import write_atomically
from llamarl.observability.metrics import finite
from llamarl.observability.sinks import EventLog, start_of_run
from llamarl.observability.spans import now_s
from llamarl.run.folder import RunFolder

WORK = "sft"
"""Value of `work` in the start event, by which readers omit fields that such a run lacks, such as rollouts."""


class SftRecord:
    """Events and summary of one run of `llamarl sft`. Use `recorded` to open and close it."""

    def __init__(self, folder: RunFolder, name: str, warn: Callable[[str], None], max_bytes: int) -> None:
        self._folder, self._name, self._warn = folder, name, warn
        self._events = EventLog(folder.events, lambda failure: warn(str(failure)), max_bytes)
        self._started_s = self._step_ended_s = now_s()
        self._last = dict[str, Any]()

    def begin(self, model: str, *, resumed: bool) -> None:
        self._events.add("start", **start_of_run(), model=model, resumed=resumed, work=WORK)

    def warn(self, text: str) -> None:
        """Shows and records a warning."""
        self._events.add("warning", text=text)
        self._warn(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Records a finished step. Returns its times: `wall_s` since the start, and `step_s`."""
        now = now_s()
        times = {"wall_s": now - self._started_s, "step_s": now - self._step_ended_s}
        self._step_ended_s = now
        self._last = {"steps": step, **{name: finite(value) for name, value in metrics.items()}}
        return times

    def end(self, end: Literal["finished", "interrupted", "failed"], reason: str) -> None:
        self._events.add("end", end=end, reason=reason)
        self._events.close()
        row = {"kind": "summary", "work": WORK, "name": self._name, "end": end, "end_reason": reason, "steps": 0}
        row |= {"wall_s": now_s() - self._started_s, **self._last}
        with suppress(OSError):  # a full disk must not hide how the run ended
            write_atomically(self._folder.summary, json.dumps(row, indent=2, allow_nan=False) + "\n")


@contextmanager
def recorded(record: SftRecord) -> Iterator[SftRecord]:
    """Records how the run in the `with` block ends."""
    try:
        yield record
    except BaseException as error:
        record.end("interrupted" if isinstance(error, Interrupted) else "failed", str(error).split("\n", 1)[0])
        raise
    record.end("finished", "")
