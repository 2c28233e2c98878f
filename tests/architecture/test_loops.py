"""The loops and threads of the code are those that docs/architecture.md lists.

A loop is an `async def` whose own body has a `while` that awaits, or a function that has itself called later. Each has
a line there, or is a wait of its caller and named in `WAITS`. Plain functions that loop run in threads; each file that
starts one has a line there, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.architecture.repository import PACKAGE, ROOT, functions, nodes, python_files, tree

WAITS = {
    "cluster/fork_server.py: ready",
    "cluster/handle.py: _whole",
    "controller/admission.py: batch",
    "controller/restart.py: _call",
    "controller/flight.py: drain",
    "controller/train_loop.py: save",
    "controller/train_loop.py: train_again",
    "controller/supervision.py: until",
    "controller/weights.py: choose",
    "controller/train_loop.py: _record_completed",
    "controller/train_loop.py: record_completed",
    "parts/copies/copier.py: finish",
    "parts/episodes/gateway/app.py: _rest",
    "parts/episodes/programs/_verifiers.py: launch",
    "parts/hosts/agent.py: _pull",
    "parts/hosts/agent.py: give",
    "parts/hosts/home.py: _done",
    "parts/hosts/home.py: _line",
    "parts/hosts/registry.py: until",
    "parts/replay/replay.py: _read",
}
"""They repeat something until it is so, for a caller that awaits them, and are no tasks of their own."""
STARTS = {"create_task", "ensure_future", "start", "take"}
"""What begins a task; `start` and `take` are the supervisor's."""
TIMERS = {"call_later", "call_at", "call_soon"}
POOLS = {"ThreadPoolExecutor", "to_thread", "run_in_executor"}
LINE = re.compile(
    r"^\| `(?P<loop>[\w/]+\.py: \w+)` \| (?P<waits>.+) \| (?P<by>.+) \| (?P<unblocked>.+) \|$", re.MULTILINE
)
THREAD = re.compile(r"^\| `(?P<file>[\w/]+\.py)` \| (?P<process>[\w ,]+) \| (?P<work>[^|]+) \|$", re.MULTILINE)
NAME = re.compile(r"`(\w+)`")


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function's body, without those of functions in it."""
    inside = list(ast.iter_child_nodes(function))
    while inside:
        node = inside.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside += ast.iter_child_nodes(node)


def _awaits(loop: ast.While) -> bool:
    return any(isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) for node in ast.walk(loop))


def _name(path: Path, function: str) -> str:
    return f"{path.relative_to(PACKAGE).as_posix()}: {function}"


def loops(path: Path) -> Iterator[str]:
    for function in functions(path):
        whiles = (node for node in _own(function) if isinstance(node, ast.While))
        awaits = isinstance(function, ast.AsyncFunctionDef) and any(map(_awaits, whiles))
        if awaits or any(_is_timer(node, function.name) for node in _own(function)):
            yield _name(path, function.name)


def _is_timer(node: ast.AST, function: str) -> bool:
    """`call_later(BEAT_S, self.function)`"""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in TIMERS:
        return False
    return any(ast.unparse(one).rpartition(".")[2] == function for one in node.args)


def starts_thread(path: Path) -> bool:
    """By itself, or from a pool."""
    calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
    named = {
        (ast.unparse(call.func).rpartition(".")[2], any(one.arg == "target" for one in call.keywords)) for call in calls
    }
    return ("Thread", True) in named or bool({name for name, _ in named} & POOLS)


def tasks(path: Path) -> Iterator[str]:
    """Functions of a file that are begun as tasks in it."""
    for node in nodes(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STARTS:
            for call in (inner for one in node.args for inner in ast.walk(one) if isinstance(inner, ast.Call)):
                yield _name(path, ast.unparse(call.func).rpartition(".")[2])


def _index() -> str:
    return (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_loop_has_its_line_and_every_line_its_loop() -> None:
    found = {loop for path in python_files("llamarl") for loop in loops(path)}
    listed = [line["loop"] for line in LINE.finditer(_index())]
    assert len(listed) == len(set(listed))
    assert not found - set(listed) - WAITS, "add it to the tables of docs/architecture.md"
    assert not set(listed) - found, "no such loop any more"
    assert not WAITS - found, "no such wait any more"
    assert not WAITS & set(listed)


def test_a_wait_is_no_task() -> None:
    begun = {task for path in python_files("llamarl") for task in tasks(path)}
    assert not WAITS & begun, "move it from WAITS to the tables of docs/architecture.md"


def test_who_starts_a_loop_names_it() -> None:
    """The first name in that column is a function which names the loop."""
    lines = [(NAME.search(line["by"]), line["loop"]) for line in LINE.finditer(_index())]
    assert not [loop for starter, loop in lines if not starter], "who starts it?"
    starters = {starter[1] for starter, _ in lines if starter}
    named = {pair for path in python_files("llamarl") for pair in _named(path, starters)}
    for starter, loop in lines:
        assert starter and (starter[1], loop.rpartition(" ")[2]) in named, f"{starter} does not name {loop}"


def test_functions_that_lines_name_exist() -> None:
    known = {function.name for path in python_files("llamarl") for function in functions(path)} | {"__main__"}
    named = {name for line in LINE.finditer(_index()) for name in NAME.findall(f"{line['by']} {line['unblocked']}")}
    assert named <= known, f"no function is called {', '.join(sorted(named - known))}"


def _named(path: Path, starters: Collection[str]) -> Iterator[tuple[str, str]]:
    """Starters, each with every name in it; what is below `if __name__ == "__main__"` is in `__main__`."""
    scripts = [("__main__", node) for node in tree(path).body if isinstance(node, ast.If)]
    for function, scope in [*((one.name, one) for one in functions(path) if one.name in starters), *scripts]:
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute | ast.Name):
                yield function, node.attr if isinstance(node, ast.Attribute) else node.id


def test_every_thread_has_its_line_and_every_line_its_thread() -> None:
    found = {path.relative_to(PACKAGE).as_posix() for path in python_files("llamarl") if starts_thread(path)}
    assert {line["file"] for line in THREAD.finditer(_index())} == found


def test_the_checks_can_fail() -> None:
    path = PACKAGE / "controller" / "collector.py"
    assert "controller/collector.py: _collect_loop" in set(loops(path))
    assert "controller/collector.py: follow" not in set(loops(path))
    assert "controller/supervision.py: _beat" in set(loops(PACKAGE / "controller" / "supervision.py"))
    assert "controller/collector.py: _collect_loop" in set(tasks(path))
    assert not starts_thread(path)
    assert starts_thread(PACKAGE / "cluster" / "rank.py")
