"""`FilePath`: a setting that is a path; `from_home`: an argument that is one. Nothing else knows `~`, but for the
options of parts that are called as `OPTIONS` says."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import BeforeValidator


def from_home(path: str | os.PathLike[str]) -> str:
    """The path with the home folder in the place of the `~` that it may begin with."""
    return os.path.expanduser(os.fspath(path))


def settled_path(value: Any) -> Any:
    """The path, or paths in a list; what is none stays, for those who refuse it."""
    if isinstance(value, list | tuple):
        return [settled_path(one) for one in value]
    return from_home(value) if isinstance(value, str | os.PathLike) else value


OPTIONS = ("path", "file")
"""Options of a part that are paths. They are settled with the settings, before anybody knows the part's class: what is
on record then names the same file for whoever reads it."""
FilePath = Annotated[str, BeforeValidator(settled_path)]
"""A file, a folder, or what may stand in its place: a name of the Hub, an address."""
