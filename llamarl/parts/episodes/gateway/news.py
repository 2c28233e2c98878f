"""Messages between controller and gateway. No torch."""

from __future__ import annotations

from typing import NamedTuple

from llamarl.types import GenerationRequest, Prompt, RewardResult, Rollout, SamplingParams


class AgentTask(NamedTuple):
    """An episode that an agent is to begin."""

    group_id: int
    index: int
    prompt: Prompt
    sampling: SamplingParams
    attempt: int
    """Number of earlier beginnings of this episode, by gateways that died."""


class AgentCall(NamedTuple):
    """A call of an agent to the policy."""

    group_id: int
    index: int
    request: GenerationRequest
    """Request under a group id of its own; each sequence of an episode has one."""


class AgentEnd(NamedTuple):
    """An episode is over."""

    rollout: Rollout
    result: RewardResult | None
    """Reward of the episode, or why it is INVALID; None: `[reward]` judges it."""


class AgentNews(NamedTuple):
    """Calls that agents have made, and episodes that have ended, since the last news."""

    calls: list[AgentCall]
    ends: list[AgentEnd]
