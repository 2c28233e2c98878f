"""The repository as text: what the architecture tests read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "llamarl"
CODE_FOLDERS = ("llamarl", "tests", "examples", "benchmarks")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[Path]:
    """Every Python file below the named folders of the repository."""
    return sorted(path for folder in folders or CODE_FOLDERS for path in (ROOT / folder).rglob("*.py"))


def documents() -> list[Path]:
    """Every page that people read."""
    folders = (ROOT / "docs", ROOT / "examples", PACKAGE)
    return sorted([*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))])


def name_of(path: Path) -> str:
    """`llamarl/config/ref.py`"""
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """`llamarl.config.ref`"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file. Walking is what takes long here, so each file is walked once for all tests."""
    return tuple(ast.walk(tree(path)))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in nodes(path) if isinstance(node, Function))


@cache
def imports(path: Path) -> frozenset[str]:
    """Top-level packages that a file imports, also inside functions."""
    found = set[str]()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return frozenset(found)
