"""Ref: a part named in TOML becomes an object, or one clear sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

import llamarl.rewards
from llamarl.config import ConfigError, Ref, build
from llamarl.config.ref import MEMBERS_OF_PARTS, PARTS, members, modules, part
from tests.config.family.plain_part import PlainPart
from tests.config.family.tuned import Tuned

FAMILY = "tests.config.family"
OUTSIDE = "tests.config.family.tuned:Tuned"


def test_members_are_the_files_of_the_folder() -> None:
    assert members(FAMILY) == ["plain_part", "tuned"]


def test_members_in_parts_are_those_that_are_known_without_them() -> None:
    folders = [path.parent for path in Path(llamarl.__path__[0]).rglob("__init__.py") if "parts" not in path.parts]
    families = [".".join(("llamarl", *folder.relative_to(llamarl.__path__[0]).parts)) for folder in folders]
    assert {"llamarl.rewards", "llamarl.data.sources", "llamarl.weight_sync.transports"} <= set(families)
    not_families = ("cli", "executors", "sandbox")  # rooms that parts have, too
    found = {
        f"{family.rpartition('.')[2]}.{name}": module.split(".")[2]
        for family in families if not family.endswith(not_families)
        for name, module in modules(family).items() if module.startswith(f"{PARTS}.")
    }  # fmt: skip
    assert found == MEMBERS_OF_PARTS


def test_member_is_found_by_its_file_name() -> None:
    assert build(Ref(name="plain_part"), FAMILY, "part") == PlainPart()


@pytest.mark.parametrize("name", ["tuned", OUTSIDE])
def test_options_are_set(name: str) -> None:
    ref = Ref.model_validate({"name": name, "size": 3, "rho": 2, "kind": "high", "words": ["a", "b"]})
    part = build(ref, FAMILY, "part")
    assert part == Tuned(size=3, rho=2.0, kind="high", words=("a", "b"))
    assert part.doubled == 6


def test_a_loss_that_is_not_here_is_no_other_one() -> None:
    with pytest.raises(ConfigError, match=r"`trainer\.loss = 'dpo'` is unknown; llamarl has no DPO, .*; known: aipo, "):
        build(Ref(name="dpo"), "llamarl.algorithms.losses", "trainer.loss")


def test_shipped_loss_is_built() -> None:
    loss = build(Ref.model_validate({"name": "aipo", "rho": 8}), "llamarl.algorithms.losses", "trainer.loss")
    assert loss.rho == 8.0


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ({"name": "tunned"}, "`part = 'tunned'` is unknown; did you mean `tuned`?"),
        ({"name": "zzz"}, "`part = 'zzz'` is unknown; known: plain_part, tuned"),
        ({"name": "_base"}, "`part = '_base'` is unknown; known: plain_part, tuned"),
        ({"name": "tuned", "siez": 1}, "`part.siez` is not an option of `tuned`; did you mean `size`?"),
        ({"name": "plain_part", "x": 1}, "`part.x` is not an option of `plain_part`; it has no options"),
        ({"name": "tuned", "size": 1, "doubled": 4}, "`part.doubled` is not an option of `tuned`"),
        ({"name": "tuned"}, "`part.size` is missing"),
        ({"name": "tuned", "size": "big"}, "`part.size = 'big'`"),
        ({"name": "tuned", "size": 1.5}, "`part.size = 1.5`"),
        ({"name": "tuned", "size": 1, "kind": "middle"}, "`part.kind = 'middle'`"),
        ({"name": "tuned", "size": 1, "words": ["a", 2]}, "`part.words.1 = 2`"),
        ({"name": "no_such_package:Thing"}, "`part = 'no_such_package:Thing'` cannot be imported: No module named"),
        ({"name": "tests.config.family.tuned:Thing"}, "has no attribute 'Thing'"),
        ({"name": "tests.config.family.tuned:NoDataclass"}, "must be a dataclass: its fields are its options"),
        ({"name": ":Tuned"}, "`part = ':Tuned'` is not of the form `package.module:Class`"),
        ({"name": ".tuned:Tuned"}, "is not of the form `package.module:Class`"),
        ({"name": "tuned", "size": -1}, "`part = 'tuned'`: size = -1 must not be negative"),
    ],
)
def test_mistake_is_one_sentence(ref: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(Ref.model_validate(ref), FAMILY, "part")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_ref_is_frozen() -> None:
    ref = Ref(name="tuned")
    with pytest.raises(ValidationError):
        ref.name = "other"  # pyrefly: ignore


def test_a_part_is_opened_by_its_name_and_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(part("sft", "ensure_base_model"))
    with pytest.raises(ConfigError, match="lacks the part `no_such`"):
        part("no_such", "anything")

    def fails(name: str) -> None:
        raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")

    monkeypatch.setattr("importlib.import_module", fails)
    with pytest.raises(ConfigError, match="the part `page` needs the package `uvicorn`"):
        part("page", "watching")


def test_a_part_adds_members_to_a_family_of_the_core() -> None:
    assert "code" in members("llamarl.rewards")
    assert not list(Path(llamarl.rewards.__path__[0]).glob("code.py"))
