"""`Critic`: a value model that predicts returns and learns from them, one step per step of the trainer.

Shape suffixes: N positions of one microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from llamarl.algorithms.advantages._base import GroupRewards, ValueAdvantage
from llamarl.config.schema import TrainerConfig
from llamarl.distributed.mesh import ALONE
from llamarl.models.scalar import ScalarModel
from llamarl.rollouts.packing import Microbatch, pack, to_sample_group
from llamarl.training.compute import set_compute
from llamarl.training.health import NonFiniteStep
from llamarl.training.meter import device_seconds
from llamarl.training.optimizer import build_optimizer, set_learning_rate
from llamarl.training.parallel import Sharding, held_tensors
from llamarl.training.responses import hidden_of, per_response
from llamarl.types import Prompt, Rollout, RolloutGroup, TrainBatch
from llamarl.weight_sync.layout import TensorSpec


def value_losses(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2 per token (PPO's code-level value clipping,
    arXiv 2005.12729, section 3): no reward for moving further than `clip` from the old value."""
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    return torch.maximum((values_N - returns_N).square(), (clipped_N - returns_N).square()) / 2


class Critic:
    """A model in training; `values` may be asked for while `learn` is under way."""

    def __init__(
        self,
        model: ScalarModel,
        config: TrainerConfig,
        clip: float,
        advantage: ValueAdvantage,
        rewards: Callable[[RolloutGroup], GroupRewards],
    ) -> None:
        """
        Args:
            config: of its optimizer and its batches.
            clip: how far a value may move in one step.
            advantage: says what the returns are.
            rewards: what the tokens of a group have earned, as the trainer sees it.
        """
        self.model = model
        self.config = config
        set_compute(model, config)
        self.mesh = ALONE
        weights: dict[str, Tensor] = dict(model.named_parameters())
        specs = {name: TensorSpec.whole(name, tuple(weight.shape), "float32") for name, weight in weights.items()}
        self.sharding = Sharding(weights, specs, self.mesh, is_tied=False)
        self.optimizer = build_optimizer(weights.values(), config)
        self.policy_version = 0
        """Completed steps."""
        self._clip = clip
        self._advantage = advantage
        self._rewards = rewards
        self._device = next(model.parameters()).device
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)

    def values(self, groups: Iterable[tuple[Prompt, Sequence[Rollout]]]) -> list[list[np.ndarray]]:
        """Float32 [T] per rollout: what is expected of each token and those after it, before it is known."""
        return per_response(groups, self.config.microbatch_tokens, self._values)

    def learn(self, groups: Sequence[RolloutGroup]) -> Generator[None, None, dict[str, float]]:
        """As many passes over the groups' returns as the trainer makes, a microbatch at a time; returns what is to be
        logged.

        Raises:
            NonFiniteStep: loss or gradient is NaN or infinite, and the policy is to stop.
        """
        rewards = [self._rewards(group) for group in groups]
        estimates = self._advantage.estimate(rewards)
        samples = [
            to_sample_group(group, one, earned.valid_G)
            for group, one, earned in zip(groups, estimates, rewards, strict=True)
        ]
        count = max(TrainBatch(groups=tuple(samples)).num_loss_tokens, 1)
        set_learning_rate(self.optimizer, self.policy_version, self.config)
        microbatches = pack(samples, self.config.microbatch_tokens)
        loss, grad_norm, seconds, finite = 0.0, 0.0, 0.0, True
        for _ in range(self.config.passes):
            for microbatch in microbatches:
                start_s = device_seconds(self._device)
                mean = self._loss(microbatch) / count
                mean.backward()
                loss += float(mean.detach()) / self.config.passes
                seconds += device_seconds(self._device) - start_s
                yield
            grad_norm = self.sharding.clip_gradients(self.config.max_grad_norm)
            finite = finite and math.isfinite(grad_norm) and math.isfinite(loss)
            if finite:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
        if not finite and self.config.on_nonfinite == "stop":
            raise NonFiniteStep(
                f"critic step {self.policy_version}: loss {loss}, gradient norm {grad_norm};"
                " lower critic.learning_rate_scale, or set trainer.on_nonfinite = 'skip'"
            )
        self.policy_version += 1
        return {
            "value_loss": loss,
            "critic_grad_norm": grad_norm,
            "explained_variance": _explained(microbatches) if finite else 0.0,
            "critic_skipped": float(not finite),
            "critic_s": seconds,
        }

    def shards(self) -> dict[str, tuple[TensorSpec, Tensor]]:
        """See `Trainer.shards`."""
        return held_tensors(self.sharding, self.optimizer)

    def _loss(self, microbatch: Microbatch) -> Tensor:
        """Sum over the tokens."""
        old_N = torch.from_numpy(microbatch.values_R).to(self._device)
        returns_N = old_N + torch.from_numpy(microbatch.advantages_R).to(self._device)
        return value_losses(self._values(microbatch), old_N, returns_N, self._clip).sum()

    def _values(self, microbatch: Microbatch) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            hidden_N_D = hidden_of(self.model, microbatch, self._device)
        return self.model.scalars(hidden_N_D)


def _explained(microbatches: Sequence[Microbatch]) -> float:
    """1 - Var(return - value) / Var(return), of the values before the step; 0 where all returns are equal."""
    if not microbatches:
        return 0.0
    errors = np.concatenate([batch.advantages_R for batch in microbatches]).astype(np.float64)
    returns = np.concatenate([batch.values_R for batch in microbatches]) + errors
    return float(1 - errors.var() / returns.var()) if returns.var() else 0.0
