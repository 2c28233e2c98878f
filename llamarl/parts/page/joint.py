"""The joint of the page: the live `Screen`, the `Recorder` of trackers, and the page during a run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from llamarl.config import RunConfig
from llamarl.parts.page.screen import LiveScreen, NotebookScreen
from llamarl.parts.page.trackers._base import Trackers, tracker_class

__all__ = ["LiveScreen", "NotebookScreen", "Trackers", "check", "watching"]


def check(config: RunConfig) -> None:
    """Raises ConfigError if a tracker in `metrics.sinks` is not available."""
    for name in config.metrics.sinks:
        if name != "jsonl":
            tracker_class(name)


def watching(folder: Path) -> AbstractContextManager[str]:
    """Serves the page of a run from a separate process. Yields a sentence with the address."""
    from llamarl.parts.page.cli import watch

    return watch.watching(folder)
