"""One name for one idea: those that the field uses in other places for what has a name here are not used."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.repository import PACKAGE, name_of, nodes, python_files

RULED_OUT = {
    "trajectory": "rollout",
    "trajectories": "rollouts",
    "datum": "train sample",
    "learner": "trainer, or critic",
    "actor": "generator, or executor",
    "refit": "publish and adopt",
    "meeting": "rendezvous",
    "seat": "rank",
    "old_logprobs": "behavior_logprobs, or proximal_logprobs",
    "weight_version": "policy_version",
    "policy_age": "staleness",
    "action_mask": "loss_mask",
    "behaviour": "behavior",
}
"""Words that are not said -> those that are."""
SAID = re.compile(f"_({'|'.join(RULED_OUT)})s?(?=_)")
OTHERS = {"llamarl/cluster/monarch.py": {"actor"}}
"""Names of other libraries."""
FAMILIES = ("advantages", "losses", "rewards", "environments", "sources", "trackers", "transports", "recipes")
"""Folders whose files name their class, so that two of them may hold a class of one name."""
NOUNS = ("Ring", "Scaling", "Shaping", "Sharding", "String", "Thing")
"""Words in -ing that the field, or the language, has as names of things."""


def _names(path: Path) -> Iterator[tuple[int, str]]:
    """What a file defines: functions, classes, arguments, variables, attributes."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _words(name: str) -> str:
    """`OldLogprobs` and `old_logprobs` as `_old_logprobs_`."""
    return f"_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower().strip('_')}_"


@cache
def _ruled_out(name: str) -> list[tuple[str, str]]:
    """The words it says, one or many (`Learner`, `old_learners`), and what to say instead."""
    return [(word, RULED_OUT[word]) for word in SAID.findall(_words(name))]


def test_names_are_those_of_the_field() -> None:
    faults = [
        f"{name_of(path)}:{line} {name}: say {instead}"
        for path in python_files(PACKAGE.name)
        for line, name in [*_names(path), (1, path.stem)]
        for word, instead in _ruled_out(name)
        if word not in OTHERS.get(name_of(path), ())
    ]
    assert not faults, "\n".join(faults)


def _classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in python_files(PACKAGE.name):
        yield from ((path, node) for node in nodes(path) if isinstance(node, ast.ClassDef))


def _is_member(path: Path, name: str) -> bool:
    """Whether the class has the name of its file in a family."""
    return path.parent.name in FAMILIES and name.lower() == path.stem.replace("_", "")


def test_no_two_classes_have_one_name() -> None:
    bearers = defaultdict[str, list[str]](list)
    for path, node in _classes():
        if not _is_member(path, node.name):
            bearers[node.name.strip("_")].append(f"{name_of(path)}:{node.lineno}")
    faults = [f"{name}: {', '.join(places)}" for name, places in bearers.items() if len(places) > 1]
    assert not faults, "\n".join(faults)


def test_classes_are_nouns() -> None:
    faults = [
        f"{name_of(path)}:{node.lineno} {node.name}: say what it is, not what it does"
        for path, node in _classes()
        if (last := _words(node.name).strip("_").split("_")[-1].title()).endswith("ing") and last not in NOUNS
    ]
    assert not faults, "\n".join(faults)
