"""Code that a run's folder makes `replay` and `--resume` execute, and whether the folder's owner is trusted."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarl.config import ConfigError, Ref, RunConfig
from llamarl.journal.reader import BEGIN, GIVEN, JournalWalk, segments
from llamarl.rewards._given import given_bytes
from llamarl.run.given import kept_function

_CODE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""`package.module:name`."""
_TEXTS = frozenset(("template", "system", "stop_strings"))
"""Settings that are text for a model."""
_WRITTEN = ("", "checkpoints", "journal", "logs")
"""Folders below a run's folder into which a run that goes on writes."""


def code_of(config: RunConfig) -> list[str]:
    """Settings of a run that name code which does not come with llamarl, as `option = value`: a run imports or executes
    all of it."""
    return list(dict.fromkeys(_code(config.model_dump(mode="json"), "")))


def _code(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            if name not in _TEXTS and (where, name) != ("", "recipe"):  # which is not applied again
                yield from _code(one, f"{where}.{name}".lstrip("."))
        if value.get("name") == "function" and value.get("file"):
            yield f"{where}.file = {value['file']!r}"
        if "vllm" in value and value.get("backend") == "vllm":
            yield f"{where}.vllm.python = {value['vllm'].get('python')!r}"
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _code(one, f"{where}.{number}")
    elif isinstance(value, str) and _CODE.fullmatch(value):
        yield f"{where} = {value!r}"


def check_trust(folder: Path, config: RunConfig, *, command: str, is_trusted: bool) -> None:
    """Raises ConfigError, unless the user says that the folder is trusted: a run would execute what its settings name,
    and the folder, its settings or its journal are another user's, or its files of functions are not those that the
    journal has on record; or a link is where a run that goes on writes."""
    if is_trusted:
        return
    fix = "add --trust if you trust who wrote it"
    if link := next(_links(folder), None) if command == "--resume" else None:
        raise ConfigError(f"{command}: {link} is a link, and the run would write where it leads; {fix}")
    if not (code := code_of(config)):
        return
    for path in (folder, folder / "config.toml", folder / "journal", folder / "weights.json"):
        with suppress(FileNotFoundError):
            if (owner := path.lstat().st_uid) not in (os.getuid(), 0):
                named = ", ".join(code[:5]) + ", ..." * (len(code) > 5)
                raise ConfigError(f"{command}: {path} is user {owner}'s, and the run executes {named}; {fix}")
    on_record = recorded_digests(folder)
    for file, digest in digests_of(config).items():
        if on_record.get(file, digest) != digest:
            raise ConfigError(
                f"{command}: config.toml and journal of {folder} disagree on the digest of {file}, and loading it runs "
                f"code; {fix}"
            )


def _links(folder: Path) -> Iterator[Path]:
    for name in _WRITTEN:
        with suppress(FileNotFoundError, NotADirectoryError):
            yield from (Path(one.path) for one in os.scandir(folder / name) if one.is_symlink())


def _functions(config: RunConfig) -> Iterator[Ref]:
    for reward in (config.reward, *(one.reward for one in (*config.data.sources, *config.data.eval_sets))):
        yield from (ref for ref in (reward.parts if reward else ()) if ref.name == "function" and "file" in ref.options)


def digests_of(config: RunConfig) -> dict[str, str]:
    """SHA-256 of the files of functions, as settings have it, by path."""
    return {str(ref.options["file"]): str(ref.options.get("digest", "")) for ref in _functions(config)}


def recorded_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files of functions, as the journal's newest file has it, by path; empty: it has none."""
    numbers, found = segments(folder), dict[str, str]()
    for _, header in JournalWalk(folder, {}, BEGIN, OSError).headers(numbers[-1:]):
        given = header.get("settings", {}).get(GIVEN)
        found = dict(given) if isinstance(given, dict) else {}
    return found


def with_trusted(config: RunConfig, output: Path | None = None) -> RunConfig:
    """The settings with the files of functions as they are now, whoever owns them.

    Args:
        output: folder of runs, below which the files are kept from now on; None: the settings hold their content.

    Raises:
        ConfigError: a file cannot be read, or not be kept.
    """

    def taken(one: Any) -> Any:
        if isinstance(one, Mapping) and one.get("name") == "function" and one.get("file"):
            try:
                data = given_bytes(one["file"], "", trusted=True)
            except ValueError as error:
                raise ConfigError(f"reward.parts: {error}") from None
            own = {"digest": hashlib.sha256(data).hexdigest()}
            if output is None:
                return {**one, "content": base64.b64encode(data).decode(), **own}
            return {**one, "file": str(kept_function(data, Path(one["file"]).stem.partition("-")[0], output)), **own}
        if isinstance(one, Mapping):
            return {name: taken(value) for name, value in one.items()}
        return [taken(value) for value in one] if isinstance(one, list) else one

    return RunConfig.model_validate(taken(config.model_dump(exclude_none=True))) if digests_of(config) else config
