"""A docstring can be read alone, as the hover of an editor shows it: it does not need the line above."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.house.source import OPENINGS, docstrings, opening
from tests.architecture.repository import name_of, python_files

MODULE = '''"""{} a module."""

limit_s = 1.0
"""{} a variable."""


class Record:
    """{} a class."""

    size: int
    """{} a field."""

    def total(self) -> int:
        """{} a method."""
        self.size = 1
        """
        {} an attribute."""
        return "{} no docstring"
'''


def _faults(path: Path) -> list[tuple[int, str]]:
    """Line and text of the docstrings that cannot be read alone."""
    return [(line, text.strip()) for line, text in docstrings(path) if opening(text)]


def test_docstrings_can_be_read_alone() -> None:
    faults = [
        f'{name_of(path)}:{line} """{text.splitlines()[0][:60]}' for path in python_files("llamarl")
        for line, text in sorted(_faults(path))
    ]  # fmt: skip
    words = ", ".join(OPENINGS)
    assert not faults, (
        f"{len(faults)} docstrings begin with one of {words}; name the thing instead, with its unit and shape:\n"
        + "\n".join(faults)
    )


@pytest.mark.parametrize("word", OPENINGS)
def test_all_kinds_of_docstrings_are_seen(word: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(MODULE.replace("{}", word))
    assert len(_faults(path)) == 6


def test_other_docstrings_are_not_held_against(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(MODULE.replace("{}", "Offers"))
    assert len(list(docstrings(path))) == 6
    assert not _faults(path)
