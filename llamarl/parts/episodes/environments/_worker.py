"""Worker process of an environment: one reply per item, JSON in and out. No torch."""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from llamarl.config import Ref, build
from llamarl.config.errors import ConfigError
from llamarl.parts.episodes.environments._base import Environment, RewardedReply, Task, Turn
from llamarl.rewards._base import MAX_REWARD
from llamarl.types import RewardResult, ToolCall

MAX_CHARS = 1 << 20
"""Maximum characters of an observation, independent of its tokens."""


def reply(item: dict[str, Any]) -> dict[str, Any]:
    """Returns the reply of the environment `item["environment"]` (JSON of its `Ref`) as one of `text`, `messages`,
    `reward`, `end`. The reward of the turn is beside its text or messages as `turn_reward`.

    An item with `is_over` asks `ended` instead. An item with `ended` only closes the state of that episode."""
    if "ended" in item:
        close(item["ended"])
        return {"end": True}
    environment, task, turns = opened(item)
    if item.get("is_over"):
        return as_end(environment.ended(task, turns))
    return as_item(environment.reply(task, turns))


def opened(item: dict[str, Any]) -> tuple[Environment, Task, list[Turn]]:
    """Returns the environment of an item, with the state of its episode, and the arguments of its `reply`."""
    task = Task(**item["task"])
    turns = [
        Turn(response=response, observation=observation, calls=tuple(ToolCall(**call) for call in calls))
        for response, observation, calls in item["turns"]
    ]
    environment = _environment(item["environment"])
    if environment.is_stateful:
        environment = _copy_of(
            environment, item["episode"], task, is_first=len(turns) == 1, is_over=item.get("is_over", False)
        )
    return environment, task, turns


def as_item(said: Any) -> dict[str, Any]:
    """Returns what an environment replied as JSON. Raises TypeError or ValueError if it is no reply."""
    if isinstance(said, RewardedReply):
        item = as_item(said.reply)
        if not item.keys() & {"text", "messages"}:
            raise TypeError(
                f"a RewardedReply has text or messages, and this one {said.reply!r:.100}; return the last reward alone"
            )
        if not (isinstance(said.reward, int | float) and abs(said.reward) <= MAX_REWARD):
            raise ValueError(f"the reward of a turn is {said.reward!r}, and not a number of at most {MAX_REWARD:g}")
        return item | {"turn_reward": float(said.reward)}
    if said is None:
        return {"end": True}
    if isinstance(said, str):
        if len(said) > MAX_CHARS:
            raise ValueError(f"an observation of {len(said):,} characters, more than {MAX_CHARS:,}")
        return {"text": said}
    if isinstance(said, RewardResult):
        return {"reward": asdict(said)}
    if isinstance(said, list) and all(isinstance(one, dict) and "role" in one for one in said):
        return {"messages": said}
    raise TypeError(f"it replied {said!r:.100}, which is not text, a list of messages, a RewardResult or None")


def as_end(said: Any) -> dict[str, Any]:
    """Returns what `ended` returned as JSON. Raises TypeError if it is neither a RewardResult nor None."""
    if said is not None and not isinstance(said, RewardResult):
        raise TypeError(f"`ended` returned {said!r:.100}, which is not a RewardResult or None")
    return as_item(said)


_copies = dict[str, Environment]()
"""Environments of episodes with state, by episode name."""


def _copy_of(environment: Environment, episode: str, task: Task, *, is_first: bool, is_over: bool) -> Environment:
    if is_first and not (is_over and episode in _copies):
        close(episode)  # a repeated request
        opened = copy(environment)
        opened.open(task)
        _copies[episode] = opened
    if episode not in _copies:
        raise LookupError("the worker that had the state of this episode has died")
    return _copies[episode]


def close(episode: str) -> None:
    """Closes the state of an episode, if there is one."""
    if (environment := _copies.pop(episode, None)) is not None:
        environment.close()


def close_all() -> None:
    """Closes the states of all episodes. One that raises keeps no other open."""
    for episode in list(_copies):
        with suppress(Exception):
            close(episode)


@lru_cache(maxsize=1)
def _environment(ref: str) -> Environment:
    return build_environment(Ref.model_validate_json(ref))


def build_environment(ref: Ref) -> Environment:
    """Returns the environment. Raises ConfigError."""
    found = build(ref, "llamarl.parts.episodes.environments", "rollout.environment")
    if not isinstance(found, Environment):
        raise ConfigError(
            f"`rollout.environment = {ref.name!r}` is not an environment; derive it from "
            "llamarl.parts.episodes.environments.Environment"
        )
    return found
