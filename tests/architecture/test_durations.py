"""Files of tests come longest first."""

from __future__ import annotations

import json
from types import SimpleNamespace

from tests.architecture.repository import ROOT
from tests.durations import TABLE, longest_first


def test_every_file_of_the_table_is_there() -> None:
    table = json.loads(TABLE.read_text())
    assert table and not [name for name in table if not (ROOT / name).is_file()]


def test_new_files_come_first_and_tests_of_a_file_stay_in_their_order() -> None:
    """Nobody knows yet how long a new one takes."""
    ids = ["short.py::a", "long.py::b", "short.py::c", "long.py::a", "new.py::a"]
    found = longest_first([SimpleNamespace(nodeid=one) for one in ids], {"short.py": 1.0, "long.py": 2.0})
    assert [one.nodeid for one in found] == ["new.py::a", "long.py::b", "long.py::a", "short.py::a", "short.py::c"]
