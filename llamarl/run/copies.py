"""Copies of checkpoints (`checkpoint.copy_to`). The part `copies` makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from llamarl.config import ConfigError, RunConfig
from llamarl.config.ref import part


class CopyFailed(OSError):
    """The remote place refuses, cannot be reached, or does not hold the bytes that were sent."""


class Copies(Protocol):
    """The copies of one run's checkpoints. Every method raises CopyFailed."""

    name: str
    """Place of the copies, for messages."""

    def steps(self) -> list[int]:
        """Returns the steps of complete copies, ascending."""
        ...

    def bring_back(self, run: Path) -> int | None:
        """Copies the newest intact checkpoint to this run's folder. Returns its step, or None if there is no copy."""
        ...

    def clear(self) -> None:
        """Removes all copies."""
        ...


class Copier(Protocol):
    """Copies checkpoints while a run trains. Never ends a run."""

    async def loop(self) -> None:
        """Copies each committed checkpoint, until it is cancelled."""
        ...

    async def finish(self, phase: Callable[[str], None]) -> None:
        """Waits a limited time for the last copy, and warns if it is not complete."""
        ...


def open_copies(config: RunConfig) -> Copies:
    """Opens `checkpoint.copy_to`. Raises ConfigError if it cannot be opened."""
    copies: Copies = _offer(config, "RemoteCopies")(config.checkpoint, config.name)
    return copies


def open_copier(config: RunConfig, folder: object, warn: Callable[[str], None]) -> Copier | None:
    """Opens the copier of a `RunFolder`. Returns None if `checkpoint.copy_to` is empty. Raises ConfigError if it cannot
    be opened."""
    if not config.checkpoint.copy_to:
        return None
    copier: Copier = _offer(config, "CheckpointCopier")(config, folder, warn)
    return copier


def _offer(config: RunConfig, name: str) -> Any:
    try:
        return part("copies", name)
    except ConfigError as error:
        raise ConfigError(f"checkpoint.copy_to = {config.checkpoint.copy_to!r}: {error}") from None
