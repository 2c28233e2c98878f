"""One name for one idea: those that the field uses in other places for what has a name here are not used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.repository import PACKAGE, name_of, python_files, tree

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
"""What is not said -> what is."""
OTHERS = {"llamarl/cluster/monarch.py": {"actor"}}
"""Names of other libraries."""


def _names(path: Path) -> Iterator[tuple[int, str]]:
    """What a file defines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree(path)):
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


def test_names_are_those_of_the_field() -> None:
    faults = [
        f"{name_of(path)}:{line} {name}: say {instead}"
        for path in python_files(PACKAGE.name)
        for line, name in [*_names(path), (1, path.stem)]
        for word, instead in RULED_OUT.items()
        if f"_{word}_" in _words(name) and word not in OTHERS.get(name_of(path), ())
    ]
    assert not faults, "\n".join(faults)
