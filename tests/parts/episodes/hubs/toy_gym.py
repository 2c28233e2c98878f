"""Environments by the protocol of the package skyrl-gym, without and with the package."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


class Guess:
    """A number is guessed. Each wrong guess earns 0.1; the environment says nothing but `no`."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        self.truth, self.max_turns = extras["reward_spec"]["ground_truth"], extras["max_turns"]
        self.penalty = dict(env_config or {}).get("penalty", 0.0)
        self.turns, self.closed = 0, 0

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        return [*prompt, {"role": "user", "content": "more"}] if self.truth == "rewritten" else prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        is_right = action.strip() == self.truth
        done = is_right or self.turns >= self.max_turns
        said = [] if done else [{"role": "user", "content": "no"}]
        reward = 1.0 - self.penalty if is_right else 0.1
        return {"observations": said, "reward": reward, "done": done, "metadata": {}}

    def close(self) -> None:
        self.closed += 1


def register() -> None:
    import skyrl_gym

    if "llamarl_guess" not in skyrl_gym.registry:
        skyrl_gym.register(id="llamarl_guess", entry_point=type("Registered", (Guess, skyrl_gym.Env), {}))


with suppress(ImportError):  # some tests run without the package
    register()
