"""Environments of the package skyrl-gym: `make`, `init`, `step` and `close`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from llamarl.config import ConfigError
from llamarl.config.ref import may_run
from llamarl.parts.episodes.environments._base import Environment, Messages, RewardedReply, Task, Turn
from llamarl.rewards._base import right
from llamarl.types import RewardResult


@dataclass
class SkyrlGym(Environment):
    """Runs the environment of the row. Each step's reward is the reward of its turn.

    The columns of the row are the environment's `extras`. Rows without `reward_spec` get one from their answer.
    """

    id: str = ""
    """Registered environment, for example `gsm8k_multi_turn`. Empty means the row's `env_class`."""
    module: str = ""
    """Python module that registers your own environments. Empty means only those of the package."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The environment's `env_config`."""
    is_text: bool = False
    """Appends the text of observations without the chat template, for environments that write one long turn."""

    def check(self) -> None:
        self._package()

    def open(self, task: Task) -> None:
        name = self.id or task.metadata.get("env_class")
        if not name:
            raise ValueError("the row has no `env_class`; set rollout.environment.id")
        spec = {"reward_spec": {"method": "rule", "ground_truth": task.answer}}
        extras = {"max_turns": self.max_turns, **spec, **task.metadata}
        self._env = self._made(str(name), extras)
        self._num_steps = 0
        prompt = task.metadata.get("prompt")
        asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": task.prompt}]
        given, _ = self._env.init([dict(one) for one in asked])
        if given != asked:
            raise ValueError(f"skyrl_gym: {name!r} changes its prompt, after which the policy has not written")

    def reply(self, task: Task, turns: Sequence[Turn]) -> str | Messages | RewardedReply | RewardResult | None:
        step = self._step(turns)
        reward = float(step["reward"])
        if step["done"]:
            return right(reward)
        said: Messages = [dict(one) for one in step["observations"]]
        return RewardedReply("".join(one["content"] for one in said) if self.is_text else said, reward)

    def ended(self, task: Task, turns: Sequence[Turn]) -> RewardResult:
        if len(turns) == self._num_steps:  # the last turn has had its step, and its reward
            return right(0.0)
        return right(float(self._step(turns)["reward"]))

    def close(self) -> None:
        self._env.close()

    def _step(self, turns: Sequence[Turn]) -> Mapping[str, Any]:
        self._num_steps += 1
        return self._env.step(turns[-1].response)

    def _made(self, name: str, extras: Mapping[str, Any]) -> Any:
        config = import_module("omegaconf").OmegaConf.create(dict(self.config))
        return self._package().make(name, env_config=config, extras=extras)

    def _package(self) -> ModuleType:
        """Imports the package, and the module that registers further environments. Raises ConfigError."""
        try:
            package = import_module("skyrl_gym")
        except ImportError as error:
            raise ConfigError(f"skyrl_gym needs a package ({error}): pip install 'llamarl[skyrl-gym]'") from None
        if self.module:
            may_run("rollout.environment.module", self.module)
            try:
                import_module(self.module)
            except ImportError as error:
                raise ConfigError(f"rollout.environment.module = {self.module!r} cannot be imported: {error}") from None
        return package
