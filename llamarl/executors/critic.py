"""The critic executor: values of what the policy sampled, and a value model that learns beside the trainer."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llamarl.checkpoint.folder import CRITIC
from llamarl.checkpoint.keeper import MirrorPlace
from llamarl.config import RunConfig, build
from llamarl.distributed.links import Rendezvous
from llamarl.executors.optimizing import OptimizingExecutor
from llamarl.models.scalar import open_scalar_model
from llamarl.training.critic import Critic
from llamarl.training.meter import device_seconds
from llamarl.training.packing import shaping
from llamarl.training.preflight import check_critic_layout
from llamarl.training.result import NonFiniteStep, StepResult
from llamarl.training.state import load_training_state, training_state
from llamarl.types import Prompt, Rollout


class CriticExecutor(OptimizingExecutor):
    """Learns a microbatch per call, and values new rollouts in between by the weights of the last finished step. The
    order of calls decides, not the time, so several ranks do the same.

    Without staleness a step is finished first, so that nothing depends on the order of calls either.
    """

    SPANS: ClassVar[dict[str, str]] = {
        "score": "score",
        "learn_on": "train",
        "save": "checkpoint",
        "commit": "checkpoint",
    }

    def __init__(
        self,
        config: RunConfig,
        checkpoint_folder: str,
        rendezvous: Rendezvous | None = None,
        mirror: MirrorPlace | None = None,
    ) -> None:
        """
        Args:
            checkpoint_folder: the run's, with a folder for the critic in it.
        """
        settings, folder = config.critic, Path(checkpoint_folder, CRITIC)
        # It saves before the trainer does, so its newest checkpoint may have no counterpart yet.
        saving = config.checkpoint.model_copy(update={"keep": config.checkpoint.keep + 1})
        timeout_s = config.cluster.start_timeout_s
        super().__init__("critic", settings, folder, saving, rendezvous, timeout_s, mirror=mirror)
        with self._mesh.together():
            model, weights = open_scalar_model(settings.path or config.model.path, new_head=True)
            if self._mesh.world.size > 1:
                sys.stdout.write(f"{check_critic_layout(model.shape, self._mesh, self._device)}\n")
            rate = settings.learning_rate_scale * config.trainer.learning_rate
            self._critic = Critic(
                model,
                config.trainer.model_copy(update={"learning_rate": rate}),
                clip=settings.clip,
                advantage=build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage"),
                shaping=shaping(config),
                mesh=self._mesh,
                device=self._device,
                read=weights.read,
            )
            self._built(self._critic)
        self._is_synchronous = config.rollout.max_staleness == 0
        self._learning = deque[tuple[int, Generator[None, None, StepResult]]]()
        """Steps under way, the oldest first."""
        self._learnt = dict[int, StepResult]()
        """Finished steps that nobody has asked for yet."""
        self._seconds = 0.0
        """Seconds of work on the oldest step."""

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[np.ndarray]]:
        """The value before each response token, float32 [T] per rollout of each group."""
        with self._mesh.together(NonFiniteStep):
            if self._is_synchronous:
                self._finish()
            return self._critic.values(groups)

    def learn(self, step: int, group_ids: Sequence[int]) -> None:
        """Prepares an optimizer step on these groups, which `learn_on` takes by and by."""
        self._learning.append((step, self._critic.learn(self._take(group_ids))))

    def learn_on(self, step: int) -> StepResult | None:
        """A microbatch more of the oldest step under way; what is to be logged of `step`, once that is done.

        Raises:
            NonFiniteStep: see `Critic.learn`.
        """
        if step not in self._learnt:
            with self._mesh.together(NonFiniteStep):
                self._advance()
        return self._learnt.pop(step, None)

    def _advance(self) -> None:
        step, pieces = self._learning[0]
        start_s = device_seconds(self._device)
        try:
            next(pieces)
        except StopIteration as end:
            self._learning.popleft()
            self._learnt[step] = end.value
            self._mirrored(self._critic)
        self._seconds += device_seconds(self._device) - start_s
        if step in self._learnt:
            self._learnt[step].metrics["critic_s"], self._seconds = self._seconds, 0.0

    def _finish(self) -> None:
        while self._learning:
            self._advance()

    def save(self, step: int) -> Future[dict[str, Any] | OSError]:
        """Finishes its step, copies what a checkpoint needs and writes it; after the answer comes `commit`."""
        with self._mesh.together(NonFiniteStep):
            self._finish()
        assert self._critic.policy_version == step, "critic and trainer take the same steps"
        return self._save(self._critic, training_state(self._critic))

    def resume(self, step: int) -> None:
        """Goes on from the checkpoint of this step, which the trainer has found to be whole."""
        with self._mesh.together():
            checkpoint = self._store.load(step)
            load_training_state(self._critic, checkpoint.shapes, checkpoint.read, checkpoint.state)

    def restore(self, newest: int) -> int:
        """Goes on from the newest state, up to step `newest`, that dead processes have left; which step that is."""
        return self._restore(self._critic, newest)
