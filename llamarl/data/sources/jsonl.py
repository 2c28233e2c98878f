"""Problems from JSON Lines files: one object per line with `question` (or `prompt`), `answer` and optionally `id`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llamarl.config import FilePath
from llamarl.data.files import PlacedRow, read_jsonl
from llamarl.data.sources._table import Table, of_files


@dataclass(kw_only=True)
class Jsonl(Table):
    """Rows of one file, or of several in turn, with any suffix."""

    path: FilePath | tuple[FilePath, ...]
    """File or files. Relative paths start at the working folder."""

    def _located(self) -> Iterator[tuple[str, PlacedRow]]:
        return of_files(self.path, read_jsonl, lambda path: Path(path).stem)
