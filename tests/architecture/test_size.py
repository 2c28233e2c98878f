"""Small functions, small files, no empty rooms."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

from tests.architecture.repository import PACKAGE, functions, name_of, python_files, tree

FUNCTION_LINES, CONTROLLER_FUNCTION_LINES = 60, 120
FILE_LINES, EXECUTOR_LINES = 420, 200
CODE_LINES, KERNEL_LINES = 30_900, 1_500


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_functions_are_short() -> None:
    too_long = []
    for path in python_files():
        bound = CONTROLLER_FUNCTION_LINES if path.is_relative_to(PACKAGE / "controller") else FUNCTION_LINES
        for node in functions(path):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > bound:
                too_long.append(f"{name_of(path)}:{node.lineno} {node.name} has {length} lines, at most {bound}")
    assert not too_long, "\n".join(too_long)


def test_files_are_short() -> None:
    too_long = []
    for path in python_files():
        bound = EXECUTOR_LINES if path.parent == PACKAGE / "executors" else FILE_LINES
        if _num_lines(path) > bound:
            too_long.append(f"{name_of(path)} has {_num_lines(path)} lines, at most {bound}")
    assert not too_long, "\n".join(too_long)


def _num_code_lines(path: Path) -> int:
    """Lines that hold code: without blank lines, comments and docstrings."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set[int]()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in no_code | {tokenize.ENCODING}:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_package_stays_small() -> None:
    assert sum(map(_num_code_lines, python_files("llamarl"))) < CODE_LINES


def test_kernels_stay_small() -> None:
    files = [*PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h")]
    lines = (line.strip() for path in files for line in path.read_text(encoding="utf-8").splitlines())
    assert 0 < sum(bool(line) and not line.startswith("//") for line in lines) < KERNEL_LINES


def _has_code(path: Path) -> bool:
    """More than a docstring."""
    return any(not isinstance(node, ast.Expr) for node in tree(path).body)


def test_no_empty_rooms() -> None:
    """A folder with files is a package with code in it."""
    faults = []
    for folder in (path for path in PACKAGE.rglob("*") if path.is_dir()):
        files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        is_cache = any(part.startswith((".", "__")) for part in folder.relative_to(PACKAGE).parts)
        if is_cache or not files:  # version control knows neither
            continue
        if not (folder / "__init__.py").exists():
            faults.append(f"{name_of(folder)} has no __init__.py")
        elif not any(_has_code(path) for path in files if path.suffix == ".py"):
            faults.append(f"{name_of(folder)} has no code")
    assert not faults, "\n".join(faults)
