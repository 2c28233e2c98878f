"""The reward executor: decodes responses and scores them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, ClassVar

from llamarl.cluster.executor import Executor
from llamarl.config.schema import RewardConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.executors.replies import ScoredResponse
from llamarl.rewards._base import invalid
from llamarl.rewards._build import build_reward
from llamarl.types import Prompt, RewardItem, RewardResult, Rollout

MAX_REASON_CHARS = 1000
"""Every result travels and is recorded."""


class RewardExecutor(Executor):
    """Rule-based rewards on the CPU; graders that can hang run in workers of their own."""

    SPANS: ClassVar[dict[str, str]] = {"score": "score"}

    def __init__(self, model_path: str, config: RewardConfig) -> None:
        self._tokenizer = Tokenizer(model_path)
        self._reward = build_reward(config)

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[ScoredResponse]]:
        """One list per group, one entry per rollout."""
        responses = [[self._tokenizer.decode(rollout.token_ids_T) for rollout in rollouts] for _, rollouts in groups]
        items = [
            RewardItem(prompt=prompt.text, response=response, answer=prompt.answer, metadata=prompt.metadata)
            for (prompt, _), texts in zip(groups, responses, strict=True)
            for response in texts
        ]
        results = iter(checked(self._reward.score(items), len(items)))
        return [[ScoredResponse(response=response, result=next(results)) for response in texts] for texts in responses]

    def close(self) -> None:
        self._reward.close()


def checked(results: Sequence[Any], num_items: int) -> list[RewardResult]:
    """Results that a reward answered; an answer that is none, as a user's own reward may give, judges nothing."""
    if not isinstance(results, Sequence) or len(results) != num_items:
        number = f"{len(results)} results" if isinstance(results, Sequence) else f"a {type(results).__name__}"
        return [invalid(f"the reward gave {number} for {num_items} responses")] * num_items
    return [
        replace(result, reason=result.reason[:MAX_REASON_CHARS])
        if isinstance(result, RewardResult) and isinstance(result.value, Real) and math.isfinite(result.value)
        else invalid(f"the reward gave {result!r:.200}, which is no result with a finite value")
        for result in results
    ]
