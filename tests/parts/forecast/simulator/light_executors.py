"""Executors that only count, for processes of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from llamarl.cluster.executor import Executor
from llamarl.executors.replies import Adoption, Collected, GeneratorStats, Published, ScoredResponse
from llamarl.observability.metrics import UpdateMetrics
from llamarl.training.result import PolicyStepResult
from llamarl.types import FinishReason, GenerationRequest, Outcome, Prompt, RewardResult, Rollout, RolloutGroup


class LightGenerator(Executor):
    """Finishes one rollout every few milliseconds."""

    def __init__(self, rollout_s: float) -> None:
        self._rollout_s = rollout_s
        self._waiting = list[tuple[int, int, int]]()
        """Oldest version that may serve each, group and index."""
        self._finished = list[Rollout]()
        self._reply: Future[Collected] | None = None
        self._version = -1

    def weight_specs(self) -> tuple[()]:
        return ()

    def adopt(self, version: int, address: str) -> Adoption:
        assert address == f"weights of {version}"
        self._version = version
        return Adoption(version=version)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        assert self._version >= 0, "a request came before the weights"
        for request in requests:
            self._waiting += [(request.from_version, request.group_id, one.index) for one in request.starts()]
        self._waiting.sort()

    def collect(self, num_wanted: int) -> Future[Collected]:
        self._reply = reply = Future[Collected]()
        self._hand_over()
        return reply

    def work(self) -> bool:
        if not self._waiting or self._waiting[0][0] > self._version:
            return False
        time.sleep(self._rollout_s)
        _, group_id, index = self._waiting.pop(0)
        self._finished.append(
            Rollout(
                group_id=group_id,
                index=index,
                columns={
                    "token_ids": np.array([group_id, index], np.int32),
                    "behavior_logprobs": np.zeros(2, np.float32),
                    "policy_versions": np.full(2, self._version, np.int32),
                },
                finish_reason=FinishReason.STOP,
            )
        )
        self._hand_over()
        return True

    def _hand_over(self) -> None:
        if self._reply is not None and self._finished:
            reply, self._reply = self._reply, None
            if reply.set_running_or_notify_cancel():
                rollouts, self._finished = self._finished, []
                reply.set_result(Collected(rollouts=rollouts, stats=GeneratorStats(num_waiting=len(self._waiting))))


class LightReward(Executor):
    """Everything is right."""

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[ScoredResponse]]:
        right = RewardResult(outcome=Outcome.SCORE, value=1.0)
        return [[ScoredResponse(response="", result=right) for _ in rollouts] for _, rollouts in groups]


class LightTrainer(Executor):
    """Counts steps."""

    def __init__(self) -> None:
        self._groups = dict[int, RolloutGroup]()
        self._version = 0

    def add_groups(self, groups: Sequence[RolloutGroup]) -> None:
        self._groups.update((group.group_id, group) for group in groups)

    def step(self, group_ids: Sequence[int], groups: Sequence[RolloutGroup]) -> PolicyStepResult:
        time.sleep(0.02)
        self.add_groups(groups)
        taken = [self._groups.pop(group_id) for group_id in group_ids]
        self._version += 1
        return PolicyStepResult(
            policy_version=self._version,
            skipped=False,
            update=UpdateMetrics(num_loss_tokens=2 * sum(len(group.rollouts) for group in taken)),
            advantages={group.group_id: np.zeros(len(group.rollouts)) for group in taken},
        )

    def set_layout(self, rank: int, specs: tuple[()]) -> None:
        assert (rank, specs) == (0, ())

    def publish(self, version: int, in_use: tuple[int, ...]) -> Published:
        return Published(version=version, addresses={"": f"weights of {version}"})
