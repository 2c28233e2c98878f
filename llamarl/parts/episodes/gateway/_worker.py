"""Worker process of agents: concurrent episodes, one JSON line each, in and out. No torch."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from numbers import Real
from typing import Any

from llamarl.config import ConfigError, Ref, build
from llamarl.config.errors import did_you_mean, one_of
from llamarl.config.ref import find, members
from llamarl.config.roles import AgentConfig
from llamarl.parts.episodes.environments._base import Task
from llamarl.parts.episodes.line_worker import limit_this_process, serve
from llamarl.parts.episodes.programs._base import Program
from llamarl.types import RewardResult

MAX_REASON_CHARS = 1000
PROGRAMS = "llamarl.parts.episodes.programs"
Agent = Callable[[Task, str, str], Awaitable[Any]]


def find_agent(config: AgentConfig) -> Agent:
    """Returns the agent: a function of the user, or the method of an agent that comes with llamarl. Raises
    ConfigError."""
    name = config.name
    if ":" not in name:
        if name not in (known := members(PROGRAMS)):
            hint = did_you_mean(name, known, f"name a function as `package.module:run`, or {one_of(known)}")
            raise ConfigError(f"rollout.agent = {name!r} is not of the form `package.module:run`; {hint}")
        program: Program = build(Ref(name=name, **config.options), PROGRAMS, "rollout.agent")
        program.check()
        return program.run
    agent = find(name, "", "rollout.agent", "")
    if not asyncio.iscoroutinefunction(agent):
        raise ConfigError(f"rollout.agent = {name!r} must be `async def run(task, base_url, api_key)`")
    return agent


async def _result(agent: Agent, item: dict[str, Any]) -> dict[str, Any]:
    limit = asyncio.timeout(item["episode_s"])
    try:
        async with limit:
            said = await agent(Task(**item["task"]), item["base_url"], item["api_key"])
    except Exception as error:  # an agent's exception ends its episode
        if limit.expired():
            return {"error": f"the agent took over {item['episode_s']:g} s (rollout.agent.episode_s)"}
        return {"error": f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]}
    if said is None:
        return {}
    if isinstance(said, RewardResult):
        return {"result": asdict(said)}
    if isinstance(said, Real) and math.isfinite(said):
        return {"reward": float(said)}
    return {"error": f"the agent gave {said!r:.200}, which is not a finite number, a RewardResult or None"}


if __name__ == "__main__":
    limit_this_process(int(sys.argv[1]), int(sys.argv[2]))
    asyncio.run(serve(partial(_result, find_agent(AgentConfig.model_validate_json(sys.argv[3])))))
