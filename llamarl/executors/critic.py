"""The critic executor: values of what the policy sampled, and a value model that learns beside the trainer."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from llamarl.checkpoint.checkpoint import CheckpointError
from llamarl.checkpoint.store import CheckpointStore
from llamarl.cluster.executor import Executor
from llamarl.config import ConfigError, RunConfig, build
from llamarl.distributed.runtime import set_up_device
from llamarl.models.scalar import load_scalar_model
from llamarl.rollouts.pieces import joined
from llamarl.rollouts.shaping import shaping
from llamarl.training.critic import Critic
from llamarl.training.state import load_training_state, training_state
from llamarl.types import Prompt, Rollout, RolloutGroup

Learning = tuple[Generator[None, None, dict[str, float]], Future[dict[str, float]]]


class CriticExecutor(Executor):
    """Learns a microbatch at a time, and values new rollouts in between by the weights of the last finished step.

    Without staleness a step is finished first, so that nothing depends on time.
    """

    SPANS: ClassVar[dict[str, str]] = {"score": "score", "work": "train", "save": "checkpoint", "commit": "checkpoint"}

    def __init__(self, config: RunConfig, folder: str) -> None:
        """
        Args:
            folder: of its checkpoints.
        """
        settings = config.critic
        device = set_up_device(settings.device, settings.threads, "critic.device")
        path = settings.path or config.model.path
        self._critic = Critic(
            load_scalar_model(path, torch.float32, device, new_head=True),
            config.trainer.model_copy(
                update={"learning_rate": settings.learning_rate_scale * config.trainer.learning_rate}
            ),
            clip=settings.clip,
            advantage=build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage"),
            rewards=shaping(config).rewards,
        )
        self._is_synchronous = config.rollout.max_staleness == 0
        self._groups = dict[int, RolloutGroup]()
        self._learning = deque[Learning]()
        # It saves before the trainer does, so its newest checkpoint may have no counterpart yet.
        self._store = CheckpointStore(Path(folder), config.checkpoint.keep + 1)

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[np.ndarray]]:
        """The value before each response token, float32 [T] per rollout of each group."""
        if self._is_synchronous:
            self._finish()
        return self._critic.values(groups)

    def add_groups(self, groups: Iterable[RolloutGroup]) -> None:
        """Keeps scored groups, or consecutive pieces of them, for a later step."""
        for group in groups:
            self._groups[group.group_id] = joined(self._groups.get(group.group_id), group)

    def learn(self, group_ids: Sequence[int]) -> Future[dict[str, float]]:
        """One optimizer step on these groups, taken by and by; answers with what is to be logged."""
        done = Future[dict[str, float]]()
        groups = [self._groups.pop(group_id) for group_id in group_ids]
        self._learning.append((self._critic.learn(groups), done))
        return done

    def work(self) -> bool:
        """A microbatch of the step under way. Raises NonFiniteStep."""
        if not self._learning:
            return False
        step, done = self._learning[0]
        try:
            next(step)
        except StopIteration as end:
            self._learning.popleft()
            if done.set_running_or_notify_cancel():
                done.set_result(end.value)
        return True

    def _finish(self) -> None:
        while self.work():
            pass

    def save(self, step: int) -> Future[dict[str, Any] | OSError]:
        """Finishes its step, copies what a checkpoint needs and writes it; after the answer comes `commit`."""
        self._finish()
        assert self._critic.policy_version == step, "critic and trainer take the same steps"
        return self._store.save(step, self._critic.shards(), training_state(self._critic))

    def commit(self) -> Future[str] | None:
        """Makes what was saved last the newest checkpoint; its folder. Raises OSError when the disk is full."""
        return self._store.commit()

    def resume(self, step: int) -> None:
        """Goes on from the checkpoint that belongs to the trainer's of this step. Raises ConfigError."""
        try:
            checkpoint = self._store.load(step)
        except CheckpointError as error:
            raise ConfigError(
                f"--resume: the trainer goes on from step {step}, but the critic cannot: {error}; delete the trainer's "
                "checkpoint of that step to go on from an older one, or use --overwrite"
            ) from None
        load_training_state(self._critic, checkpoint.shapes, checkpoint.read, checkpoint.state)
