"""Base class of the settings' sections, and the types of values that several sections have: paths and devices.

`FilePath` is a setting that is a path, `from_home` expands an argument that is a path. Only this module and the options
in `OPTIONS` expand `~`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from llamarl.config.errors import ConfigError, one_of


class Section(BaseModel):
    """Base of all sections. Unknown keys are errors, values are not coerced, infinity is refused, and objects are
    frozen."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )


NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that no setting may contain: NUL and lone surrogates."""
MAX_NAME_BYTES, MAX_PATH_CHARS = 255, 4000
"""Limits of Linux for a file name, and approximately for a path."""
MAX_ENTRIES, MAX_NEAR = 10_000, 3
"""Entries of a folder that are compared with a misspelled name, and how many of the nearest are tried."""


def from_home(path: str | os.PathLike[str]) -> str:
    """Returns the path with a leading `~` replaced by the home folder."""
    return os.path.expanduser(os.fspath(path))


def checked_path(path: Any, option: str) -> Path:
    """Returns the path that a user gave, with `~` expanded. Raises ConfigError if the value is not a path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ConfigError(f"{option} = {path!r:.60} is not a path; give it as text")
    try:
        longest = max(len(os.fsencode(name)) for name in text.split("/"))  # file names need not be UTF-8
    except UnicodeEncodeError:
        longest = -1
    if longest < 0 or "\0" in text:
        raise ConfigError(f"{option} = {text!r:.100} contains NUL or a lone surrogate; remove it")
    if longest > MAX_NAME_BYTES or len(text) > MAX_PATH_CHARS:
        raise ConfigError(f"{option} = {text!r:.100} is too long for a path; shorten it")
    return Path(from_home(text))


def near_path(path: str | Path, holds: Collection[str] = ()) -> str:
    """Returns an existing path that differs from `path` in the spelling of one name. Empty if there is none.

    Args:
        holds: names of files. The returned folder has at least one of them. Empty accepts every path.
    """
    missing = given = Path(path)
    try:
        while not missing.parent.is_dir():
            missing = missing.parent
        with os.scandir(missing.parent) as entries:
            names = [entry.name for entry in islice(entries, MAX_ENTRIES)]
        for name in get_close_matches(missing.name, names, n=MAX_NEAR):
            found = missing.with_name(name) / given.relative_to(missing)
            if _has(found, holds) if holds else found.exists():
                return str(found)
    except (OSError, ValueError):  # not a file name, or a folder without permission to read
        return ""
    return ""


def not_a_run(path: str | Path, holds: Collection[str] = ("config.toml",)) -> ConfigError:
    """Returns the exception for a path that is not the folder of a run. The message names the run that it may mean.

    Args:
        holds: names of files. A folder of a run has at least one of them.
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
            names = sorted(entry.name for entry in islice(entries, MAX_ENTRIES))
    except OSError:
        return []
    return list(islice((str(folder / name) for name in names if _has(folder / name, holds)), MAX_NEAR))


def _has(folder: Path, holds: Collection[str]) -> bool:
    return any((folder / file).is_file() for file in holds)


def resolved_path(value: Any) -> Any:
    """Expands `~` in a path, or in each path of a list. Returns other values unchanged, for validators to refuse."""
    if isinstance(value, list | tuple):
        return [resolved_path(one) for one in value]
    return from_home(value) if isinstance(value, str | os.PathLike) else value


OPTIONS = ("path", "file")
"""Options of a part that are paths. They are expanded when settings load, before the part's class is known, so that
recorded settings name the same file for every reader."""
FilePath = Annotated[str, BeforeValidator(resolved_path)]
"""A file, a folder, or a text in its place: a name on the Hub or an address."""


PLACED = "LLAMARL_PLACED"
"""Environment variable of an executor that sees only its own devices."""
ALONE = "LLAMARL_ALONE"
"""Environment variable of an executor that shares its GPUs with no other executor."""
ADDRESS = "LLAMARL_ADDRESS"
"""Environment variable with an address of this host that the run's other hosts can reach."""
WEIGHTS_ADDRESS = "LLAMARL_WEIGHTS_ADDRESS"
"""Environment variable with the address for sending and receiving weights, if weights have their own network."""


def named_devices(text: str) -> tuple[int, ...]:
    """Returns the device numbers in `cuda:0,2-3`, and none for `cuda` and `cpu`."""
    parts = (part.split("-") for part in text.partition(":")[2].split(",") if part)
    return tuple(number for part in parts for number in range(int(part[0]), int(part[-1]) + 1))


def _checked(text: str) -> str:
    fits = re.fullmatch(r"cpu|cuda(:\d+(-\d+)?(,\d+(-\d+)?)*)?", text, re.ASCII)
    devices = named_devices(text) if fits else ()
    if not fits or len(set(devices)) < len(devices) or (":" in text and not devices):
        raise ValueError(f"{text!r} is not a device; use 'cpu', 'cuda', or 'cuda:0,2-3' to name some, each once")
    return text


Device = Annotated[str, AfterValidator(_checked)]
"""`cpu`; `cuda` for the next free GPUs, one per rank; `cuda:0,2-3` for these GPUs."""
