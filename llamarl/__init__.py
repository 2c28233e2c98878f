"""llamarl: asynchronous, distributed reinforcement learning for language models, after the LlamaRL paper."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarl.api import ConfigError, EvalRecord, RunRecord, evaluate, generate, open_run, train

__version__ = "0.1.0"
__all__ = ["ConfigError", "EvalRecord", "RunRecord", "evaluate", "generate", "open_run", "train"]


def __getattr__(name: str) -> Any:
    """Public names are imported where one is used: executors need none of them."""
    if name not in __all__:
        raise AttributeError(f"module 'llamarl' has no attribute {name!r}")
    return getattr(importlib.import_module("llamarl.api"), name)
