"""`Critic`: a value model that predicts returns and learns them, one step per step of the trainer, together with the
other ranks of the critic's mesh.

Shape suffixes: N positions of one microbatch, M rows of this rank, R response tokens (targets), O targets that tokens
of this context rank predict, D model dim, T tokens of one response.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from llamarl.algorithms.advantages._base import ValueAdvantage
from llamarl.config.schema import TrainerConfig
from llamarl.distributed.mesh import ALONE, RankMesh, summed
from llamarl.models.scalar import ScalarModel
from llamarl.training.optimization import Optimization, Totals
from llamarl.training.packing import EMPTY, UNSHAPED, Microbatch, Shaping, num_loss_tokens
from llamarl.training.parallel import Read
from llamarl.training.policy import Inputs, RankModel
from llamarl.training.responses import per_response
from llamarl.training.result import StepResult
from llamarl.types import Prompt, Rollout, RolloutGroup, SampleGroup


def value_losses(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float) -> Tensor:
    """Returns max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2 per token.

    This is PPO's code-level value clipping (arXiv 2005.12729, section 3): moving further than `clip` from the old value
    gains nothing.
    """
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    return torch.maximum((values_N - returns_N).square(), (clipped_N - returns_N).square()) / 2


class ValueModel(RankModel[ScalarModel]):
    """Predicts the return of each token and the tokens after it."""

    def forward(self, inputs: Inputs, hidden_M_D: Tensor | None, bfloat16: bool) -> Tensor:
        """Returns values [R] of all targets, the same on all tensor and context ranks; before the last stage, [M,
        D]."""
        output_M_D = self.hidden(inputs, hidden_M_D, bfloat16)
        if not self.mesh.pp.is_last:
            return output_M_D
        # Each tensor rank has a part of the rows: it adds the values that these predict, and 0 elsewhere. A mask as
        # index would wait for the GPU.
        rows_O = inputs.predictors_O - self.mesh.tp.rank * len(output_M_D)
        own_O = (rows_O >= 0) & (rows_O < len(output_M_D))
        values_O = self.transformer.scalars(output_M_D.index_select(0, rows_O.where(own_O, 0))).where(own_O, 0)
        values_R = values_O.new_zeros(inputs.num_targets).index_copy(0, inputs.index_O, values_O)
        return summed(summed(values_R, self.mesh.cp), self.mesh.tp)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueObjective:
    """What a critic learns from rollouts."""

    advantage: ValueAdvantage
    """Computes the returns."""
    clip: float
    """Largest change of a value in one step."""
    shaping: Shaping = UNSHAPED
    """Computes what the tokens of a group have earned, as for the trainer."""


class Critic(Optimization[ScalarModel]):
    """A value model in training. `values` may be called while `learn` is under way.

    All ranks of `mesh` make the same calls, in the same order, with the same groups. Each computes its share.
    """

    NAME = "critic "

    def __init__(
        self,
        model: ScalarModel,
        config: TrainerConfig,
        objective: ValueObjective,
        mesh: RankMesh = ALONE,
        device: torch.device | None = None,
        read: Read | None = None,
    ) -> None:
        """
        Args:
            model: the whole model. Parts that other ranks compute with are dropped.
            config: settings of its optimizer and its batches.
            device: device to compute on. None means the model's device.
            read: reads the weights of a model on the meta device.
        """
        weight = model.score.weight
        rate = "critic.learning_rate_scale"
        super().__init__(ValueModel(model, mesh), config, mesh, device or weight.device, weight.dtype, read, rate)
        self._objective = objective

    def values(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[np.ndarray]]:
        """Returns float32 [T] per rollout: the expected return of each token and the tokens after it, before it is
        known."""
        return per_response(groups, self.config.microbatch_tokens, self._infer)

    def _infer(self, microbatches: Sequence[Microbatch]) -> list[np.ndarray]:
        """Returns [R] of each microbatch, on every rank. Data-parallel ranks take turns, with empty microbatches at the
        end."""
        fsdp, share = self.mesh.fsdp, list[np.ndarray]()
        whole = [*microbatches, *[EMPTY] * (-len(microbatches) % fsdp.size)]
        for batch in whole[fsdp.rank :: fsdp.size]:
            values_R = self.pipeline.infer(
                self.module.hidden_shape(batch), lambda _, hidden_M_D, batch=batch: self._forward(batch, hidden_M_D)
            )
            share.append(values_R.float().cpu().numpy())
        self.reshard()
        shares = [part for part in self.mesh.exchange(share if self.is_logging else None) if part is not None]
        return list(chain.from_iterable(zip(*shares, strict=True)))[: len(microbatches)]

    def learn(self, groups: Sequence[RolloutGroup]) -> Generator[None, None, StepResult]:
        """Learns the groups' returns in as many passes as the trainer makes, a microbatch at a time.

        Raises:
            NonFiniteStep: loss or gradient is NaN or infinite, and `trainer.on_nonfinite` ends the run.
        """
        samples, _ = self._objective.shaping.batch(groups, self._objective.advantage.estimate)
        step = yield from self.update(samples, max(num_loss_tokens(samples), 1), groups)
        metrics = {
            "value_loss": step.loss,
            "critic_grad_norm": step.grad_norm,
            "explained_variance": 0.0 if step.skipped else _explained(samples),
            "critic_skipped": float(step.skipped),
        }
        return StepResult(policy_version=self.policy_version, skipped=step.skipped, cause=step.cause, metrics=metrics)

    def _forward(self, microbatch: Microbatch, hidden_M_D: Tensor | None) -> Tensor:
        inputs = self.module.place(microbatch, self.device)
        return self.module(inputs, hidden_M_D, self.config.dtype == "bfloat16")

    def _loss(self, microbatch: Microbatch, output_R: Tensor, first_R: Tensor | None, totals: Totals) -> Tensor:
        old_R = self.tensor(microbatch.values_R)
        returns_R = old_R + self.tensor(microbatch.advantages_R)
        losses_R = value_losses(output_R, old_R, returns_R, self._objective.clip)
        return losses_R.masked_fill(~self.tensor(microbatch.loss_mask_R), 0.0).sum()


def _explained(groups: Sequence[SampleGroup]) -> float:
    """Returns 1 - Var(return - value) / Var(return), for the values before the step; 0 if all returns are equal."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return 0.0
    masks = [sample.loss_mask_T for sample in samples]
    errors, values = (
        np.concatenate([values_T[mask] for values_T, mask in zip(all_T, masks, strict=True)]).astype(np.float64)
        for all_T in ([sample.advantages_T for sample in samples], [sample.values_T for sample in samples])
    )
    returns = values + errors
    return float(1 - errors.var() / returns.var()) if returns.var() else 0.0
