"""Which files of a data set's repository are which configuration and split, by its README or by their names.

The rules are those of `datasets` where it can be followed without running code:
https://huggingface.co/docs/hub/datasets-data-files-configuration
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

import yaml

from llamarl.config.errors import ConfigError, did_you_mean
from llamarl.data.files import READERS, suffix
from llamarl.parts.hub.globs import Glob

Splits = dict[str, list[str]]
"""Paths in a repository, by split."""
README = "README.md"
DEFAULT = "default"
MAX_HEAD_CHARS = 1 << 20
"""Longest head of a README."""
MAX_PATTERNS = 4096
"""Most patterns in `data_files`, of all configurations."""
MAX_DEPTH = 8
"""Deepest nesting of `data_files`; its forms need four levels."""
_WORDS = frozenset(("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"))
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")
_ABOUT = frozenset(("dataset_infos.json", "dataset_dict.json", "dataset_info.json", "state.json"))


def configurations(paths: Collection[str], readme: str) -> dict[str, Splits]:
    """Files that can be read, by configuration and split. Raises ConfigError: the README's head is malformed."""
    usable = sorted(path for path in paths if _is_data(path))
    listed = list(_listed(readme))
    if not listed:
        return _by_names(usable)
    found, left = dict[str, Splits](), MAX_PATTERNS
    for name, entry in listed:
        patterns = list(islice(_patterns(entry.get("data_files")), left + 1))
        if (left := left - len(patterns)) < 0:
            raise ConfigError(f"the head of its {README} has more than {MAX_PATTERNS} patterns of `data_files`")
        if patterns:
            splits = Splits()
            for split, pattern in patterns:
                splits.setdefault(split, []).extend(Glob(pattern).filtered(usable))
        else:
            folder = _text(entry.get("data_dir"), "").strip("./")
            inside = [path for path in usable if not folder or path.startswith(f"{folder}/")]
            splits = _merged(_by_names(inside))
        found[name] = {split: list(dict.fromkeys(files)) for split, files in splits.items() if files}
    return {name: splits for name, splits in found.items() if splits}


def chosen(found: Mapping[str, Splits], name: str, split: str, readme: str = "") -> tuple[str, list[str]]:
    """Configuration and files of a split; an empty `name` stands for the only one, or the one marked as default.

    Raises:
        ConfigError: there is no such one, or none is named and there are several.
    """
    marked = next((one for one, entry in _listed(readme) if entry.get("default") is True), DEFAULT)
    known = next(iter(found)) if len(found) == 1 else marked
    if not name and known not in found:
        names = " or ".join(map(repr, sorted(found)))
        raise ConfigError(f"it has several configurations, so name one: config = {names}")
    if (name := name or known) not in found:
        raise ConfigError(f"config = {name!r} is none of its configurations; {did_you_mean(name, sorted(found))}")
    if split not in found[name]:
        raise ConfigError(f"split = {split!r} is none of those of {name!r}; {did_you_mean(split, sorted(found[name]))}")
    return name, found[name][split]


def _is_data(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(suffix(path)) and parts[-1] not in _ABOUT and not any(part.startswith((".", "_")) for part in parts)


def _listed(readme: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Entries of `configs` in the head of a README. Raises ConfigError."""
    if (head := _head(readme)) is None:
        return
    try:
        found = yaml.safe_load(head)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f" in line {line + 2}"
        raise ConfigError(f"the head of its {README} is malformed YAML{where}") from None
    entries = found.get("configs") if isinstance(found, dict) else None
    for entry in islice(entries, MAX_PATTERNS) if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            yield _text(entry.get("config_name"), DEFAULT), entry


def _head(readme: str) -> str | None:
    """YAML between two lines of `---`, of which one is the first that is not blank; None: there is none. Raises
    ConfigError."""
    lines = iter(readme.replace("\r\n", "\n").lstrip().split("\n"))
    if next(lines).rstrip() != "---":
        return None
    head, size = list[str](), 0
    for line in lines:
        if line.rstrip() == "---":
            return "\n".join(head)
        head.append(line)
        if (size := size + len(line)) > MAX_HEAD_CHARS:
            raise ConfigError(f"the head of its {README} has more than {MAX_HEAD_CHARS:,} characters")
    return None


def _text(value: Any, otherwise: str) -> str:
    """A name, which YAML may have read as a number. What is no name may contain itself."""
    return str(value) if isinstance(value, str | int | float) and value else otherwise


def _patterns(given: Any, split: str = "train", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Split and pattern of each of `data_files`, in all forms that it has. YAML's aliases can make it contain itself,
    so it is followed to a depth only. Raises ConfigError."""
    if isinstance(given, str):
        yield split, given
    elif depth > MAX_DEPTH:
        raise ConfigError(f"the head of its {README} nests `data_files` too deeply")
    elif isinstance(given, list):
        for one in given:
            yield from _patterns(one, split, depth + 1)
    elif isinstance(given, dict) and "path" in given:
        yield from _patterns(given["path"], _text(given.get("split"), split), depth + 1)
    elif isinstance(given, dict):
        for name, one in given.items():
            yield from _patterns(one, _text(name, split), depth + 1)


def _by_names(paths: Iterable[str]) -> dict[str, Splits]:
    """Files by configuration and split, as names say: `CONFIG/SPLIT-00000-of-00001.parquet`, `data/SPLIT.jsonl`,
    `SPLIT/0.csv`."""
    found, others = dict[str, Splits](), list[str]()
    for path in paths:
        name, split = _place(PurePosixPath(path))
        if split:
            found.setdefault(name, {}).setdefault(split, []).append(path)
        else:
            others.append(path)
    if not found and others:
        found[DEFAULT] = {"train": others}
    for splits in found.values():
        for split, files in splits.items():
            kinds = {suffix(path) for path in files}  # the same rows once more, in another format
            best = next(kind for kind in (".parquet", *READERS) if kind in kinds)
            splits[split] = [path for path in files if suffix(path) == best]
    return found


def _place(path: PurePosixPath) -> tuple[str, str]:
    """Configuration and split of a file; empty: it has no split in its name."""
    folders, stem = list(path.parts[:-1]), path.name.partition(".")[0]
    shard = _SHARD.fullmatch(stem)
    words = [word for word in re.split(r"[-_.]", stem) if word in _WORDS]
    split = shard[1] if shard else stem if stem in _WORDS else words[0] if words else ""
    if not split and folders and (folders[-1] in _WORDS or re.fullmatch(r"\d+", stem)):
        split = folders.pop()
    while folders and folders[-1] == "data":
        folders.pop()
    return "/".join(folders) or DEFAULT, split


def _merged(found: Mapping[str, Splits]) -> Splits:
    splits = Splits()
    for one in found.values():
        for split, files in one.items():
            splits.setdefault(split, []).extend(files)
    return splits
