"""docs/measures.md is what `benchmarks/measures.py` writes, and names every file of a benchmark's results."""

from __future__ import annotations

import sys

import pytest

from tests.architecture.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import measures


def test_the_page_is_up_to_date() -> None:
    assert measures.PAGE.read_text(encoding="utf-8") == measures.page(), "run python benchmarks/measures.py"


def test_every_file_has_a_sentence() -> None:
    names = [name for sentences in measures.SENTENCES.values() for name in sentences]
    assert sorted(names) == sorted(measures.PATHS)


DATA = {"a b": {"c": 0.125}, "d": [1.0, -3.0], "rows": [{"k": 1, "v": 2.0}, {"k": 2, "v": 4.0}, {"k": 2, "w": 5.0}]}


@pytest.mark.parametrize(
    ("sentence", "text"),
    [
        ("{a b/c:.1%}", "12.5 %"), ("{d/1:+.1f}", "-3.0"), ("{d/*|worst error:.0f}", "3"), ("{d|median:.1f}", "-1.0"),
        ("{rows/@k=2/v over d/0:.0f}", "4"), ("{rows/*/k|max}", "2"),
    ],
)  # fmt: skip
def test_figures(sentence: str, text: str) -> None:
    assert measures.Figures().vformat(sentence, (DATA,), {}) == text
