"""Plain English: constructions that make a reader read a sentence twice do not occur."""

from __future__ import annotations

import re

from tests.architecture.repository import ROOT, documents, python_files

WORDS = re.compile(
    r"\b(so (?:many|long|often)|hears? of|is told|goes on|what is|those that|that one|of (?:its|their) own|for good"
    r"|learnt)\b"
)
"""Name the subject, and use the field's verb, instead (AGENTS.md, Style)."""


def test_the_package_and_the_pages_have_none() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in (*python_files("llamarl"), *documents())
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := WORDS.search(line))
    ]
    assert not found, "\n".join(found)
