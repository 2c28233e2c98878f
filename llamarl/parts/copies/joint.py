"""The joint of copies: it implements `Copies` and `Copier` (`llamarl/run/copies.py`), and `StateMirror`
(`llamarl/checkpoint/mirroring.py`), of the core. Without torch until a mirror is opened."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from llamarl.checkpoint.keeper import Place
from llamarl.parts.copies.copier import CheckpointCopier
from llamarl.parts.copies.remote import RemoteCopies

if TYPE_CHECKING:
    from llamarl.checkpoint.mirroring import StateMirror
    from llamarl.weight_sync.base import Exchange

__all__ = ["CheckpointCopier", "RemoteCopies", "open_mirror"]


def open_mirror(folder: Path, rank: int, num_ranks: int, exchange: Exchange, keepers: Iterable[Place]) -> StateMirror:
    """Opens the mirror of one rank, see `Mirror`."""
    from llamarl.parts.copies.mirror import Mirror

    return Mirror(folder, rank, num_ranks, exchange, keepers)
