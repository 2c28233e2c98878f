"""The table of docs/recovery.md names all that must hold, and tests that exist and run when it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.architecture.repository import ROOT, tree

ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]*)\| (\w*) ?\| (.+) \|$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
WHEN = {
    frozenset({False}): "daily",
    frozenset({True}): "nightly",
    frozenset({False, True}): "both",
    frozenset(): "bench",
}
"""When a row's tests run, by whether each is nightly."""


def table() -> list[tuple[int, list[str], str, str]]:
    """Number, tests, when they run, and the figure."""
    page = (ROOT / "docs/recovery.md").read_text(encoding="utf-8")
    return [(int(number), SPAN.findall(tests), when, figure) for number, _, tests, when, figure in ROW.findall(page)]


def is_nightly(path: Path, names: list[str]) -> bool | None:
    """Whether only `make test-all` runs it; None: there is no such test."""
    scope: ast.AST = tree(path)
    top = [node for node in ast.iter_child_nodes(scope) if isinstance(node, ast.Assign)]
    marked = any("pytestmark" in (text := ast.dump(node)) and "'nightly'" in text for node in top)
    for name in names:
        found = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name]
        if not found:
            return None
        scope = found[0]
        marked |= any("'nightly'" in ast.dump(one) for one in getattr(scope, "decorator_list", ()))
    return marked


def test_every_number_is_there_once() -> None:
    assert [number for number, *_ in table()] == list(range(1, 49))


def test_what_it_names_exists_and_runs_when_it_says() -> None:
    for number, spans, when, figure in table():
        found = set[bool]()
        for span in spans:
            path, *names = span.split("::")
            assert (ROOT / path).is_file(), f"{number}: no {path}"
            if names:
                nightly = is_nightly(ROOT / path, names)
                assert nightly is not None, f"{number}: no {span}"
                found.add(nightly)
        assert when == WHEN[frozenset(found)], f"{number} runs {WHEN[frozenset(found)]}"
        assert found or (figure and spans), f"{number} has neither a test nor a benchmark"


def test_the_check_can_fail() -> None:
    path = ROOT / "tests/weight_sync/test_transports.py"
    assert is_nightly(ROOT / "tests/sharding/test_reshard.py", ["test_trainers_to_generators"])
    assert is_nightly(path, ["test_a_killed_generator_disturbs_nobody"]) is False
    assert is_nightly(path, ["test_that_is_not_there"]) is None
    assert is_nightly(ROOT / "tests/parts/hosts/namespaces/test_by_hand.py", ["test_two_shells"])
