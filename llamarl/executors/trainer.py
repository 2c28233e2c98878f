"""The trainer executor: collects scored groups, takes optimizer steps, publishes and saves weights."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from llamarl.checkpoint.store import CheckpointStore
from llamarl.cluster.executor import Executor
from llamarl.config import RunConfig, build
from llamarl.distributed.runtime import set_up_device
from llamarl.models.hf import load_model
from llamarl.rollouts.pieces import joined
from llamarl.training.result import StepResult
from llamarl.training.state import load_training_state, training_state
from llamarl.training.trainer import Trainer
from llamarl.types import RolloutGroup
from llamarl.weight_sync.layout import SegmentAddress, TensorSpec
from llamarl.weight_sync.shared_memory import SharedMemoryPublisher


class TrainerExecutor(Executor):
    """Groups arrive as they are scored, so a step only needs their names."""

    SPANS: ClassVar[dict[str, str]] = {"step": "train", "publish": "weight_sync", "save": "checkpoint"}

    def __init__(self, config: RunConfig, checkpoint_folder: str, resume: bool) -> None:
        settings = config.trainer
        device = set_up_device(settings.device, settings.threads, "trainer.device")
        torch.manual_seed(config.seed)
        self._trainer = Trainer(
            load_model(config.model.path, torch.float32, device),
            settings,
            loss=build(settings.loss, "llamarl.algorithms.losses", "trainer.loss"),
            advantage=build(settings.advantage, "llamarl.algorithms.advantages", "trainer.advantage"),
            temperature=config.rollout.temperature,
        )
        self._weights = dict(self._trainer.model.named_parameters())
        self._groups = dict[int, RolloutGroup]()
        self._background_s = 0.0
        """Processor seconds outside this thread by the last step: messages."""
        self._publisher: SharedMemoryPublisher | None = None
        self._store = CheckpointStore(Path(checkpoint_folder), config.checkpoint.keep)
        self._resumed: dict[str, Any] | None = None
        self._damaged = list[str]()
        if resume:
            self._resume()

    def _resume(self) -> None:
        checkpoint, self._damaged = self._store.load_newest()
        if checkpoint is not None:
            load_training_state(self._trainer, checkpoint.tensors, checkpoint.state)
            self._resumed = checkpoint.state

    def resumed(self) -> tuple[dict[str, Any] | None, list[str]]:
        """The controller's state in the checkpoint that was resumed (None: fresh), and what was found damaged."""
        return self._resumed, self._damaged

    def add_groups(self, groups: Iterable[RolloutGroup]) -> None:
        """Keeps scored groups, or consecutive pieces of them, for a later step."""
        for group in groups:
            self._groups[group.group_id] = joined(self._groups.get(group.group_id), group)

    def step(self, group_ids: Sequence[int]) -> StepResult:
        """One optimizer step on these groups. Raises NonFiniteStep."""
        clock = time.thread_time if self._trainer.device.type == "cpu" else time.monotonic
        start_s = clock()
        result = self._trainer.step([self._groups.pop(group_id) for group_id in group_ids])
        result.metrics["train_s"] = clock() - start_s
        background_s = time.process_time() - time.thread_time()
        result.metrics["trainer_background_s"] = background_s - self._background_s
        self._background_s = background_s
        return result

    def publish(self, version: int, specs: tuple[TensorSpec, ...]) -> SegmentAddress:
        """Makes the current weights available as `version`, in the generators' types."""
        if self._publisher is None:
            self._publisher = SharedMemoryPublisher(specs)
        self._publisher.publish(version, self._weights)
        return self._publisher.address

    def save(self, controller_state: dict[str, Any]) -> str:
        """Writes a checkpoint and returns its folder. Raises OSError when the disk is full."""
        tensors, state = training_state(self._trainer)
        state["controller"] = controller_state
        return str(self._store.save(self._trainer.policy_version, tensors, state))
