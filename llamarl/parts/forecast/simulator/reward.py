"""The simulated reward executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from llamarl.controller.ports import Responses
from llamarl.executors.replies import ScoredResponse
from llamarl.parts.forecast.simulator.draws import SCORES, keyed
from llamarl.parts.forecast.simulator.handles import SimulatedHandle, World
from llamarl.types import Outcome, RewardResult, Rollout


class SimulatedReward(SimulatedHandle):
    """Scores the responses of a call on a number of workers. Some responses never get a result."""

    SPANS: ClassVar[dict[str, str]] = {"score": "score"}

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, world)
        self._timeout_share = world.faults.reward_timeout_share
        self._invalid = RewardResult(
            outcome=Outcome.INVALID, value=0.0, reason=f"grader timed out after {self._costs.score_timeout_s:g} s"
        )
        self._right = RewardResult(outcome=Outcome.SCORE, value=1.0)
        self._wrong = RewardResult(outcome=Outcome.WRONG, value=0.0)

    def do_score(self, groups: Responses) -> tuple[float, Any]:
        answers, busy_s, longest_s = list[list[ScoredResponse]](), 0.0, 0.0
        for _, rollouts in groups:
            scored, seconds = self._score(rollouts)
            answers.append(scored)
            busy_s += float(seconds.sum())
            longest_s = max(longest_s, float(seconds.max()))
        return max(longest_s, busy_s / self._costs.score_workers), answers

    def _score(self, rollouts: Sequence[Rollout]) -> tuple[list[ScoredResponse], np.ndarray]:
        random = keyed(self._world.config.seed, SCORES, rollouts[0].group_id)
        fates = random.random(len(rollouts))
        seconds = self._costs.score_s * random.standard_exponential(len(rollouts))
        late = fates < self._timeout_share
        seconds[late] = self._costs.score_timeout_s
        rewards = self._world.lengths.rewards(rollouts[0].group_id, len(rollouts))
        if rewards is None:
            rewards = (fates > (1 + self._timeout_share) / 2).astype(float).tolist()
        results = [
            self._invalid if timed_out else self._judged(reward)
            for timed_out, reward in zip(late.tolist(), rewards, strict=True)
        ]
        return [ScoredResponse(response="", result=result) for result in results], seconds

    def _judged(self, reward: float) -> RewardResult:
        if reward in (0.0, 1.0):  # by far the most, and there are millions
            return self._right if reward else self._wrong
        return RewardResult(outcome=Outcome.SCORE, value=reward)
