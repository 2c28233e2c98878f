"""Problems of a dataset by its name on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llamarl.config import ConfigError, read_text
from llamarl.config.hub import HubName
from llamarl.data.files import READERS, PlacedRow, read_file
from llamarl.data.sources._table import Table
from llamarl.parts.hub.fetch import fetched, listing
from llamarl.parts.hub.layout import README, Splits, chosen, configurations

MAX_README_BYTES = 1 << 24
CONVERTED = "refs/convert/parquet"
"""Branch with the Hub's automatic Parquet conversion."""


@dataclass(kw_only=True)
class Hub(Table):
    """Rows of one split. Only the files of the repository are fetched, no code runs.

    The README's header or the file names determine the files. If no file is readable, the Hub's Parquet conversion is
    used.
    """

    path: str
    """`owner/name` of the dataset, or `owner/name@revision`."""
    config: str = ""
    """Configuration, such as `main`. Empty means the only or the default configuration."""
    split: str = "train"
    """Name of the split."""
    revision: str = ""
    """Branch, tag or commit. Empty means `main`. A run keeps the commit of its start."""

    @staticmethod
    def pinned(name: HubName) -> HubName:
        """Returns the commit that a run keeps. If the name has no readable files, that of the conversion branch. Raises
        ConfigError."""
        return with_data(name)[0]

    def _located(self) -> Iterator[tuple[str, PlacedRow]]:
        if (given := HubName.of(self.path)) is None:
            raise ConfigError(f"path = {self.path!r} is not a name of the Hub; give it as in 'openai/gsm8k'")
        try:
            name, readme, found = with_data(given.at(self.revision or given.revision))
            config, files = chosen(found, self.config, self.split, readme)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None
        rows = (row for path in files for row in read_file(self._file(name, path)))
        for number, row in enumerate(rows, start=1):
            yield f"{given.repo}/{config}/{self.split}-{number}", row

    def _file(self, name: HubName, path: str) -> Path:
        """Fetches one file when its rows are read. Files beyond `limit` are never fetched."""
        try:
            return fetched(name, "dataset", lambda _: [path]).folder / path
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None


def with_data(name: HubName) -> tuple[HubName, str, Mapping[str, Splits]]:
    """Returns a commit of a dataset with readable files, its README, and its files by configuration and split. Raises
    ConfigError."""
    commit, files = listing(name, "dataset")
    if (has_readme := README in files) and files[README] > MAX_README_BYTES:
        raise ConfigError(f"its {README} has {files[README]:,} bytes, and at most {MAX_README_BYTES:,} are read")
    snapshot = fetched(name.at(commit), "dataset", lambda files: [README] * has_readme)
    readme = read_text(snapshot.folder / README, "fetch it again") if has_readme else ""
    if found := configurations(files, readme):
        return snapshot.name, readme, found
    cause = f"none of its {len(files)} files at {commit[:12]} is one of {', '.join(READERS)}"
    if name.revision:
        raise ConfigError(f"{cause}; revision = {CONVERTED!r} has what the Hub has converted, if it could")
    try:
        return with_data(name.at(CONVERTED))
    except ConfigError as error:
        raise ConfigError(f"{cause}, and on its branch {CONVERTED}: {error}") from None
