"""The joint of episodes: the controller's `Turns`, the executor behind them, and the checks before a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamarl.cluster.api import ExecutorSpec, HostShare
from llamarl.config import ConfigError, RunConfig
from llamarl.parts.episodes.environments._worker import build_environment
from llamarl.parts.episodes.episodes import open_turns
from llamarl.parts.episodes.gateway._worker import find_agent
from llamarl.parts.episodes.machines.bubblewrap import Bubblewrap
from llamarl.run.executors import executor_spec
from llamarl.run.placement import models_in_use
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
    if "critic" in models_in_use(config):
        raise ConfigError(
            "rollout.agent with a critic: an agent's episode is several sequences, and which token's value follows "
            "which is not known; leave the agent out, or choose advantages without a critic"
        )


def machines_here() -> str:
    """Returns whether this host can start machines for episodes, in a few words."""
    problem = Bubblewrap().problem()
    return f"none ({problem})" if problem else "bubblewrap"


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
