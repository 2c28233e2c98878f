"""Writes event files to `tensorboard/` in the run folder: `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llamarl.observability.sinks import Subject
from llamarl.observability.spans import now_s
from llamarl.parts.page.trackers._base import Tracker


class Tensorboard(Tracker):
    """Writes one file per start. TensorBoard shows the newest value of a repeated step."""

    PACKAGE: ClassVar[str] = "tensorboard"

    def __init__(self, subject: Subject) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(subject.folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name.replace(".", "/", 1), value, step, wall_time=now_s())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
