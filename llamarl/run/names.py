"""Names of the Hub in a run's settings: each becomes a commit once, before anything reads a model or data."""

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
from llamarl.run.placement import models_in_use

WEIGHTS_FILE = "weights.json"
"""Lies in a run's folder, and says with which files of models, and with which commits of the Hub, the run began."""


@dataclass(frozen=True, slots=True)
class Named:
    """A setting that names a model, or data of the Hub."""

    option: str
    path: str
    """Folder, or name of the Hub."""
    kind: Kind = "model"
    source: Any = None
    """Class of the source of data, which says by `pinned` what commit of the name is meant."""

    @property
    def key(self) -> str:
        """In `WEIGHTS_FILE`."""
        return self.path if self.kind == "model" else f"datasets/{self.path}"

    @property
    def name(self) -> HubName | None:
        """None: it is a folder."""
        return hub_name(self.path) if self.kind == "model" else HubName(*self.path.partition("@")[::2])

    def before(self, known: Collection[str]) -> HubName | None:
        """The name of the Hub that a model had when the run began, if its key is `known`, although a local folder that
        was made later has the first part of that name. None means that the model is a folder."""
        return HubName.of(self.path) if self.key in known and not Path(self.path).is_dir() else None


def named(config: RunConfig) -> Iterator[Named]:
    """The settings of a run that name models in use, and data of the Hub. Raises ConfigError."""
    yield Named("model.path", config.model.path)
    for name, settings in models_in_use(config).items():
        if settings.path:
            yield Named(f"{'reward.model' if name == 'reward-model' else name}.path", settings.path)
    for option, found in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if isinstance(found, Ref):
            yield from _named_data(found, option)
        for number, one in enumerate(found if isinstance(found, list) else ()):
            yield from _named_data(one.source, f"{option}.{number}.source")


def _named_data(ref: Ref, option: str) -> Iterator[Named]:
    """Data set of a source whose class has `pinned`, by its options `path` and `revision`."""
    from llamarl.data.prompts import SOURCES

    try:
        source = class_of(ref, SOURCES, option)
    except NotRun:  # a class that nobody may import, so whether it names the Hub is not known
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
    """The settings with a commit for each name of the Hub: `owner/name@commit` for models, of which this machine then
    has the files, and `revision` for data.

    Args:
        weights: of models are fetched too, beside what says their shapes, and tokenizers.
        data: gets commits too.
        run: folder of the run that this is about, which goes on with the commits that it began with.
        command: begins the lines, on standard error, that say which commits these are; empty: there are none.
        only: options whose names are meant, such as `model.path`; empty: all.

    Raises:
        NotFetched: a name means nothing, or cannot be fetched.
    """
    known, pinned = commits_of(run) if run else {}, config
    for one in named(config):
        is_made = one.option == "model.path" and config.model.warm_start  # that folder, when it is needed
        is_meant = one.option in only if only else data or one.kind != "dataset"
        if is_made or not is_meant or (name := one.name or one.before(known)) is None:
            continue
        at = name.at(known.get(one.key, name.revision))
        found = _pinned(at, one.option, one.source, weights, command)
        known[one.key] = found.revision  # one that is named twice is the same twice
        pinned = _with(pinned, one.option.split("."), found.revision if one.kind == "dataset" else str(found))
    return pinned


def base_model(run: Path, path: str, output: str) -> str:
    """`model.path` of a run, wherever the command is given: a relative one begins where the run was started, which is
    as far above its folder as `output` says, and a name of the Hub means the commit that the run began with."""
    parents, depth = run.resolve().parents, len(Path(output).parts)
    is_known = not Path(output).is_absolute() and depth < len(parents)
    if is_known and (found := parents[depth] / path).exists():
        return str(found)
    commit, name = commits_of(run).get(path, ""), HubName.of(path)
    return str(name.at(commit)) if name and commit else path


def resolved_path(path: str, option: str, *, weights: bool = True, command: str = "") -> str:
    """`owner/name@commit` for the name of a model, of which this machine then has the files; a folder as it is. Raises
    ConfigError."""
    if name := hub_name(path):
        return str(_pinned(name, option, None, weights, command))
    check_folder(path, option)
    return path


def check_folder(path: str, option: str) -> None:
    """Raises ConfigError: there is no such folder of a model."""
    if not Path(path).is_dir():
        raise ConfigError(missing_folder(path, option))


def resolved_data(ref: Ref, option: str, *, command: str = "") -> Ref:
    """A source of data whose `revision` is a commit, where it names a data set of the Hub. Raises ConfigError."""
    for one in _named_data(ref, option):
        if one.name is not None:
            ref = _at(ref, _pinned(one.name, option, one.source, False, command).revision)
    return ref


def _pinned(name: HubName, option: str, source: Any, weights: bool, command: str) -> HubName:
    """Raises NotFetched."""
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
    """A copy with another value of a setting, which may be in a list; of a `Ref`, with another `revision`."""
    if not names:
        return _at(settings, value) if isinstance(settings, Ref) else value
    first, *rest = names
    if isinstance(settings, list):
        return [_with(one, rest, value) if number == int(first) else one for number, one in enumerate(settings)]
    return settings.model_copy(update={first: _with(getattr(settings, first), rest, value)})


def _at(ref: Ref, revision: str) -> Ref:
    return Ref(name=ref.name, **(ref.options | {"revision": revision}))


def record_of(config: RunConfig, pinned: RunConfig) -> dict[str, dict[str, str]]:
    """Commits and fingerprints of all models and data, by name as in `config`. Empty ones: nothing is there yet."""
    found = dict[str, dict[str, str]]()
    for one, now in zip(named(config), named(pinned), strict=True):
        name = now.name
        if name is None:
            found[one.key] = fingerprints(now.path)
        else:
            found[one.key] = {"commit": name.revision} if name.is_pinned else {}
    return found


def recorded(folder: Path) -> dict[str, Any]:
    """Answer of `record_of` when the run in this folder began; empty: there is none. Raises ConfigError: it is
    damaged."""
    file = folder / WEIGHTS_FILE
    return read_json(file, "remove it") if file.exists() else {}


def commits_of(folder: Path) -> dict[str, str]:
    """Commits that the run in this folder began with, by `Named.key`. Raises ConfigError: its record is damaged."""
    rows = recorded(folder).items()
    return {key: row["commit"] for key, row in rows if isinstance(row, dict) and "commit" in row}
