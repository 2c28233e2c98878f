"""The executor of supervised training: optimizer steps on documents, and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from llamarl.config import RunConfig
from llamarl.distributed.links import Rendezvous
from llamarl.executors.trainer import OptimizingExecutor
from llamarl.parts.sft.supervised import Supervised
from llamarl.training.meter import device_seconds, peak_flops, rates
from llamarl.training.result import NonFiniteStep, StepResult
from llamarl.training.state import training_state
from llamarl.types import SampleGroup

KIND = "documents"
"""Key of the document order in the state of a checkpoint."""


class SftExecutor(OptimizingExecutor):
    """Trains on documents, which come with each step because they are small compared with the weights."""

    SPANS: ClassVar[dict[str, str]] = {"step": "train", "save": "checkpoint", "commit": "checkpoint"}

    def __init__(
        self, config: RunConfig, checkpoint_folder: str, resume: bool, rendezvous: Rendezvous | None = None
    ) -> None:
        settings, timeout_s = config.trainer, config.cluster.timeout_s
        super().__init__("trainer", settings, Path(checkpoint_folder), config.checkpoint, rendezvous, timeout_s)
        self._resumed: tuple[dict[str, int] | None, list[str]] = (None, [])
        with self._mesh.together():
            model, read = self._open_policy(config)
            self._supervised = Supervised(model, settings, self._mesh, self._device, read)
            if resume:
                self._resumed = self._resume(self._supervised, KIND)
        self._peak_flops = self._mesh.world.size * peak_flops(settings, self._device)
        self._order: dict[str, int] | None = self._resumed[0]
        """Order of the next documents."""

    def resumed(self) -> tuple[dict[str, int] | None, list[str]]:
        """Returns the document order of the resumed checkpoint (None means a new run), and descriptions of damaged
        checkpoints."""
        return self._resumed

    def step(self, documents: Sequence[SampleGroup], order: dict[str, int]) -> StepResult:
        """Runs one optimizer step on these documents and stores `order` for the next one. Raises NonFiniteStep."""
        start_s = device_seconds(self._device)
        with self._mesh.together(NonFiniteStep):
            result = self._supervised.step(documents)
        self._order = order
        result.metrics["train_s"] = train_s = device_seconds(self._device) - start_s
        result.metrics.update(rates(result.metrics, train_s, self._peak_flops))
        return result

    def save(self) -> Future[dict[str, Any] | OSError]:
        """Copies the state of a checkpoint and writes it. The caller calls `commit` after the result."""
        return self._save(self._supervised, training_state(self._supervised) | {KIND: self._order})
