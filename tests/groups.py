"""Scored groups with tokens that can be told apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from llamarl.types import FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup

MakeGroup = Callable[..., RolloutGroup]


@pytest.fixture(scope="session")
def make_group() -> MakeGroup:
    def make(
        group_id: int = 0,
        prompt: Sequence[int] = (1, 2, 3),
        responses: Sequence[Sequence[int]] = ((4, 5), (6,)),
        outcomes: Sequence[Outcome] | None = None,
        finish: Sequence[FinishReason] | None = None,
    ) -> RolloutGroup:
        outcomes = outcomes or [Outcome.SCORE] * len(responses)
        finish = finish or [FinishReason.STOP] * len(responses)
        rollouts = tuple(
            Rollout(
                group_id=group_id,
                index=index,
                columns={
                    "token_ids": np.array(tokens, np.int32),
                    "behavior_logprobs": np.array(
                        [-(group_id + index / 64 + t / 4096) for t in range(len(tokens))], np.float32
                    ),
                    "policy_versions": np.array([group_id + t // 2 for t in range(len(tokens))], np.int32),
                },
                # A name for every token: group, rollout and position.
                finish_reason=reason,
            )
            for index, (tokens, reason) in enumerate(zip(responses, finish, strict=True))
        )
        return RolloutGroup(
            group_id=group_id,
            prompt=Prompt(prompt_id=f"p-{group_id}", text="ab", token_ids_T=np.array(prompt, np.int32), answer="42"),
            rollouts=rollouts,
            results=tuple(RewardResult(outcome=outcome, value=float(index)) for index, outcome in enumerate(outcomes)),
            responses=tuple(f"response {index}" for index in range(len(rollouts))),
        )

    return make
