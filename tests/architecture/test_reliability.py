"""The table of docs/recovery.md names all that must hold, and tests that exist and run when it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.architecture.repository import ROOT, tree

ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]*)\| (\w*) ?\| (.+) \|$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")


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
        tests = [span for span in spans if "::" in span]
        for span in spans:
            path, *names = span.split("::")
            assert (ROOT / path).is_file(), f"{number}: no {path}"
            if names:
                nightly = is_nightly(ROOT / path, names)
                assert nightly is not None, f"{number}: no {span}"
                assert nightly == (when == "nightly"), f"{number}: {span} is not {when}"
        assert bool(tests) == (when in ("daily", "nightly")), f"{number} names no test"
        assert when in ("daily", "nightly", "bench") or "No test" in figure, f"{number}: when?"


def test_the_check_can_fail() -> None:
    path = ROOT / "tests/parts/hosts/namespaces/test_agents.py"
    assert is_nightly(path, ["test_a_frozen_controller_is_lost_too"])
    assert is_nightly(path, ["test_agents_end_what_they_started_when_the_controller_is_gone"]) is False
    assert is_nightly(path, ["test_that_is_not_there"]) is None
    assert is_nightly(ROOT / "tests/parts/hosts/namespaces/test_by_hand.py", ["test_two_shells"])
