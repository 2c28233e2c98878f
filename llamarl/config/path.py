"""`FilePath`: a setting that is a path; `from_home`: an argument that is one. Nothing else knows `~`, but for the
options of parts that are called as `OPTIONS` says."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from llamarl.config.errors import ConfigError, one_of

NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that no setting has: NUL, and halves of characters."""
MAX_NAME_BYTES, MAX_PATH_CHARS = 255, 4000
"""Bounds of Linux, of a name and, about, of a path."""
MAX_ENTRIES, MAX_NEAR = 10_000, 3
"""Entries of a folder that are compared with a misspelled name, and those of them that are tried."""


def from_home(path: str | os.PathLike[str]) -> str:
    """The path with the home folder in the place of the `~` that it may begin with."""
    return os.path.expanduser(os.fspath(path))


def checked_path(path: Any, option: str) -> Path:
    """The path that a user gave, with the home folder in the place of `~`. Raises ConfigError: it is none."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ConfigError(f"{option} = {path!r:.60} is not a path; give it as text")
    try:
        longest = max(len(os.fsencode(name)) for name in text.split("/"))  # names of files may be no UTF-8
    except UnicodeEncodeError:
        longest = -1
    if longest < 0 or "\0" in text:
        raise ConfigError(f"{option} = {text!r:.100} holds NUL or half of a character; remove it")
    if longest > MAX_NAME_BYTES or len(text) > MAX_PATH_CHARS:
        raise ConfigError(f"{option} = {text!r:.100} is too long for a path; shorten it")
    return Path(from_home(text))


def near_path(path: str | Path, holds: Collection[str] = ()) -> str:
    """Returns an existing path that differs from `path` in the spelling of one name. Empty if there is none.

    Args:
        holds: names of files, of which a folder that is returned has at least one; empty accepts every path.
    """
    missing = given = Path(path)
    try:
        while not missing.parent.is_dir():
            missing = missing.parent
        with os.scandir(missing.parent) as entries:
            names = [one.name for one in islice(entries, MAX_ENTRIES)]
        for name in get_close_matches(missing.name, names, n=MAX_NEAR):
            found = missing.with_name(name) / given.relative_to(missing)
            if _has(found, holds) if holds else found.exists():
                return str(found)
    except (OSError, ValueError):  # no name of a file, or a folder that nobody may read
        return ""
    return ""


def not_a_run(path: str | Path, holds: Collection[str] = ("config.toml",)) -> ConfigError:
    """Returns the exception for a path that is not the folder of a run: the run that it may mean is named.

    Args:
        holds: names of files, of which the folders that are accepted have at least one.
    """
    if Path(path).is_dir():
        cause = f"{path} is not the folder of a run: it has no {' or '.join(holds)}"
    else:
        cause = f"there is no folder {path}" if not Path(path).exists() else f"{path} is a file"
    meant = _inside(Path(path), holds) or [*filter(None, [near_path(path, holds)])]
    return ConfigError(f"{cause}; " + (one_of(meant) if meant else "give the folder of a run, such as runs/demo"))


def _inside(folder: Path, holds: Collection[str]) -> list[str]:
    """Returns the first folders in `folder` that have at least one of the files."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(one.name for one in islice(entries, MAX_ENTRIES))
    except OSError:
        return []
    return list(islice((str(folder / name) for name in names if _has(folder / name, holds)), MAX_NEAR))


def _has(folder: Path, holds: Collection[str]) -> bool:
    return any((folder / file).is_file() for file in holds)


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
