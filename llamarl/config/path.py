"""`FilePath`: a setting that is a path; `from_home`: an argument that is one. Nothing else knows `~`."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import BeforeValidator


def from_home(path: str | os.PathLike[str]) -> str:
    """The path with the home folder in the place of the `~` that it may begin with."""
    return os.path.expanduser(os.fspath(path))


def _settled(value: Any) -> Any:
    return from_home(value) if isinstance(value, str | os.PathLike) else value


FilePath = Annotated[str, BeforeValidator(_settled)]
"""A file, a folder, or what may stand in its place: a name of the Hub, an address."""
