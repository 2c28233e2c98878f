"""Python functions that the policy may call as tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llamarl.parts.episodes.environments._base import Environment, Messages, Task, Turn
from llamarl.parts.episodes.environments._functions import answers, function_of, schema


@dataclass
class Tools(Environment):
    """Replies to tool calls, in the format of the model's chat template, with the values of the functions, or with
    errors. A turn without calls ends the episode."""

    functions: list[str] = field(default_factory=list)
    """Functions `package.module:function` with annotations and a docstring. Set by `rollout.tools`."""

    def __post_init__(self) -> None:
        found = [function_of(name) for name in self.functions]
        self._functions = {function.__name__: function for function in found}
        if len(self._functions) < len(found):
            raise ValueError("two functions have the same name; the policy could not tell them apart")

    def tools(self) -> list[dict[str, Any]]:
        return [schema(function) for function in self._functions.values()]

    def reply(self, task: Task, turns: Sequence[Turn]) -> Messages | None:
        return answers(turns[-1].calls, self._functions) or None
