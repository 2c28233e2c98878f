"""What the text of a checkout tells about the package: code lines, imports, constructors, prose."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "llamarl"
DIALECT = re.compile(
    r"\b(so (?:many|long|often)|hears? of|is told|goes on|what is|those that|that one|of (?:its|their) own|for good"
    r"|learnt)\b"
)
"""Constructions that make a reader read a sentence twice."""
MAX_ARGUMENTS = 7
"""Most arguments of a constructor, without `self`, that are not listed."""


class Source:
    """The package in a checkout. Rooms are the folders of the core, parts those of `parts/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / PACKAGE
        self.files = sorted(self.package.rglob("*.py"))
        self.modules = {self.module(path): path for path in self.files}

    def module(self, path: Path) -> str:
        return ".".join(path.relative_to(self.folder).with_suffix("").parts).removesuffix(".__init__")

    def room(self, path: Path) -> str:
        """Returns `controller`, `parts/hosts`, or `top` for the files of no folder."""
        parts = path.relative_to(self.package).parts
        return "/".join(parts[: 2 if parts[0] == "parts" and len(parts) > 2 else 1]) if len(parts) > 1 else "top"

    def imports(self) -> set[tuple[str, str]]:
        """Returns pairs of importer and imported module, those inside functions and for types alone included."""
        found = set[tuple[str, str]]()
        for module, path in self.modules.items():
            for node in ast.walk(tree(path)):
                found.update((module, one) for one in self._imported(node) if one != module)
        return found

    def _imported(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{one.name}" for one in node.names]
        else:
            return
        for name in names:
            for candidate in (name, name.rpartition(".")[0]):
                if candidate in self.modules:
                    yield candidate
                    break


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def count_code_lines(path: Path) -> int:
    """Returns the number of lines without blank lines, comments and docstrings."""
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


def sizes(source: Source) -> dict[str, dict[str, int]]:
    """Returns files and code lines by room."""
    found = defaultdict[str, Counter[str]](Counter)
    for path in source.files:
        found[source.room(path)].update(files=1, code_lines=count_code_lines(path))
    return {room: dict(found[room]) for room in sorted(found)}


def crossing(source: Source) -> dict[str, list[str]]:
    """Returns the imports from the core into a part, and from one part into another."""
    found: dict[str, list[str]] = {"core_to_part": [], "part_to_part": []}
    for importer, imported in sorted(source.imports()):
        rooms = source.room(source.modules[importer]), source.room(source.modules[imported])
        if rooms[1].startswith("parts/") and rooms[0] != rooms[1]:
            kind = "part_to_part" if rooms[0].startswith("parts/") else "core_to_part"
            found[kind].append(f"{importer} -> {imported}")
    return found


def long_constructors(source: Source) -> dict[str, int]:
    """Returns the number of arguments of each written `__init__` that takes more than `MAX_ARGUMENTS`."""
    found = dict[str, int]()
    for module, path in source.modules.items():
        for owner in (node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)):
            for made in (one for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"):
                count = len(made.args.posonlyargs + made.args.args + made.args.kwonlyargs) - 1
                if count > MAX_ARGUMENTS:
                    found[f"{module}.{owner.name}"] = count
    return found


def prose(source: Source) -> dict[str, Any]:
    """Returns pages and words of `docs/`, lines of the README, and how often `DIALECT` occurs in code and pages."""
    pages = sorted((source.folder / "docs").rglob("*.md"))
    texts = {path: path.read_text(encoding="utf-8") for path in [*pages, source.folder / "README.md", *source.files]}
    return {
        "docs_pages": len(pages),
        "docs_words": sum(len(texts[page].split()) for page in pages),
        "readme_lines": len(texts[source.folder / "README.md"].splitlines()),
        "dialect": sum(len(DIALECT.findall(text)) for text in texts.values()),
    }
