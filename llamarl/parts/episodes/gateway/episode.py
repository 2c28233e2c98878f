"""`AgentEpisode`: the requests that an agent's calls become, and what it was worth.

A call goes on with what its sequence has computed: it is the next turn of the rollout whose id that sequence has.

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
    """Decides the noise, and the ids of its requests; no two of a run have the same."""
    sampling: SamplingParams
    segment_tokens: int
    session: Session = field(default_factory=Session)
    asked: list[int] = field(default_factory=list)
    """Ids of its requests."""
    reason: FinishReason = FinishReason.STOP
    """Reason why the last answer ended."""
    _sequences: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    """Id and first prompt of the requests of each sequence of the session."""

    def request(self, prompt_T: np.ndarray, sampling: SamplingParams, busy: Container[int]) -> GenerationRequest:
        """Request for generators that a call comes to. `busy`: ids of requests under way. Raises CallRefused."""
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
        """Tokens that were sampled for this call, without those before. Raises CallRefused."""
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
        """Reward in what the agent's worker said; None: the reward of the run judges, also what an agent left when it
        gave up because the policy had no tokens left: that was the policy's doing."""
        if "error" in said and not (self.session.is_full and self.session.num_calls):
            return invalid(said["error"])
        if not self.session.num_calls:
            return invalid("the agent got no answer of the policy")
        if "reward" in said:
            return sound(RewardResult(outcome=Outcome.SCORE, value=said["reward"]))
        if "result" in said:
            return sound(RewardResult(**said["result"] | {"outcome": Outcome(said["result"]["outcome"])}))
        return None
