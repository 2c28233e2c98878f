"""The controller's objects are small enough to be read: few arguments, and one count of steps."""

from __future__ import annotations

import ast

from tests.architecture.repository import PACKAGE, name_of, nodes, python_files

MOST_ARGUMENTS = 6
FOLDERS = ("controller", "journal")


def _files() -> list:
    return [path for path in python_files("llamarl") if path.parent.parent == PACKAGE and path.parent.name in FOLDERS]


def test_constructors_take_few_arguments() -> None:
    """What every object uses is in `Services`."""
    faults = []
    for path in _files():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                number = len(node.args.args) - 1 + len(node.args.kwonlyargs)
                faults += [f"{name_of(path)}:{node.lineno} takes {number}"] if number > MOST_ARGUMENTS else []
    assert not faults, "\n".join(faults)


def test_objects_keep_no_count_of_steps() -> None:
    """`Progress` is the one record of how far a run is; the journal knows how far its files are."""
    counts = {"version", "_version", "released", "_asked", "num_steps", "_critic_version", "_critic_begun"}
    faults = [
        f"{name_of(path)}:{node.lineno} {ast.unparse(node)}"
        for path in _files()
        if path.parent.name == "controller"
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
        and node.attr in counts
        and path.name not in ("flight.py", "evaluation.py")  # the version of one generator, and of one evaluation
    ]
    assert not faults, "\n".join(faults)
