"""What controller and gateway tell each other. No torch."""

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
    """How often it was begun before, by gateways that died."""


class AgentCall(NamedTuple):
    """What an agent asks the policy."""

    group_id: int
    index: int
    request: GenerationRequest
    """Under a group id of its own; each sequence of an episode has one."""


class AgentEnd(NamedTuple):
    """An episode is over."""

    rollout: Rollout
    result: RewardResult | None
    """Its reward, or why it is INVALID; None: `[reward]` judges it."""


class AgentNews(NamedTuple):
    """What agents have done since the last one."""

    calls: list[AgentCall]
    ends: list[AgentEnd]
