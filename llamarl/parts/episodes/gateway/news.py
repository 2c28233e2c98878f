"""Messages between controller and gateway. No torch."""

from __future__ import annotations

from typing import NamedTuple

from llamarl.types import GenerationRequest, Prompt, RewardResult, Rollout, SamplingParams


class AgentTask(NamedTuple):
    """An episode for an agent to start."""

    group_id: int
    index: int
    prompt: Prompt
    sampling: SamplingParams
    attempt: int
    """Number of earlier starts of this episode, on gateways that died."""


class AgentCall(NamedTuple):
    """A call of an agent to the policy."""

    group_id: int
    index: int
    request: GenerationRequest
    """Request with a separate group id for each sequence of an episode."""


class AgentEnd(NamedTuple):
    """An ended episode."""

    rollout: Rollout
    result: RewardResult | None
    """Reward of the episode, or why it is INVALID. None means that `[reward]` scores it."""


class AgentNews(NamedTuple):
    """Calls of agents and ended episodes since the last news."""

    calls: list[AgentCall]
    ends: list[AgentEnd]
