"""Code that `replay` and `--resume` would execute from a run's folder, and whether the folder's owner is trusted."""

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
from llamarl.run.python_inputs import kept_function

_CODE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""`package.module:name`."""
_NAMES_CODE = {"function": "file", "verifiers": "id", "skyrl_gym": "module"}
"""Options that name code, by the member that has them."""
_TEXTS = frozenset(("template", "system", "stop_strings"))
"""Settings with text for a model."""
_WRITTEN = ("", "checkpoints", "journal", "logs")
"""Folders in a run's folder into which a resumed run writes."""


def code_of(config: RunConfig) -> list[str]:
    """Returns settings that name code outside of llamarl, as `option = value`. A run imports or executes all of it."""
    return list(dict.fromkeys(_code(config.model_dump(mode="json"), "")))


def _code(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            if name not in _TEXTS and (where, name) != ("", "recipe"):  # recipes are not applied again
                yield from _code(one, f"{where}.{name}".lstrip("."))
        option = _NAMES_CODE.get(str(value.get("name")))
        if option and value.get(option):
            yield f"{where}.{option} = {value[option]!r}"
        if "vllm" in value and value.get("backend") == "vllm":
            yield f"{where}.vllm.python = {value['vllm'].get('python')!r}"
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _code(one, f"{where}.{number}")
    elif isinstance(value, str) and _CODE.fullmatch(value):
        yield f"{where} = {value!r}"


def check_trust(folder: Path, config: RunConfig, *, command: str, is_trusted: bool) -> None:
    """Checks that a run's folder may be used, unless the user trusts it.

    Raises:
        ConfigError: the run would execute code that its settings name, and the folder, settings or journal belong to
        another user, or files of functions differ from the journal's record. Or a resumed run would write through a
        link.
    """
    if is_trusted:
        return
    fix = "add --trust if you trust its author"
    if link := next(_links(folder), None) if command == "--resume" else None:
        raise ConfigError(f"{command}: {link} is a link, and the run would write to its target; {fix}")
    if not (code := code_of(config)):
        return
    for path in (folder, folder / "config.toml", folder / "journal", folder / "weights.json"):
        with suppress(FileNotFoundError):
            if (owner := path.lstat().st_uid) not in (os.getuid(), 0):
                named = ", ".join(code[:5]) + ", ..." * (len(code) > 5)
                raise ConfigError(f"{command}: {path} belongs to user {owner}, and the run executes {named}; {fix}")
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
    """Returns the SHA-256 of the files of functions in the settings, by path."""
    return {str(ref.options["file"]): str(ref.options.get("digest", "")) for ref in _functions(config)}


def recorded_digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of the files of functions in the journal's newest file, by path. Empty means that it has
    none."""
    numbers, found = segments(folder), dict[str, str]()
    for _, header in JournalWalk(folder, {}, BEGIN, OSError).headers(numbers[-1:]):
        given = header.get("settings", {}).get(GIVEN)
        found = dict(given) if isinstance(given, dict) else {}
    return found


def with_trusted(config: RunConfig, output: Path | None = None) -> RunConfig:
    """Returns settings with the current files of functions, whoever owns them.

    Args:
        output: folder of runs, below which the files are kept from now on. None puts their content into the settings.

    Raises:
        ConfigError: a file cannot be read or kept.
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
