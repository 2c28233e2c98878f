"""The reference executor: a frozen model's log-probabilities of what the policy sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from llamarl.cluster.api import Executor
from llamarl.config import RunConfig
from llamarl.distributed.mesh import set_up_device
from llamarl.generation.model import load_generator_model
from llamarl.generation.sampler import logprobs_of
from llamarl.training.packing import Microbatch
from llamarl.training.responses import hidden_of, per_response
from llamarl.types import Prompt, Rollout


class ReferenceExecutor(Executor):
    """The policy as it was before the first step, or another model with its tokens; it never changes, so a resumed run
    has the same one."""

    SPANS: ClassVar[dict[str, str]] = {"score": "score"}

    def __init__(self, config: RunConfig) -> None:
        settings = config.reference
        self._device = set_up_device(settings.device, settings.threads, "reference.device")
        self._model = load_generator_model(
            settings.path or config.model.path, settings.dtype, self._device, tokens_of=config.model.path
        )
        self._max_tokens = config.trainer.microbatch_tokens
        self._temperature = config.rollout.temperature

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[np.ndarray]]:
        """Log-probability of each response token at the sampling temperature, float32 [T] per rollout of each group."""
        return per_response(groups, self._max_tokens, lambda microbatches: map(self._logprobs, microbatches))

    @torch.inference_mode()
    def _logprobs(self, microbatch: Microbatch) -> np.ndarray:
        hidden_R_D = hidden_of(self._model, microbatch, self._device)
        targets_R = torch.from_numpy(microbatch.targets_R).to(self._device, non_blocking=True)
        return logprobs_of(self._model, hidden_R_D, targets_R, self._temperature).cpu().numpy()
