"""Resolves names on the Hub in a run's settings to commits, once, before models or data are read."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.config import ConfigError, RunConfig, read_json
from llamarl.config.hub import HubName, Kind, NotFetched, hub_name, missing_folder, open_hub
from llamarl.config.ref import NotRun, Ref, class_of
from llamarl.models.folder import fingerprints
from llamarl.run.placement import model_paths

WEIGHTS_FILE = "weights.json"
"""File in a run's folder with the fingerprints of model files, and the commits on the Hub, at the run's start."""


@dataclass(frozen=True, slots=True)
class Named:
    """A setting that names a model, or data on the Hub."""

    option: str
    path: str
    """Folder, or name on the Hub."""
    kind: Kind = "model"
    source: Any = None
    """Class of the data source, whose `pinned` resolves the name to a commit."""

    @property
    def key(self) -> str:
        """Key in `WEIGHTS_FILE`."""
        return self.path if self.kind == "model" else f"datasets/{self.path}"

    @property
    def name(self) -> HubName | None:
        """Name on the Hub. None means that the path is a folder."""
        return hub_name(self.path) if self.kind == "model" else HubName(*self.path.partition("@")[::2])

    def before(self, known: Collection[str]) -> HubName | None:
        """Returns the name on the Hub that a model had when the run began, if its key is `known`. A local folder that
        was created later does not hide that name. None means that the model is a folder."""
        return HubName.of(self.path) if self.key in known and not Path(self.path).is_dir() else None


def named(config: RunConfig) -> Iterator[Named]:
    """Yields the settings that name models in use, or data on the Hub. Raises ConfigError."""
    yield Named("model.path", config.model.path)
    for _, option, path in model_paths(config):
        yield Named(option, path)
    for option, found in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if isinstance(found, Ref):
            yield from _named_data(found, option)
        for number, one in enumerate(found if isinstance(found, list) else ()):
            yield from _named_data(one.source, f"{option}.{number}.source")


def _named_data(ref: Ref, option: str) -> Iterator[Named]:
    """Yields the data set of a source whose class has `pinned`, from its options `path` and `revision`."""
    from llamarl.data.prompts import SOURCES

    try:
        source = class_of(ref, SOURCES, option)
    except NotRun:  # a class that may not be imported, so whether it uses the Hub is unknown
        return
    if hasattr(source, "pinned"):
        repo, revision = ref.options.get("path"), ref.options.get("revision")
        given = HubName.of(str(repo))
        if given and (name := HubName.of(str(given.at(revision or given.revision)))):
            yield Named(option, str(name), "dataset", source)


def resolved(
    config: RunConfig,
    *,
    weights: bool = True,
    data: bool = True,
    run: Path | None = None,
    command: str = "",
    only: Collection[str] = (),
) -> RunConfig:
    """Returns settings with a commit for each name on the Hub: `owner/name@commit` for models, whose files are fetched,
    and `revision` for data.

    Args:
        weights: fetch the weights of models, too, not only shapes and tokenizers.
        data: resolve data, too.
        run: folder of a resumed run, whose recorded commits are used.
        command: prefix of lines about commits on standard error. Empty means no lines.
        only: options to resolve, such as `model.path`. Empty means all.

    Raises:
        NotFetched: a name does not exist, or cannot be fetched.
    """
    known, pinned = commits_of(run) if run else {}, config
    for one in named(config):
        is_made = one.option == "model.path" and config.model.warm_start  # the folder is made later
        is_meant = one.option in only if only else data or one.kind != "dataset"
        if is_made or not is_meant or (name := one.name or one.before(known)) is None:
            continue
        at = name.at(known.get(one.key, name.revision))
        found = _pinned(at, one.option, one.source, weights, command)
        known[one.key] = found.revision  # a second setting with this name gets the same commit
        pinned = _with(pinned, one.option.split("."), found.revision if one.kind == "dataset" else str(found))
    return pinned


def base_model(run: Path, path: str, output: str) -> str:
    """Returns `model.path` of a run for any working folder. Relative paths begin where the run was started, which
    `output` locates. A name on the Hub gets the commit that the run started with."""
    parents, depth = run.resolve().parents, len(Path(output).parts)
    is_known = not Path(output).is_absolute() and depth < len(parents)
    if is_known and (found := parents[depth] / path).exists():
        return str(found)
    commit, name = commits_of(run).get(path, ""), HubName.of(path)
    return str(name.at(commit)) if name and commit else path


def resolved_path(path: str, option: str, *, weights: bool = True, command: str = "") -> str:
    """Returns `owner/name@commit` for a model on the Hub, and fetches it. Returns a folder unchanged. Raises
    ConfigError."""
    if name := hub_name(path):
        return str(_pinned(name, option, None, weights, command))
    check_folder(path, option)
    return path


def check_folder(path: str, option: str) -> None:
    """Raises ConfigError if a model folder does not exist."""
    if not Path(path).is_dir():
        raise ConfigError(missing_folder(path, option))


def resolved_data(ref: Ref, option: str, *, command: str = "") -> Ref:
    """Returns a data source with a commit as `revision` if it names a data set on the Hub. Raises ConfigError."""
    for one in _named_data(ref, option):
        if one.name is not None:
            ref = _at(ref, _pinned(one.name, option, one.source, False, command).revision)
    return ref


def _pinned(name: HubName, option: str, source: Any, weights: bool, command: str) -> HubName:
    """Fetches a model, or resolves a data set. Returns its name with a commit. Raises NotFetched."""
    note = ""
    try:
        if source is None:
            hub = open_hub()
            snapshot = hub.fetched(name, choose=hub.model_files if weights else hub.small_files)
            found, note = snapshot.name, snapshot.note
        else:
            found = source.pinned(name)
    except ConfigError as error:
        raise NotFetched(f"{option} = {str(name)!r}: {error}") from None
    if command:
        sys.stderr.write(f"{command}: {option}: {name.repo} at commit {found.revision}{f' ({note})' if note else ''}\n")
    return found


def _with(settings: Any, names: list[str], value: str) -> Any:
    """Returns a copy of settings with one value replaced, which may be in a list. For a `Ref`, replaces `revision`."""
    if not names:
        return _at(settings, value) if isinstance(settings, Ref) else value
    first, *rest = names
    if isinstance(settings, list):
        return [_with(one, rest, value) if number == int(first) else one for number, one in enumerate(settings)]
    return settings.model_copy(update={first: _with(getattr(settings, first), rest, value)})


def _at(ref: Ref, revision: str) -> Ref:
    return Ref(name=ref.name, **(ref.options | {"revision": revision}))


def record_of(config: RunConfig, pinned: RunConfig) -> dict[str, dict[str, str]]:
    """Returns commits and fingerprints of all models and data, by name as in `config`. Missing files have no
    entries."""
    found = dict[str, dict[str, str]]()
    for one, now in zip(named(config), named(pinned), strict=True):
        name = now.name
        if name is None:
            found[one.key] = fingerprints(now.path)
        else:
            found[one.key] = {"commit": name.revision} if name.is_pinned else {}
    return found


def recorded(folder: Path) -> dict[str, Any]:
    """Returns `record_of` at the start of a run. Empty means that there is no record. Raises ConfigError if it is
    damaged."""
    file = folder / WEIGHTS_FILE
    return read_json(file, "remove it") if file.exists() else {}


def commits_of(folder: Path) -> dict[str, str]:
    """Returns the commits at the start of a run, by `Named.key`. Raises ConfigError if the record is damaged."""
    rows = recorded(folder).items()
    return {key: row["commit"] for key, row in rows if isinstance(row, dict) and "commit" in row}
