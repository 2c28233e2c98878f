"""What the text of a tree tells: code lines, import edges, docstrings and class names, by room and part."""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

SORTING = Path(__file__).parent / "sorting.toml"
PACKAGE = "llamarl"
FAMILIES = ("advantages", "losses", "rewards", "environments", "sources", "trackers", "transports", "recipes")
"""Folders whose files name their class: two of them may hold a class of one name."""
OPENINGS = ("Of", "That", "Those", "As", "By", "With", "For", "What", "Where", "How")
"""A docstring that begins so needs the line above it."""
NOUNS = ("Ring", "Scaling", "Shaping", "Sharding", "String", "Thing")
"""Words in -ing that the field, or the language, has as names of things."""
IMPORT = (ast.Import, ast.ImportFrom)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Unsorted(SystemExit):
    """A file is not in the table, or twice."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def expanded(pattern: str) -> list[str]:
    """`{a,b}` is either, as in a shell."""
    pieces = [piece[1:-1].split(",") if piece[0] == "{" else [piece] for piece in re.findall(r"\{.*?\}|[^{]+", pattern)]
    return ["".join(chosen) for chosen in product(*pieces)]


@dataclass(frozen=True, slots=True)
class Unit:
    """A module, or those definitions of one that belong to a part."""

    module: str
    part: str = ""

    def __str__(self) -> str:
        return self.module.removeprefix(f"{PACKAGE}.") + (f" ({self.part}'s)" if self.part else "")


class Sorting:
    """Who owns each file: `rooms` and `parts` by name, with their budgets."""

    def __init__(self, folder: Path) -> None:
        """Raises Unsorted."""
        table: dict[str, Any] = tomllib.loads(SORTING.read_text(encoding="utf-8"))
        self.package = folder / PACKAGE
        self.rooms, self.parts = table["rooms"], table["parts"]
        self.totals: dict[str, int] = table["totals"]
        self.files = sorted(self.package.rglob("*.py"))
        self.has_parts = (self.package / "parts").is_dir()
        owners = [(owner, one) for owner, row in (self.rooms | self.parts).items() for one in row["files"]]
        self._patterns = [(owner, one) for owner, pattern in owners for one in expanded(pattern)]
        self.owner_of = {path: self._owner(path.relative_to(self.package).as_posix()) for path in self.files}
        if faults := [
            f"  {path.relative_to(folder)}: {owner}" for path, owner in self.owner_of.items() if " " in owner
        ]:
            raise Unsorted(f"sort these files in {SORTING}:\n" + "\n".join(faults))
        self.split = self._split()
        self.modules = {self.module(path): path for path in self.files}

    def _owner(self, name: str) -> str:
        """Of a path below the package; a sentence where there is not one."""
        first, _, below = name.partition("/")
        if first == "parts" and "/" in below:
            part = below.split("/")[0]
            return part if part in self.parts else f"no part is called {part}"
        found = {owner: pattern for owner, pattern in self._patterns if fnmatchcase(name, pattern)}
        if not found and self.has_parts:  # what was made since is of the room where it lies
            return first if first in self.rooms else "top"
        return next(iter(found)) if len(found) == 1 else f"is in {len(found)} places {', '.join(found)}"

    def _split(self) -> dict[Path, dict[str, str]]:
        """File -> definition -> part, of those that are still there."""
        found = defaultdict[Path, dict[str, str]](dict)
        for part, row in self.parts.items():
            for place in (one for pattern in row.get("definitions", ()) for one in expanded(pattern)):
                name, _, definition = place.partition(":")
                path = self.package / name
                if path.exists() and any(getattr(node, "name", "") == definition for node in tree(path).body):
                    found[path][definition] = part
        return found

    def module(self, path: Path) -> str:
        parts = path.relative_to(self.package.parent).with_suffix("").parts
        return ".".join(parts).removesuffix(".__init__")

    def name(self, path: Path) -> str:
        return path.relative_to(self.package.parent).as_posix()

    def owner(self, unit: Unit) -> str:
        return unit.part or self.owner_of[self.modules[unit.module]]

    def unit(self, module: str, name: str = "") -> Unit | None:
        """What `from module import name` brings; None: it is not of this package."""
        if f"{module}.{name}" in self.modules:
            return Unit(f"{module}.{name}")
        path = self.modules.get(module)
        return Unit(module, self.split.get(path, {}).get(name, "")) if path else None


# Lines


def code_lines(path: Path) -> set[int]:
    """Numbers of the lines that hold code: without blank lines, comments and docstrings."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set[int]()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in no_code | {tokenize.ENCODING}:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and _is_text(node):
            lines.difference_update(span(node))
    return lines


def span(node: ast.stmt) -> range:
    decorators = node.decorator_list if isinstance(node, Definition) else []
    first = min([node.lineno, *(one.lineno for one in decorators)])
    return range(first, (node.end_lineno or node.lineno) + 1)


def sizes(sorting: Sorting) -> dict[str, Counter[str]]:
    """Code lines and files of each room and part."""
    lines, files = Counter[str](), Counter[str]()
    for path, owner in sorting.owner_of.items():
        mine = code_lines(path)
        files[owner] += 1
        for node in tree(path).body:
            if part := sorting.split.get(path, {}).get(getattr(node, "name", "")):
                lines[part] += len(mine & set(span(node)))
                mine -= set(span(node))
        lines[owner] += len(mine)
    return {"lines": lines, "files": files}


# Imports


