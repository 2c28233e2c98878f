"""Plain English: constructions that make every sentence be read twice become fewer, never more."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest

from tests.architecture.repository import ROOT, documents, python_files

WORDS = re.compile(
    r"\b(so (?:many|long|often)|hears? of|is told|goes on|what is|those that|that one|of (?:its|their) own|for good"
    r"|learnt)\b"
)
"""Ten constructions: name the subject, and use the field's verb, instead."""
MOST = {
    "llamarl/algorithms": 0,
    "llamarl/api.py": 0,
    "llamarl/checkpoint": 0,
    "llamarl/batches.py": 0,
    "llamarl/child.py": 0,
    "llamarl/cli": 0,
    "llamarl/cluster": 0,
    "llamarl/config": 0,
    "llamarl/controller": 0,
    "llamarl/journal": 0,
    "llamarl/data": 0,
    "llamarl/distributed": 0,
    "llamarl/executors": 0,
    "llamarl/generation": 0,
    "llamarl/kernels": 0,
    "llamarl/models": 0,
    "llamarl/net": 0,
    "llamarl/observability": 0,
    "llamarl/parts/answers": 0,
    "llamarl/parts/cuda": 0,
    "llamarl/parts/episodes": 0,
    "llamarl/parts/forecast": 0,
    "llamarl/parts/hosts": 0,
    "llamarl/parts/hub": 0,
    "llamarl/parts/page": 0,
    "llamarl/parts/replay": 0,
    "llamarl/parts/sft": 0,
    "llamarl/parts/vllm": 0,
    "llamarl/recipes": 0,
    "llamarl/rewards": 0,
    "llamarl/run": 0,
    "llamarl/sandbox": 0,
    "llamarl/sharding": 0,
    "llamarl/training": 0,
    "llamarl/types.py": 0,
    "llamarl/weight_sync": 0,
    "pages": 0,
}
"""Occurrences by folder of the package, and in the pages. Lower a number when a rewrite makes it smaller."""


@cache
def counted() -> Counter[str]:
    found = Counter[str]()
    for path in (*python_files("llamarl"), *documents()):
        parts = path.relative_to(ROOT).parts
        depth = 3 if parts[:2] == ("llamarl", "parts") else 2
        folder = "pages" if path.suffix == ".md" else "/".join(parts[:depth])
        found[folder] += len(WORDS.findall(path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("folder", MOST)
def test_they_do_not_grow(folder: str) -> None:
    found = counted()[folder]
    assert found <= MOST[folder], f"{folder}: {found} in place of {MOST[folder]}; say it plainly (AGENTS.md, Style)"


def test_every_folder_is_counted() -> None:
    assert {folder for folder, number in counted().items() if number} <= MOST.keys()
