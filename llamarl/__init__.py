"""llamarl: asynchronous, distributed reinforcement learning for language models, after the LlamaRL paper."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarl.api import ConfigError, EvalRecord, RunRecord, evaluate, generate, open_run, train

    __version__: str
__all__ = ["ConfigError", "EvalRecord", "RunRecord", "evaluate", "generate", "open_run", "train"]


def __getattr__(name: str) -> Any:
    """Imports a public name where it is used: executors need none of them."""
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module 'llamarl' has no attribute {name!r}")
    return getattr(importlib.import_module("llamarl.api"), name)


def _version() -> str:
    """Returns the version of the installed package, which its tag sets."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return metadata.version("llamarl")
    except metadata.PackageNotFoundError:  # a clone on Python's path
        return "0+unknown"