def _imported(sorting: Sorting, node: ast.AST) -> Iterator[tuple[str, Unit]]:
    """Names that a statement binds, and what of this package they are."""
    if isinstance(node, ast.Import):
        pairs = [(one.asname or one.name.split(".")[0], sorting.unit(one.name)) for one in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        pairs = [(one.asname or one.name, sorting.unit(node.module, one.name)) for one in node.names]
    else:
        return
    yield from ((name, unit) for name, unit in pairs if unit is not None)


def _pieces(sorting: Sorting, path: Path) -> dict[str, list[ast.stmt]]:
    """Statements of a file by the part that they belong to; those of the file itself are under ''."""
    found = defaultdict[str, list[ast.stmt]](list)
    for node in tree(path).body:
        found[sorting.split.get(path, {}).get(getattr(node, "name", ""), "")].append(node)
    return found


def _used(statements: list[ast.stmt]) -> set[str]:
    nodes = [node for statement in statements for node in ast.walk(statement)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def edges(sorting: Sorting) -> set[tuple[Unit, Unit]]:
    """Importer and imported, once each, also inside functions and for types alone. In a file that belongs to two, an
    import is of those that use its name, and the use of one another's definitions counts, too."""
    found = set[tuple[Unit, Unit]]()
    for path in sorting.files:
        module = sorting.module(path)
        pieces, split = _pieces(sorting, path), sorting.split.get(path, {})
        at_top = [pair for node in tree(path).body for pair in _imported(sorting, node)]
        for part, statements in pieces.items():
            mine, used = Unit(module, part), _used(statements)
            below = [node for one in statements if not isinstance(one, IMPORT) for node in ast.walk(one)]
            found.update((mine, unit) for node in below for _, unit in _imported(sorting, node))
            found.update((mine, unit) for name, unit in at_top if not split or name in used)
            found.update((mine, Unit(module, of)) for name, of in split.items() if name in used and of != part)
    return {(importer, imported) for importer, imported in found if importer != imported}


def crossing(sorting: Sorting) -> dict[str, list[str]]:
    """Edges from the core into parts, and between parts, by name."""
    found = defaultdict[str, list[str]](list)
    for importer, imported in edges(sorting):
        source, target = sorting.owner(importer), sorting.owner(imported)
        if target in sorting.parts and source != target:
            kind = "part_to_part" if source in sorting.parts else "core_to_part"
            found[kind].append(f"{importer} [{source}] -> {imported} [{target}]")
    return {kind: sorted(found[kind]) for kind in ("core_to_part", "part_to_part")}


def by_string(sorting: Sorting) -> list[str]:
    """Modules of parts that a text constant of the core names: `environment:EnvironmentExecutor`."""
    found = []
    for path in sorting.files:
        if sorting.owner_of[path] in sorting.parts:
            continue
        for node in ast.walk(tree(path)):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            if not re.fullmatch(r"(llamarl(\.\w+)+|[\w.]+:\w+)(:\w+)?", node.value):
                continue
            named = node.value.split(":")[0]
            for module in (named, f"{PACKAGE}.executors.{named}"):
                unit = sorting.unit(module)
                if unit is not None and sorting.owner(unit) in sorting.parts:
                    found.append(f"{sorting.name(path)}:{node.lineno} {node.value} [{sorting.owner(unit)}]")
    return found


# Words


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text: of the module, its classes and functions, and of what is assigned right above."""
    for node in ast.walk(tree(path)):
        for body in (value for _, value in ast.iter_fields(node) if isinstance(value, list)):
            for position, one in enumerate(body):
                begins = position == 0 and isinstance(node, ast.Module | Definition)
                if (begins or isinstance(body[position - 1], ast.Assign | ast.AnnAssign)) and _is_text(one):
                    yield one.lineno, one.value.value


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def opening(docstring: str) -> str:
    """The word of `OPENINGS` that a docstring begins with; empty: it can be read alone."""
    word = re.match(r"\s*(\w*)", docstring)[1]  # type: ignore[index]
    return word if word in OPENINGS else ""


def cannot_be_read_alone(sorting: Sorting) -> dict[str, Any]:
    """Docstrings that begin with one of `OPENINGS`."""
    total, words, places = 0, Counter[str](), dict[str, list[int]]()
    for path in sorting.files:
        for line, text in docstrings(path):
            total += 1
            if word := opening(text):
                words[word] += 1
                places.setdefault(sorting.name(path), []).append(line)
    lines = {name: " ".join(map(str, sorted(at))) for name, at in places.items()}
    count = sum(words.values())
    return {
        "docstrings": total, "cannot_be_read_alone": count, "share": round(count / total, 4),
        "by_word": dict(words.most_common()), "lines_by_file": lines,
    }  # fmt: skip


def class_names(sorting: Sorting) -> dict[str, Any]:
    """Names with two bearers, underscores ignored, and gerunds; members of families may share theirs."""
    bearers, gerunds = defaultdict[str, list[tuple[Path, int]]](list), list[str]()
    for path in sorting.files:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                bearers[node.name.strip("_")].append((path, node.lineno))
    places = {name: [f"{sorting.name(path)}:{line}" for path, line in at] for name, at in sorted(bearers.items())}
    for name, at in places.items():
        last = (re.findall(r"[A-Z][a-z0-9]*", name) or [""])[-1]
        if last.endswith("ing") and last not in NOUNS:
            gerunds += [f"{name} {place}" for place in at]
    double = {name: at for name, at in bearers.items() if len(at) > 1}
    families = [name for name, at in double.items() if all(_is_member(path, name) for path, _ in at)]
    return {
        "double": {name: places[name] for name in sorted(double) if name not in families},
        "double_of_families": {name: places[name] for name in sorted(families)},
        "gerunds": gerunds,
    }


def _is_member(path: Path, name: str) -> bool:
    """The class that a file of a family is named after."""
    return path.parent.name in FAMILIES and path.stem.replace("_", "") == name.lower()
