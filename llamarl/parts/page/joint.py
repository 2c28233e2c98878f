"""The joint of the page: the live `Screen`, the `Recorder` of trackers, and the page beside a run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from llamarl.config import RunConfig
from llamarl.parts.page.screen import LiveScreen, NotebookScreen
from llamarl.parts.page.trackers._base import Trackers, tracker_class

__all__ = ["LiveScreen", "NotebookScreen", "Trackers", "check", "watching"]


def check(config: RunConfig) -> None:
    """Whether each of `metrics.sinks` is there. Raises ConfigError."""
    for name in config.metrics.sinks:
        if name != "jsonl":
            tracker_class(name)


def watching(folder: Path) -> AbstractContextManager[str]:
    """While a run goes on, a process of its own shows it; what it says of where."""
    from llamarl.parts.page.cli import watch

    return watch.watching(folder)
