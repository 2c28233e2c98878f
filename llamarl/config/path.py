"""`FilePath`: a setting that is a path; `from_home`: an argument that is one. Nothing else knows `~`, but for the
options of parts that are called as `OPTIONS` says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from llamarl.config.errors import ConfigError

NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that no setting has: NUL, and halves of characters."""
MAX_NAME_BYTES, MAX_PATH_CHARS = 255, 4000
"""Bounds of Linux, of a name and, about, of a path."""


def from_home(path: str | os.PathLike[str]) -> str:
    """The path with the home folder in the place of the `~` that it may begin with."""
    return os.path.expanduser(os.fspath(path))


def checked_path(path: Any, option: str) -> Path:
    """The path that a user gave, with the home folder in the place of `~`. Raises ConfigError: it is none."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ConfigError(f"{option} = {path!r:.60} is no path; give it as text")
    try:
        longest = max(len(os.fsencode(name)) for name in text.split("/"))  # names of files may be no UTF-8
    except UnicodeEncodeError:
        longest = -1
    if longest < 0 or "\0" in text:
        raise ConfigError(f"{option} = {text!r:.100} holds NUL or half of a character; remove it")
    if longest > MAX_NAME_BYTES or len(text) > MAX_PATH_CHARS:
        raise ConfigError(f"{option} = {text!r:.100} is too long for a path; shorten it")
    return Path(from_home(text))


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
