"""`Trainer`: one optimizer step on one batch of scored groups.

Shape suffixes: N packed input tokens, R response tokens (targets), G rollouts of a group, D model dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from llamarl.algorithms.advantages._base import Advantage
from llamarl.algorithms.kl import KlPenalty
from llamarl.algorithms.losses._base import Loss, LossInputs
from llamarl.config.schema import TrainerConfig
from llamarl.models.transformer import Transformer
from llamarl.rollouts.packing import Microbatch, pack, to_sample_group, with_advantage
from llamarl.rollouts.shaping import UNSHAPED, Shaping
from llamarl.training.attention import shared_prefix_attend
from llamarl.training.logprobs import target_logprobs
from llamarl.training.optimizer import build_optimizer, learning_rate_at
from llamarl.training.result import StepResult
from llamarl.types import RolloutGroup, TrainBatch


class NonFiniteStep(RuntimeError):
    """Loss or gradient is not finite; the update was not made."""


class Trainer:
    """A model in training: float32 master weights, compute in `config.dtype`."""

    def __init__(
        self,
        model: Transformer,
        config: TrainerConfig,
        loss: Loss,
        advantage: Advantage,
        temperature: float,
        shaping: Shaping = UNSHAPED,
        kl_in_loss: KlPenalty | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.loss = loss
        self.advantage = advantage
        self.temperature = temperature
        self.shaping = shaping
        self.kl_in_loss = kl_in_loss
        self.optimizer = build_optimizer(model, config)
        self.policy_version = 0
        self.device = next(model.parameters()).device
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)

    def step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """Learns from `groups` and completes one policy version.

        Raises:
            NonFiniteStep: loss or gradient is NaN or infinite, and the policy is to stop.
        """
        batch, advantages = self._batch(groups)
        count = batch.num_loss_tokens if self.loss.MEAN_OVER == "tokens" else batch.num_loss_sequences
        denominator = max(count, 1)
        rate = learning_rate_at(self.policy_version, self.config)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = rate

        # Samples without gradient still count in the denominator: leaving them out changes nothing but the time.
        needs_all = self.loss.LEARNS_WITHOUT_ADVANTAGE or self.kl_in_loss is not None
        computed = batch.groups if needs_all else with_advantage(batch.groups)
        sums, maxima = dict[str, float](), dict[str, float]()
        microbatches = pack(computed, self.config.microbatch_tokens)
        proximal, finite, grad_norm, passes = list[Tensor](), True, 0.0, 0
        while finite and passes < self.config.passes:
            finite, grad_norm = self._update(microbatches, denominator, proximal, sums, maxima)
            passes += 1
        loss = sums.pop("loss", 0.0) / denominator / passes
        num_computed = passes * TrainBatch(groups=tuple(computed)).num_loss_tokens
        metrics = {name: value / num_computed for name, value in sums.items()} | maxima | self.shaping.metrics(groups)
        metrics |= {
            "loss": loss,
            "importance_ratio_mean": 1 + metrics.pop("importance_ratio_excess", 0.0),
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "num_loss_tokens": float(batch.num_loss_tokens),
            "num_computed_tokens": float(num_computed),
            "num_input_tokens": float(passes * sum(len(microbatch.token_ids_N) for microbatch in microbatches)),
        }
        if not finite and self.config.on_nonfinite == "stop":
            names = ", ".join(str(group.group_id) for group in groups)
            raise NonFiniteStep(
                f"step {self.policy_version}: loss {loss}, gradient norm {grad_norm}, groups {names};"
                " lower trainer.learning_rate, or set trainer.on_nonfinite = 'skip'"
            )
        self.policy_version += 1
        return StepResult(
            policy_version=self.policy_version, skipped=not finite, metrics=metrics, advantages=advantages
        )

    def _update(
        self,
        microbatches: Sequence[Microbatch],
        denominator: int,
        proximal: list[Tensor],
        sums: dict[str, float],
        maxima: dict[str, float],
    ) -> tuple[bool, float]:
        """One pass over the batch and one update. Whether all was finite, else there is no update; the gradient norm.

        The first pass fills `proximal`, the log-probabilities before any update, which later ones are relative to.
        """
        known = list(proximal)
        for index, microbatch in enumerate(microbatches):
            logprobs_R = self.logprobs(microbatch)
            if not known:
                proximal.append(logprobs_R.detach())
            at_first_R = known[index] if known else None
            self._accumulate(microbatch, logprobs_R, at_first_R, denominator, sums, maxima)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        finite = math.isfinite(grad_norm) and math.isfinite(sums.get("loss", 0.0))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # a step without any gradient still moves by its momentum
        return finite, grad_norm

    def _batch(self, groups: Sequence[RolloutGroup]) -> tuple[TrainBatch, dict[int, np.ndarray]]:
        """What is learnt from, and the advantage of each rollout."""
        rewards = [self.shaping.rewards(group) for group in groups]
        advantages = self.advantage.of_batch(rewards)
        samples = [
            to_sample_group(group, of_tokens, earned.valid_G)
            for group, of_tokens, earned in zip(groups, advantages, rewards, strict=True)
        ]
        means = {
            group.group_id: np.array([one_T.mean() if len(one_T) else 0.0 for one_T in of_tokens])
            for group, of_tokens in zip(groups, advantages, strict=True)
        }
        return TrainBatch(groups=tuple(samples)), means

    def _accumulate(
        self,
        microbatch: Microbatch,
        logprobs_R: Tensor,
        proximal_R: Tensor | None,
        denominator: int,
        sums: dict[str, float],
        maxima: dict[str, float],
    ) -> None:
        """Adds one microbatch's share of the gradient of (sum of losses) / (global count of tokens or sequences)."""
        reference_R = microbatch.reference_logprobs_R
        output = self.loss(
            LossInputs(
                logprobs_N=logprobs_R,
                behavior_logprobs_N=self._tensor(microbatch.behavior_logprobs_R),
                advantages_N=self._tensor(microbatch.advantages_R),
                loss_mask_N=self._tensor(microbatch.loss_mask_R),
                sequence_N=self._tensor(microbatch.sequence_R),
                num_sequences=sum(map(len, microbatch.response_lengths)),
                proximal_logprobs_N=proximal_R,
                reference_logprobs_N=self._tensor(reference_R) if len(reference_R) else None,
                kl=self.kl_in_loss,
            )
        )
        (output.loss / denominator).backward()
        for name, value in {"loss": output.loss, **output.sums}.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach())
        for name, value in output.maxima.items():
            maxima[name] = max(maxima.get(name, -math.inf), float(value))

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Log-probabilities of the response tokens at the sampling temperature, float32 [R]."""
        attend = shared_prefix_attend(microbatch.prompt_lengths, microbatch.response_lengths, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            hidden_N_D = self.model(self._tensor(microbatch.token_ids_N), self._tensor(microbatch.positions_N), attend)
        hidden_R_D = hidden_N_D.index_select(0, self._tensor(microbatch.predictors_R))
        head_V_D = self.model.head_weight_V_D.to(hidden_R_D.dtype)
        return target_logprobs(hidden_R_D, head_V_D, self._tensor(microbatch.targets_R), self.temperature)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
