"""The joint of episodes: the controller's `Turns`, the executor behind them, and the checks before a run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from llamarl.cluster.api import ExecutorSpec, HostShare
from llamarl.config import ConfigError, RunConfig
from llamarl.parts.episodes.environments._worker import build_environment
from llamarl.parts.episodes.episodes import open_turns
from llamarl.parts.episodes.gateway._worker import find_agent
from llamarl.parts.episodes.machines.bubblewrap import Bubblewrap
from llamarl.parts.episodes.machines.docker import Docker
from llamarl.run.executors import executor_spec
from llamarl.run.prepare import errors_name_source

__all__ = ["build_environment", "check", "machines_here", "open_turns", "spec"]


def check(config: RunConfig) -> None:
    """Raises ConfigError if the environment or agent does not exist or does not work with other settings."""
    rollout = config.rollout
    for label, one in config.by_source.items():
        with errors_name_source(label):
            if one.rollout.environment:
                build_environment(one.rollout.environment).check()
    if rollout.agent is None:
        return
    find_agent(rollout.agent)
    if rollout.environment:
        raise ConfigError("rollout.agent and rollout.environment are both set; an episode has one of them")


def machines_here() -> str:
    """Returns which backends can start machines for episodes on this host, in a few words."""
    problems = {"bubblewrap": Bubblewrap().problem()}
    if find_spec("docker"):
        problems["docker"] = Docker().problem()
    working = [name for name, problem in problems.items() if not problem]
    return ", ".join(working) or f"none ({problems['bubblewrap']})"


def spec(config: RunConfig, place: Sequence[HostShare] = ()) -> ExecutorSpec:
    """Returns the specification of the executor that replies to turns or runs agents."""
    path, rollout, folder = config.model.path, config.rollout, "llamarl.parts.episodes.executors"
    common: dict[str, Any] = {"arguments": config.data.template_arguments, "today": config.data.date}
    if rollout.agent:
        target = f"{folder}.gateway:GatewayExecutor"
        return executor_spec("environment", target, 1, place=place, model_path=path, config=rollout, **common)
    own = {
        key: (one.rollout.environment, one.data.template_arguments)
        for key, source in config.data.by_key.items()
        for one in [config.of(source)]
        if one.rollout.environment and (source.environment or source.template_arguments is not None)
    }
    return executor_spec(
        "environment", f"{folder}.environment:EnvironmentExecutor", 1, place=place, model_path=path,
        config=rollout.environment, of_sources=own, **common,
    )  # fmt: skip
