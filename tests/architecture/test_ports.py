"""The ports of `llamarl/controller/ports.py` are what executors offer, and the only way to call them."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from typing import get_type_hints

import pytest

from llamarl.cluster.api import calls_of
from llamarl.controller import ports
from llamarl.parts.episodes.ports import EnvironmentPort, GatewayPort
from tests.architecture.repository import PACKAGE, name_of, nodes, python_files

SERVES = {
    "generator:GeneratorExecutor": ports.GeneratorPort,
    "reward:RewardExecutor": ports.RewardPort,
    "models:RewardModelExecutor": ports.RewardModelPort,
    "models:ReferenceExecutor": ports.ColumnPort,
    "models:CriticExecutor": ports.CriticPort,
    "trainer:TrainerExecutor": ports.TrainerPort,
    "llamarl.parts.sft.executor:SftExecutor": ports.SftPort,
    "llamarl.parts.episodes.executors.environment:EnvironmentExecutor": EnvironmentPort,
    "llamarl.parts.episodes.executors.gateway:GatewayExecutor": GatewayPort,
}
"""Which executor serves which port."""


@pytest.mark.parametrize("target", SERVES)
def test_executors_have_the_methods_of_their_port(target: str) -> None:
    module, _, name = target.partition(":")
    executor = getattr(import_module(module if module.startswith("llamarl.") else f"llamarl.executors.{module}"), name)
    calls = calls_of(SERVES[target])
    assert calls
    for call in calls:
        asked, offered = (inspect.signature(getattr(owner, call)) for owner in (SERVES[target], executor))
        assert list(asked.parameters) == list(offered.parameters), f"{name}.{call}"


def test_every_port_has_an_executor_and_no_call_takes_or_gives_just_anything() -> None:
    roles = [EnvironmentPort, GatewayPort]
    roles += [value for name, value in vars(ports).items() if name.endswith("Port")]
    assert set(roles) - {ports.OptimizingPort} == set(SERVES.values())
    for role in roles:
        for call in calls_of(role):
            for name, hint in get_type_hints(getattr(role, call)).items():
                assert "typing.Any" not in str(hint), f"{role.__name__}.{call}: {name} may be anything"


def test_no_remote_call_by_a_string_outside_of_the_cluster() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in python_files("llamarl")
        if path.parent != PACKAGE / "cluster"
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("call", "call_each")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]
    assert not found, "use a port of llamarl/controller/ports.py"
