"""What a mark says of a test that only `make test-all` runs: where the same fault is found by day."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.repository import ROOT, functions, name_of, nodes, python_files, tree

FILE = re.compile(r"(?<![\w/.])((?:[\w-]+/)*[\w-]+\.py)\b")
FOLDER = re.compile(r"(?<![\w/.])tests/([\w/]+)(?![\w/.])")


def _reasons(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "nightly":
            yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))


def _missing(path: Path, reason: str) -> list[str]:
    """Files and folders that a reason names, from its own folder or one above, and that run no test by day."""
    files = [name for name in FILE.findall(reason) if not _runs_by_day(path, name.removeprefix("tests/"))]
    return files + [name for name in FOLDER.findall(reason) if not (ROOT / "tests" / name).exists()]


def _runs_by_day(path: Path, name: str) -> bool:
    named = next((file for folder in path.parents if (file := folder / name).is_file()), None)
    if named is None:
        return False
    if not named.name.startswith("test_"):
        return True
    assigned = [ast.unparse(node) for node in tree(named).body if isinstance(node, ast.Assign)]
    whole = any(line.startswith("pytestmark") and "nightly" in line for line in assigned)
    return not whole and any(
        test.name.startswith("test_") and not any("nightly(" in ast.unparse(mark) for mark in test.decorator_list)
        for test in functions(named)
    )


def test_what_a_reason_names_runs_by_day() -> None:
    found = {path: list(_reasons(path)) for path in python_files("tests")}
    assert sum(map(len, found.values())) > 200
    faults = [
        f"{name_of(path)}: `{reason}` names {', '.join(gone)}"
        for path, reasons in found.items()
        for reason in reasons
        if (gone := _missing(path, reason))
    ]
    assert not faults, "\n".join(faults)


def test_the_check_can_fail() -> None:
    here = Path(__file__)
    assert _missing(here, "test_nightly.py and tests/kernels find it") == []
    assert _missing(here, "tests/nowhere and test_nowhere.py find it") == ["test_nowhere.py", "nowhere"]
