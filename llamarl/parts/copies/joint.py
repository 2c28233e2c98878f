"""The joint of copies: it implements `Copies` and `Copier` of the core (`llamarl/run/copies.py`)."""

from llamarl.parts.copies.copier import CheckpointCopier
from llamarl.parts.copies.remote import RemoteCopies

__all__ = ["CheckpointCopier", "RemoteCopies"]
