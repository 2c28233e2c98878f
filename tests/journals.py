"""A journal over its reader, for tests that give both their options at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from llamarl.journal.reader import JournalReader
from llamarl.journal.writer import Journal

J = TypeVar("J", bound=Journal)


def reader_of(
    folder: Path | None,
    prompts: Sequence[Any] = (),
    settings: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
    saved: Sequence[int] = (),
) -> JournalReader:
    return JournalReader(folder, prompts, settings, defaults, saved)


def journal_of(folder: Path | None, warn: Callable[[str], None] = lambda text: None, **options: Any) -> Journal:
    """`keep` and `keeps` are the journal's, other options the reader's."""
    own = {name: options.pop(name) for name in ("keep", "keeps") if name in options}
    options["saved"] = list(options.get("saved", ()))[-own.get("keep", 1) :]
    return Journal(reader_of(folder, **options), warn, **own)
