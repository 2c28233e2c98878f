"""`AgentEpisode`: maps an agent's calls to requests, and the agent's result to a reward.

A call continues the KV cache of its sequence: it is the next turn of the rollout with the sequence's id.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from llamarl.parts.episodes.gateway.protocol import CallRefused, OutOfTokens
from llamarl.parts.episodes.gateway.session import Session
from llamarl.rewards._base import invalid, sound
from llamarl.types import FinishReason, GenerationRequest, Outcome, RewardResult, Rollout, SamplingParams


@dataclass(kw_only=True, slots=True)
class AgentEpisode:
    name: str
    """Determines the sampling noise and the request ids. Unique within a run."""
    sampling: SamplingParams
    segment_tokens: int
    session: Session = field(default_factory=Session)
    asked: list[int] = field(default_factory=list)
    """Ids of the requests."""
    reason: FinishReason = FinishReason.STOP
    """Finish reason of the last answer."""
    _sequences: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    """Request id and first prompt of each sequence of the session."""

    def request(self, prompt_T: np.ndarray, sampling: SamplingParams, busy: Container[int]) -> GenerationRequest:
        """Returns the generation request of a call. `busy`: ids of unfinished requests. Raises CallRefused."""
        number, before = self.session.fitting(prompt_T)
        request_id, first_T = self._sequences.get(number, (0, prompt_T))
        if not request_id or request_id in busy:
            digest = xxhash.xxh3_64_intdigest(f"{self.name}/{len(self.asked)}".encode())
            request_id, first_T = digest >> 2 | 1 << 61, prompt_T
            self.asked.append(request_id)
        columns = {name: values_T[len(first_T) :] for name, values_T in before.items()}
        start = replace(Rollout.empty(request_id, 0), columns=columns)
        total = min(start.num_tokens + sampling.max_new_tokens, self.sampling.max_new_tokens)
        if total <= start.num_tokens:
            raise OutOfTokens(f"this conversation has its {total} tokens (rollout.max_new_tokens)")
        return GenerationRequest(
            group_id=request_id, prompt_token_ids_T=first_T, group_size=1,
            sampling=replace(sampling, max_new_tokens=total), segment_tokens=self.segment_tokens,
            partials=(start,) if start.num_tokens else (), has_turns=True,
        )  # fmt: skip

    def answered(self, request: GenerationRequest, prompt_T: np.ndarray, rollout: Rollout) -> Rollout:
        """Returns the tokens that were sampled for this call, without earlier ones. Raises CallRefused."""
        before = request.starts()[0].num_tokens
        if rollout.num_tokens <= before:
            raise CallRefused(400, rollout.error) if rollout.error else OutOfTokens("the context is full")
        self.reason = rollout.finish_reason
        number, _ = self.session.fitting(prompt_T)
        self._sequences.setdefault(number, (request.group_id, request.prompt_token_ids_T))
        columns, prompt_routes = {name: values_T[before:] for name, values_T in rollout.columns.items()}, None
        if rollout.prompt_routes is not None and "routes" in rollout.columns:
            prompt_routes = np.concatenate((rollout.prompt_routes, rollout.columns["routes"][:before]))
        return replace(rollout, columns=columns, prompt_routes=prompt_routes)

    def result(self, said: dict[str, Any]) -> RewardResult | None:
        """Returns the reward in the agent worker's result. None means that the run's reward scores the episode, also if
        the agent gave up because the policy had no tokens left."""
        if "error" in said and not (self.session.is_full and self.session.num_calls):
            return invalid(said["error"])
        result: RewardResult | None = None
        if "reward" in said:
            result = sound(RewardResult(outcome=Outcome.SCORE, value=said["reward"]))
        elif "result" in said:
            result = sound(RewardResult(**said["result"] | {"outcome": Outcome(said["result"]["outcome"])}))
        if not self.session.num_calls and (result is None or result.outcome is not Outcome.INVALID):
            return invalid("the agent got no answer of the policy")
        return result
