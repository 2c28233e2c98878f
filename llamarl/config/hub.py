"""Names on the Hub in settings, and the cache of fetched files. Uses no network; `open_hub` opens the part `hub`, which
does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from llamarl.config.errors import ConfigError, one_of
from llamarl.config.ref import part_module
from llamarl.config.section import near_path

if TYPE_CHECKING:
    from llamarl.config.schema import RunConfig

Kind = Literal["model", "dataset"]
Choose = Callable[[Mapping[str, int]], Sequence[str]]
"""choose(bytes by path): returns the wanted paths. Raises ConfigError if there are none."""
_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_NAME = re.compile(rf"(?!.*(?:--|\.\.))({_PART}/{_PART})(?:@([\w./-]+))?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
RUNS = "runs"
"""Folder of runs, unless `output` names another: no owner on the Hub."""
OF_MODELS = ("config.json", "config.toml", "adapter_config.json")
"""Files of which the folder of a model, of a run or of an adapter has at least one."""


class NotFetched(ConfigError):
    """Files that a setting names by a name of the Hub are not on this machine and cannot be fetched."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository on the Hub at a revision."""

    repo: str
    """`owner/name`."""
    revision: str = ""
    """A branch, a tag or a commit. Empty means the branch `main`."""

    @classmethod
    def of(cls, text: str) -> HubName | None:
        """Parses `owner/name` or `owner/name@revision`. Returns None for any other text."""
        found = _NAME.fullmatch(text)
        return cls(found[1], found[2] or "") if found else None

    @property
    def is_pinned(self) -> bool:
        """Returns whether the revision is a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> HubName:
        """Returns the same repository at another revision."""
        return HubName(self.repo, revision)

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Files of a repository at one commit, in this machine's cache."""

    name: HubName
    """Pinned to the commit."""
    folder: Path
    """Contains the files at their paths in the repository."""
    files: Mapping[str, int]
    """Bytes of the chosen files by path."""
    note: str = ""
    """Sentence for the user, for example that the Hub refused and the cache was used."""

    @property
    def commit(self) -> str:
        return self.name.revision


class HubAccess(Protocol):
    """The `joint` of the part `hub`: fetches files from the Hub or the cache, and pushes models. All methods but
    `cached` and the choices raise ConfigError if a repository does not exist, is not accessible, or the Hub does not
    answer."""

    def model_files(self, files: Mapping[str, int]) -> list[str]:
        """Choice: all files of a model. Raises ConfigError if they are not a model."""
        ...

    def small_files(self, files: Mapping[str, int]) -> list[str]:
        """Choice: files of a model without its weights. Raises ConfigError if they are not a model."""
        ...

    def listing(self, name: HubName, kind: Kind = "model") -> tuple[str, dict[str, int]]:
        """Returns the name's current commit, and the bytes of all its files by path."""
        ...

    def cached(self, name: HubName, kind: Kind = "model", choose: Choose = ...) -> Snapshot | None:
        """Returns files in the cache, at the commit that the name last resolved to. None means that some are missing.
        Uses no network."""
        ...

    def fetched(self, name: HubName, kind: Kind = "model", choose: Choose = ...) -> Snapshot:
        """Fetches the chosen files of the name's current commit; by default all files of a model."""
        ...

    def with_data(self, name: HubName) -> tuple[HubName, str, Mapping[str, dict[str, list[str]]]]:
        """Returns the commit of a data set with readable files, its README, and those files by configuration and
        split."""
        ...

    def push_model(
        self, run: Path, config: RunConfig, folder: Path, step: int, name: HubName, *, adapters: bool, private: bool
    ) -> str:
        """Pushes the model in `folder`, written at a step of a run, with its card. Returns text with its address.

        Args:
            adapters: push the adapters of a LoRA run, not a whole model.
            private: make a new repository private.
        """
        ...


def open_hub() -> HubAccess:
    """Opens the part `hub`. Raises ConfigError if it is not installed."""
    joint: Any = part_module("hub", "joint")
    return joint


def hub_name(path: str | Path) -> HubName | None:
    """Returns the name on the Hub that a path means. None means that it is a path: a folder has that name, or it begins
    with the name of a local folder, or with `runs/`, and names no revision. Raises ConfigError if the path cannot be
    examined."""
    try:
        if Path(path).is_dir() or (name := HubName.of(str(path))) is None:
            return None
        return None if not name.revision and _begins_here(name.repo) else name
    except OSError as error:
        raise ConfigError(f"{str(path)!r:.200} cannot be read ({error.strerror}); name a model's folder") from None


def _begins_here(path: str) -> bool:
    """Whether the first name of a path is that of a local folder, or of the folder of runs."""
    first = path.partition("/")[0]
    return first == RUNS or Path(first).is_dir()


def of_hub_anyway(path: str | Path) -> str:
    """Returns the name with a revision that is looked up on the Hub although a local folder has its first part. Empty
    if the path cannot be such a name."""
    name = HubName.of(str(path))
    return str(name.at("main")) if name and not name.revision and not name.repo.startswith(f"{RUNS}/") else ""


def missing_folder(path: str | Path, option: str = "") -> str:
    """Returns a sentence about a model's folder that does not exist, as the value of an option: which one may be meant,
    or what to name."""
    meant = [*filter(None, (near_path(path, OF_MODELS), of_hub_anyway(path)))]
    fix = one_of(meant) if meant else "name a Hugging Face model folder, or OWNER/NAME of the Hub"
    cause = f"{option} = {str(path)!r}: there is no such folder" if option else f"there is no folder {path}"
    return f"{cause}; {fix}"


def folder_of(path: str | Path) -> Path:
    """Returns the folder of a model: the path itself, or for `owner/name@commit` its folder in the cache. Fetches
    nothing.

    Raises:
        ConfigError: the name has no commit, or its files were not fetched here.
    """
    name = hub_name(path)
    if name is None:
        return Path(path)
    if not name.is_pinned:
        raise ConfigError(
            f"there is no folder {str(path)!r}, and nothing was fetched from the Hub by that name; name a local "
            "Hugging Face model folder, or a name of the Hub to a command that fetches, such as `llamarl train`"
        )
    folder = snapshots_of(name.repo) / name.revision
    if not folder.is_dir():
        raise ConfigError(
            f"{name} is not in this machine's cache of the Hub ({cache_folder()}); fetch it: "
            f"hf download {name.repo} --revision {name.revision}, or point HF_HOME to where it is"
        )
    return folder


def snapshots_of(repo: str, kind: Kind = "model") -> Path:
    """Returns the cache folder with one subfolder per fetched commit of a repository."""
    return cache_folder() / f"{kind}s--{repo.replace('/', '--')}" / "snapshots"


def cache_folder() -> Path:
    """Returns the cache of the Hub's client: HF_HUB_CACHE, else below HF_HOME, else XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    found = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(found)).expanduser().absolute()


_ASKS_NOBODY = ContextVar("asks_nobody", default="")


@contextmanager
def nothing_fetched(why: str) -> Iterator[None]:
    """Context in which only the cache is used. `why` begins the message about missing files."""
    token = _ASKS_NOBODY.set(why)
    try:
        yield
    finally:
        _ASKS_NOBODY.reset(token)


def why_offline() -> str:
    """Returns why the Hub is not asked: `nothing_fetched`, or HF_HUB_OFFLINE. Empty means that it is."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    is_forbidden = said.upper() in ("1", "ON", "YES", "TRUE")
    return _ASKS_NOBODY.get() or ("HF_HUB_OFFLINE is set, so the Hub is not asked" if is_forbidden else "")
