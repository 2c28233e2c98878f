"""Assigns the files of a dataset repository to configurations and splits, by its README or by file names.

The rules are those of `datasets`, as far as they need no code of the repository:
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
"""Maximum characters of a README's header."""
MAX_PATTERNS = 4096
"""Maximum number of patterns in `data_files`, over all configurations."""
MAX_DEPTH = 8
"""Maximum nesting of `data_files`. Its documented forms need four levels."""
_WORDS = frozenset(("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"))
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")
_ABOUT = frozenset(("dataset_infos.json", "dataset_dict.json", "dataset_info.json", "state.json"))


def configurations(paths: Collection[str], readme: str) -> dict[str, Splits]:
    """Returns readable files by configuration and split. Raises ConfigError if the README's header is malformed."""
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
    """Returns configuration and files of a split. An empty `name` selects the only configuration or the default.

    Raises:
        ConfigError: it does not exist, or `name` is empty and there are several.
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
    """Yields the entries of `configs` in the header of a README. Raises ConfigError."""
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
    """Returns the YAML between two lines of `---`, the first of which is the first line that is not blank. None means
    no header. Raises ConfigError."""
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
    """Returns a name, which YAML may have parsed as a number. Other values may contain themselves."""
    return str(value) if isinstance(value, str | int | float) and value else otherwise


def _patterns(given: Any, split: str = "train", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yields split and pattern of each entry of `data_files`, in all of its forms. YAML aliases can nest an entry in
    itself, so the depth is limited. Raises ConfigError."""
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
    """Returns files by configuration and split according to their names: `CONFIG/SPLIT-00000-of-00001.parquet`,
    `data/SPLIT.jsonl`, `SPLIT/0.csv`."""
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
    """Returns configuration and split of a file. Empty means that its name has no split."""
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
