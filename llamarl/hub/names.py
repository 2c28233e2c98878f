"""Names of the Hub, and where the usual cache keeps what was fetched. No network, and no client of the Hub."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from llamarl.config.errors import ConfigError

Kind = Literal["model", "dataset"]
KINDS = {"model": "model", "dataset": "data set"}
"""Words for users."""
_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_NAME = re.compile(rf"(?!.*(?:--|\.\.))({_PART}/{_PART})(?:@([\w./-]+))?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
_FORMAT = 1
"""Version of listings: the client writes `{"format_version": 1, "files": {path: {size, blob_id, lfs_sha256, ...}}}`."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the Hub, at a revision."""

    repo: str
    """`owner/name`."""
    revision: str = ""
    """A branch, a tag or a commit; empty: the branch `main`."""

    @classmethod
    def of(cls, text: str) -> HubName | None:
        """The name that a text is: `owner/name` or `owner/name@revision`; None: it is none."""
        found = _NAME.fullmatch(text)
        return cls(found[1], found[2] or "") if found else None

    @property
    def is_pinned(self) -> bool:
        """The revision is a commit, which means the same files for ever."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> HubName:
        """The same repository at another revision."""
        return HubName(self.repo, revision)

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """A file of a repository, as its listing says."""

    size: int
    """Bytes."""
    blob_id: str = ""
    """Hexadecimal SHA-1 of git's blob: of the file itself, or of the pointer to a large one."""
    lfs_sha256: str = ""
    """Hexadecimal SHA-256 of a large file; empty: git holds the file itself."""
    xet_hash: str = ""
    """Key in the Hub's storage of pieces; empty: it is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Files of a repository at one commit, in the cache of this machine."""

    name: HubName
    """Pinned to the commit."""
    folder: Path
    """Holds the files, below the paths that they have in the repository."""
    files: Mapping[str, int]
    """Bytes of the chosen files, by path."""
    note: str = ""
    """Sentence for the user, such as that the Hub refused and the cache was used."""

    @property
    def commit(self) -> str:
        return self.name.revision


def hub_name(path: str | Path) -> HubName | None:
    """The name of the Hub that a path means, unless there is a folder so named; None: it is a path."""
    return None if Path(path).is_dir() else HubName.of(str(path))


def folder_of(path: str | Path) -> Path:
    """The folder of a model: a path as it is; `owner/name@commit` in the cache of this machine. Fetches nothing.

    Raises:
        ConfigError: a name that no commit belongs to, or one that was not fetched here.
    """
    name = hub_name(path)
    if name is None:
        return Path(path)
    if not name.is_pinned:
        raise ConfigError(
            f"there is no folder {str(path)!r}, and nothing was fetched from the Hub by that name; name a local "
            "Hugging Face model folder, or a name of the Hub to a command that fetches, such as `llamarl train`"
        )
    folder = Repository(name.repo).snapshot(name.revision)
    if not folder.is_dir():
        raise ConfigError(
            f"{name} is not in this machine's cache of the Hub ({cache_folder()}); fetch it: "
            f"hf download {name.repo} --revision {name.revision}, or point HF_HOME to where it is"
        )
    return folder


def cache_folder() -> Path:
    """The cache of the Hub's client: HF_HUB_CACHE, else below HF_HOME, else below XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    found = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(found)).expanduser().absolute()


_ASKS_NOBODY = ContextVar("asks_nobody", default="")


@contextmanager
def nothing_fetched(why: str) -> Iterator[None]:
    """Within it the cache is all that there is. `why` begins the sentence about what it lacks."""
    token = _ASKS_NOBODY.set(why)
    try:
        yield
    finally:
        _ASKS_NOBODY.reset(token)


def why_offline() -> str:
    """Why the Hub is not asked: by `nothing_fetched`, or as the user forbids it (HF_HUB_OFFLINE); empty: it is."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    is_forbidden = said.upper() in ("1", "ON", "YES", "TRUE")
    return _ASKS_NOBODY.get() or ("HF_HUB_OFFLINE is set, so the Hub is not asked" if is_forbidden else "")


class Repository:
    """One repository in the cache: `refs/REVISION` with commits, `trees/COMMIT.json` with listings, `snapshots/COMMIT`
    with links to `blobs`."""

    def __init__(self, repo: str, kind: Kind = "model") -> None:
        self.path = cache_folder() / f"{kind}s--{repo.replace('/', '--')}"
        self.locks = cache_folder() / ".locks" / self.path.name
        self.blobs = self.path / "blobs"

    def snapshot(self, commit: str) -> Path:
        """The folder of one commit's files."""
        return self.path / "snapshots" / commit

    def commit(self, name: HubName) -> str:
        """Commit that the name meant when it was asked for last; empty: unknown."""
        if name.is_pinned:
            return name.revision
        try:
            found = self._ref(name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""
        return found if name.at(found).is_pinned else ""

    def note_commit(self, name: HubName, commit: str) -> None:
        """From now on `commit` answers this. Raises OSError."""
        if not name.is_pinned and self.commit(name) != commit:
            _write(self._ref(name), commit)

    def listing(self, commit: str) -> dict[str, HubFile] | None:
        """Files of a commit by path; None: they were not listed yet."""
        try:
            found: dict[str, Any] = json.loads(self._tree(commit).read_text(encoding="utf-8"))
            if found["format_version"] != _FORMAT:
                return None
            known = HubFile.__dataclass_fields__.keys()
            return {
                path: HubFile(**{key: value for key, value in one.items() if key in known and value is not None})
                for path, one in found["files"].items()
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # as the client: it is listed again
            return None

    def note_listing(self, commit: str, files: Mapping[str, HubFile]) -> None:
        """From now on `listing` answers this, here and in the client's own commands. Raises OSError."""
        rows = {path: {k: v for k, v in asdict(one).items() if v != ""} for path, one in sorted(files.items())}
        for row in rows.values():
            if "lfs_sha256" in row:
                row["lfs_size"] = row["size"]
        _write(self._tree(commit), json.dumps({"format_version": _FORMAT, "files": rows}, indent=1))

    def present(self, commit: str) -> dict[str, int]:
        """Bytes of the files that are in the cache, by path."""
        folder = self.snapshot(commit)
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}

    def _ref(self, name: HubName) -> Path:
        return self.path / "refs" / (name.revision or "main")

    def _tree(self, commit: str) -> Path:
        return self.path / "trees" / f"{commit}.json"


def _write(path: Path, text: str) -> None:
    """All of it or nothing, as another process may do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
