"""Environments of the package verifiers. Their tasksets, tools, rollout logic and rubrics decide; llamarl trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from llamarl.config import ConfigError
from llamarl.parts.episodes.environments._base import Task
from llamarl.parts.episodes.programs._base import Program
from llamarl.rewards._base import invalid
from llamarl.types import RewardResult


def verifiers_adapter() -> ModuleType:
    """Imports the module that imports verifiers. Raises ConfigError."""
    try:
        return import_module("llamarl.parts.episodes.programs._verifiers")
    except ImportError as error:
        raise ConfigError(f"verifiers needs a package ({error}): pip install 'llamarl[verifiers]'") from None


@dataclass
class Verifiers(Program):
    """Runs the environment of the row's taskset. Rows come from the data source `verifiers`.

    The reward and the metrics are those of the environment. A failed episode is INVALID, with the environment's error.
    """

    id: str = ""
    """Environment that plays the taskset. Empty means the taskset's own, or else a single agent."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the environment, as in a table `[env]` of verifiers. By default its agent's harness is a chat loop
    with tools in the worker process of the agent."""

    def check(self) -> None:
        verifiers_adapter()

    async def run(self, task: Task, base_url: str, api_key: str) -> RewardResult:
        if not {"taskset", "index", "key"} <= task.metadata.keys():
            return invalid("the row is none of the data source `verifiers`")
        settings = {**self.settings, "id": self.id} if self.id else self.settings
        return await verifiers_adapter().episode(task.metadata, settings, base_url, api_key)
