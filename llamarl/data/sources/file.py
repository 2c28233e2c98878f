"""Problems from files, read by suffix: .jsonl, .json, .csv, .tsv and .parquet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llamarl.config import FilePath
from llamarl.data.files import PlacedRow, read_file, stem
from llamarl.data.sources._table import Table, of_files


@dataclass(kw_only=True)
class File(Table):
    """Rows of one file, or of several in turn, which may have different suffixes."""

    path: FilePath | tuple[FilePath, ...]
    """File or files. Relative paths start at the working folder. Text files may end in .gz."""

    def _located(self) -> Iterator[tuple[str, PlacedRow]]:
        return of_files(self.path, read_file, stem)
