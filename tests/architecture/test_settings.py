"""Every shipped TOML loads, every setting says what it is, and there are few of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from llamarl.config import RunConfig, SftConfig, load_config, load_sft_config
from llamarl.config.schema import Section
from tests.architecture.repository import PACKAGE, ROOT, name_of, tree

MAX_SETTINGS = 208
FAMILIES = ("algorithms/losses", "algorithms/advantages", "rewards", "data/sources")
SHIPPED = sorted([*(ROOT / "configs").rglob("*.toml"), *(ROOT / "examples").rglob("*.toml")])


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_shipped_config_loads(path: Path) -> None:
    if path.stem.endswith("_sft"):
        load_sft_config(path)
        return
    config = load_config(path)
    if config.model.warm_start:
        load_sft_config(config.model.warm_start)


def _settings(schema: type[Section], where: str = "") -> Iterator[tuple[str, str | None]]:
    """Dotted name and description of every setting below `schema`."""
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _settings(field.annotation, f"{where}{name}.")
        else:
            yield where + name, field.description


def _all_settings(schema: type[Section], where: str = "") -> Iterator[tuple[str, str | None]]:
    """The same, with those of sections in lists and in the place of nothing."""
    for name, field in schema.model_fields.items():
        below = list(_sections(field.annotation))
        if below != [field.annotation]:
            yield where + name, field.description
        for section in below if not _is_own(field.description) else ():
            yield from _all_settings(section, f"{where}{name}.")


def _is_own(description: str | None) -> bool:
    """A source's own value of one of the run's settings, which is no setting more."""
    return "` of this source" in (description or "")


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


@pytest.mark.parametrize("schema", [RunConfig, SftConfig])
def test_every_setting_is_described(schema: type[Section]) -> None:
    assert [name for name, description in _all_settings(schema) if not (description or "").strip()] == []


def test_settings_are_few() -> None:
    all_settings = [one for schema in (RunConfig, SftConfig) for one in _all_settings(schema)]
    num_settings = sum(1 for _, said in all_settings if not _is_own(said))
    assert 10 < num_settings < MAX_SETTINGS


def test_every_option_of_a_family_member_is_described() -> None:
    silent = []
    for path in (path for family in FAMILIES for path in (PACKAGE / family).glob("[!_]*.py")):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                silent += [f"{name_of(path)}: {node.name}.{name}" for name in _undescribed(node)]
    assert not silent, "\n".join(silent)


def _undescribed(node: ast.ClassDef) -> Iterator[str]:
    """Fields of a class without a string below them."""
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.unparse(statement.annotation):
            continue
        is_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        name = ast.unparse(statement.target)
        if not is_docstring and not name.startswith("_") and "init=False" not in ast.unparse(statement):
            yield name
