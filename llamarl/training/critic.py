"""`Critic`: a value model that predicts returns and learns from them, one step per step of the trainer, together with
the other ranks of a mesh of its own.

Shape suffixes: N positions of one microbatch, M rows of this rank, R response tokens (targets), O those of them that
are predicted by tokens of this context rank, D model dim, T tokens of one response.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from llamarl.algorithms.advantages._base import ValueAdvantage
from llamarl.config.schema import TrainerConfig
from llamarl.distributed.collectives import summed
from llamarl.distributed.mesh import ALONE, RankMesh
from llamarl.models.scalar import ScalarModel
from llamarl.training.optimization import Optimization, Totals
from llamarl.training.packing import EMPTY, UNSHAPED, Microbatch, Shaping, num_loss_tokens
from llamarl.training.parallel import Read
from llamarl.training.policy import Inputs, RankModel
from llamarl.training.responses import per_response
from llamarl.training.result import StepResult
from llamarl.types import Prompt, Rollout, RolloutGroup, SampleGroup


def value_losses(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2 per token (PPO's code-level value clipping,
    arXiv 2005.12729, section 3): no reward for moving further than `clip` from the old value."""
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    return torch.maximum((values_N - returns_N).square(), (clipped_N - returns_N).square()) / 2


class ValueModel(RankModel[ScalarModel]):
    """Knows what is expected of given tokens and those after them."""

    def forward(self, inputs: Inputs, hidden_M_D: Tensor | None, bfloat16: bool) -> Tensor:
        """Values [R] of all targets, the same on all tensor and context ranks; before the last stage, [M, D]."""
        output_M_D = self.hidden(inputs, hidden_M_D, bfloat16)
        if not self.mesh.pp.is_last:
            return output_M_D
        # Each tensor rank has a part of the rows: it adds the values that they predict, and 0 elsewhere. Not by a mask
        # as index: a GPU would have to be waited for.
        rows_O = inputs.predictors_O - self.mesh.tp.rank * len(output_M_D)
        own_O = (rows_O >= 0) & (rows_O < len(output_M_D))
        values_O = self.transformer.scalars(output_M_D.index_select(0, rows_O.where(own_O, 0))).where(own_O, 0)
        values_R = values_O.new_zeros(inputs.num_targets).index_copy(0, inputs.index_O, values_O)
        return summed(summed(values_R, self.mesh.cp), self.mesh.tp)


class Critic(Optimization[ScalarModel]):
    """A model in training; `values` may be asked for while `learn` is under way.

    All ranks of `mesh` make the same calls, in the same order, with the same groups; each computes its share.
    """

    NAME = "critic "

    def __init__(
        self,
        model: ScalarModel,
        config: TrainerConfig,
        clip: float,
        advantage: ValueAdvantage,
        shaping: Shaping = UNSHAPED,
        mesh: RankMesh = ALONE,
        device: torch.device | None = None,
        read: Read | None = None,
    ) -> None:
        """
        Args:
            model: the whole of it; what other ranks compute with is dropped.
            config: of its optimizer and its batches.
            clip: how far a value may move in one step.
            advantage: says what the returns are.
            shaping: what the tokens of a group have earned, as the trainer sees it.
            device: to compute on; none: where the model is.
            read: for a model on the meta device: where its weights come from.
        """
        weight = model.score.weight
        rate = "critic.learning_rate_scale"
        super().__init__(ValueModel(model, mesh), config, mesh, device or weight.device, weight.dtype, read, rate)
        self._clip = clip
        self._advantage = advantage
        self._shaping = shaping

    def values(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[np.ndarray]]:
        """Float32 [T] per rollout: what is expected of each token and those after it, before it is known."""
        return per_response(groups, self.config.microbatch_tokens, self._infer)

    def _infer(self, microbatches: Sequence[Microbatch]) -> list[np.ndarray]:
        """[R] of each, on every rank. Data-parallel ranks take turns, with empty ones at the end."""
        fsdp, own = self.mesh.fsdp, list[np.ndarray]()
        whole = [*microbatches, *[EMPTY] * (-len(microbatches) % fsdp.size)]
        for one in whole[fsdp.rank :: fsdp.size]:
            values_R = self.pipeline.infer(
                self.module.hidden_shape(one), lambda _, hidden_M_D, one=one: self._forward(one, hidden_M_D)
            )
            own.append(values_R.float().cpu().numpy())
        self.reshard()
        shares = [share for share in self.mesh.exchange(own if self.is_logging else None) if share is not None]
        return list(chain.from_iterable(zip(*shares, strict=True)))[: len(microbatches)]

    def learn(self, groups: Sequence[RolloutGroup]) -> Generator[None, None, StepResult]:
        """Learns the groups' returns in as many passes as the trainer makes, a microbatch at a time.

        Raises:
            NonFiniteStep: loss or gradient is NaN or infinite, and the policy is to stop.
        """
        samples, _ = self._shaping.batch(groups, self._advantage.estimate)
        taken = yield from self.update(samples, max(num_loss_tokens(samples), 1), groups)
        metrics = {
            "value_loss": taken.loss,
            "critic_grad_norm": taken.grad_norm,
            "explained_variance": 0.0 if taken.skipped else _explained(samples),
            "critic_skipped": float(taken.skipped),
        }
        return StepResult(policy_version=self.policy_version, skipped=taken.skipped, cause=taken.cause, metrics=metrics)

    def _forward(self, microbatch: Microbatch, hidden_M_D: Tensor | None) -> Tensor:
        inputs = self.module.place(microbatch, self.device)
        return self.module(inputs, hidden_M_D, self.config.dtype == "bfloat16")

    def _loss(self, microbatch: Microbatch, output_R: Tensor, first_R: Tensor | None, totals: Totals) -> Tensor:
        """Sum over the tokens."""
        old_R = self.tensor(microbatch.values_R)
        returns_R = old_R + self.tensor(microbatch.advantages_R)
        losses_R = value_losses(output_R, old_R, returns_R, self._clip)
        return losses_R.masked_fill(~self.tensor(microbatch.loss_mask_R), 0.0).sum()


def _explained(groups: Sequence[SampleGroup]) -> float:
    """1 - Var(return - value) / Var(return), of the values before the step; 0 where all returns are equal."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return 0.0
    masks = [sample.loss_mask_T for sample in samples]
    errors, values = (
        np.concatenate([one[mask] for one, mask in zip(all_T, masks, strict=True)]).astype(np.float64)
        for all_T in ([sample.advantages_T for sample in samples], [sample.values_T for sample in samples])
    )
    returns = values + errors
    return float(1 - errors.var() / returns.var()) if returns.var() else 0.0
