"""The standard cache of the Hub's client: commits of names, listings of commits, and files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamarl.config import open_file
from llamarl.config.hub import HubName, Kind, cache_folder, snapshots_of
from llamarl.parts.hub.border import HubFile, Nonsense, files_of

__all__ = ["KINDS", "HubFile", "Repository"]

KINDS = {"model": "model", "dataset": "data set"}
"""Words in messages."""
_FORMAT = 1
"""Version of the format of listings: `{"format_version": 1, "files": {path: {size, blob_id, lfs_sha256, ...}}}`."""


class Repository:
    """One repository in the cache: `refs/REVISION` contains commits, `trees/COMMIT.json` listings, and
    `snapshots/COMMIT` links to `blobs`."""

    def __init__(self, repo: str, kind: Kind = "model") -> None:
        self.snapshots = snapshots_of(repo, kind)
        self.path = self.snapshots.parent
        self.locks = cache_folder() / ".locks" / self.path.name
        self.blobs = self.path / "blobs"

    def snapshot(self, commit: str) -> Path:
        """Returns the folder of a commit's files."""
        return self.snapshots / commit

    def commit(self, name: HubName) -> str:
        """Returns the commit that the name had at the last request. Empty means unknown."""
        if name.is_pinned:
            return name.revision
        try:
            found = self._ref(name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""
        return found if name.at(found).is_pinned else ""

    def note_commit(self, name: HubName, commit: str) -> None:
        """Stores the commit for `commit`. Raises OSError."""
        if not name.is_pinned and self.commit(name) != commit:
            _write(self._ref(name), commit)

    def listing(self, commit: str) -> dict[str, HubFile] | None:
        """Returns the files of a commit by path. None means that there is no listing."""
        try:
            with open_file(self._tree(commit)) as file:
                found: dict[str, Any] = json.load(file)
            if found["format_version"] != _FORMAT:
                return None
            known = HubFile.__dataclass_fields__.keys()
            return files_of(
                (path, {key: value for key, value in one.items() if key in known and value is not None})
                for path, one in found["files"].items()
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, Nonsense):
            return None  # the listing is requested again, as the client does

    def note_listing(self, commit: str, files: Mapping[str, HubFile]) -> None:
        """Stores a listing for `listing` and for the client's own commands. Raises OSError."""
        rows = {path: {k: v for k, v in asdict(one).items() if v != ""} for path, one in sorted(files.items())}
        for row in rows.values():
            if "lfs_sha256" in row:
                row["lfs_size"] = row["size"]
        _write(self._tree(commit), json.dumps({"format_version": _FORMAT, "files": rows}, indent=1))

    def present(self, commit: str) -> dict[str, int]:
        """Returns the bytes of the cached files, by path."""
        folder = self.snapshot(commit)
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}

    def _ref(self, name: HubName) -> Path:
        return self.path / "refs" / (name.revision or "main")

    def _tree(self, commit: str) -> Path:
        return self.path / "trees" / f"{commit}.json"


def _write(path: Path, text: str) -> None:
    """Writes atomically, because another process may write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
