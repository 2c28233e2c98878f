"""`Trainer`: one optimizer step of the policy on one batch of scored groups, together with the other ranks of a mesh.

Shape suffixes: R response tokens (targets), G rollouts of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from llamarl.algorithms.advantages._base import Advantage
from llamarl.algorithms.kl import KlPenalty
from llamarl.algorithms.losses._base import Loss, LossInputs
from llamarl.config.schema import TrainerConfig
from llamarl.distributed.mesh import ALONE, RankMesh
from llamarl.kernels.half import rounded
from llamarl.models.transformer import Transformer
from llamarl.observability.metrics import UpdateMetrics
from llamarl.sharding.tensor_parallel import is_router
from llamarl.training.cost import step_cost
from llamarl.training.load import ExpertLoad
from llamarl.training.optimization import Optimization, Totals, age_sums, finished, split_by_age
from llamarl.training.packing import (
    EMPTY,
    UNSHAPED,
    Microbatch,
    Shaping,
    num_loss_sequences,
    num_loss_tokens,
    pack,
    packed_samples,
    placed,
    recorded_kl,
    with_advantage,
)
from llamarl.training.parallel import Read, local
from llamarl.training.policy import Policy, outputs_of, shares
from llamarl.training.result import PolicyStepResult
from llamarl.types import Columns, RolloutGroup, SampleGroup, TrainSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What a policy learns from its rollouts."""

    loss: Loss
    advantage: Advantage
    temperature: float
    """Temperature at which the rollouts were sampled, and at which their tokens are scored."""
    shaping: Shaping = UNSHAPED
    """Computes what the tokens of a group have earned."""
    kl_in_loss: KlPenalty | None = None
    """Penalty in the loss for leaving the reference. None means no penalty."""


class Trainer(Optimization[Transformer]):
    """A policy in training: master weights in `config.weights`, compute in `config.dtype`.

    All ranks of `mesh` make the same calls with the same groups. Each computes its share.
    """

    def __init__(
        self,
        model: Transformer,
        config: TrainerConfig,
        objective: Objective,
        mesh: RankMesh = ALONE,
        device: torch.device | None = None,
        read: Read | None = None,
    ) -> None:
        """
        Args:
            model: the whole model. Parts that other ranks compute with are dropped.
            device: device to compute on. None means the model's device.
            read: reads the weights of a model on the meta device.
        """
        self.policy = Policy(model, mesh)
        super().__init__(
            self.policy, config, mesh, device or model.device, model.kv_dtype, read, "trainer.learning_rate"
        )
        self.objective = objective
        self.load = ExpertLoad(self.model, self.device)

    def step(self, groups: Sequence[RolloutGroup]) -> PolicyStepResult:
        """Learns from `groups` and completes one policy version.

        Raises:
            NonFiniteStep: loss or gradient is NaN or infinite, and `trainer.on_nonfinite` ends the run.
        """
        samples, advantages, token_advantages = self._samples(groups)
        num_targets = num_loss_tokens(samples)
        denominator = max(num_targets if self.objective.loss.MEAN_OVER == "tokens" else num_loss_sequences(samples), 1)

        # Samples without gradient still count in the denominator, so skipping them only saves time.
        needs_all = self.objective.loss.LEARNS_WITHOUT_ADVANTAGE or self.objective.kl_in_loss is not None
        computed = samples if needs_all else with_advantage(samples)
        self.load.begin()
        step = finished(self.update(computed, denominator, groups))
        sums, maxima = step.sums, step.maxima
        num_inputs = sums.pop("num_input_tokens")
        num_computed = step.num_passes * num_loss_tokens(computed)
        ages = split_by_age(sums)
        cost = step_cost(self.model.shape, computed, self.config.lora, num_inputs / step.num_passes)
        means = {name: value / num_computed for name, value in sums.items()}
        if computed is not samples and (others := recorded_kl(samples)) is not None:  # the mean is over all tokens
            total = sums.get("kl_to_reference", 0.0) + step.num_passes * others
            means["kl_to_reference"] = total / max(step.num_passes * num_targets, 1)
        update = UpdateMetrics(
            loss=step.loss,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            num_loss_tokens=num_targets,
            importance_ratio_mean=1 + means.pop("importance_ratio_excess") if num_computed else None,
            importance_ratio_max=maxima.pop("importance_ratio_max", None),
            capped_share=means.pop("capped_share", None),
            kl_to_behavior=means.pop("kl_to_behavior", None),
        )
        metrics = {
            **means,
            **maxima,
            **self.objective.shaping.metrics(groups),
            "num_computed_tokens": float(num_computed),
            "num_input_tokens": num_inputs,
            "num_flops": cost.flops * step.num_passes,
            "padding_share": cost.padding_share,
            **ages,
            **self.load.metrics(self.mesh),
        }
        return PolicyStepResult(
            policy_version=self.policy_version,
            skipped=step.skipped,
            cause=step.cause,
            update=update,
            metrics=metrics,
            advantages=advantages,
            token_advantages=token_advantages,
            logprobs=self._logprobs(groups, computed, step.outputs),
        )

    def _logprobs(
        self, groups: Sequence[RolloutGroup], computed: Sequence[SampleGroup], outputs: Mapping[int, Tensor]
    ) -> dict[int, dict[int, np.ndarray]]:
        """Returns log-probabilities by group id and index, of all ranks; NaN for tokens that are not targets."""
        local_parts = list[tuple[tuple[int, int, int], np.ndarray]]()
        if self.is_logging:
            samples = packed_samples(shares(computed, self.mesh.fsdp.size)[self.mesh.fsdp.rank])
            local_parts = list(zip(placed(groups, samples), outputs_of(samples, outputs), strict=True))
        logprobs: dict[int, dict[int, np.ndarray]] = {group.group_id: {} for group in groups}
        rollouts = (rollout for group in groups for rollout in group.rollouts)
        lengths = {(rollout.group_id, rollout.index): rollout.num_tokens for rollout in rollouts}
        for (group_id, index, start), part_T in chain.from_iterable(self.mesh.exchange(local_parts)):
            unknown_T = np.full(lengths[group_id, index], np.nan, np.float32)
            logprobs[group_id].setdefault(index, unknown_T)[start : start + len(part_T)] = part_T
        return logprobs

    def _samples(
        self, groups: Sequence[RolloutGroup]
    ) -> tuple[list[SampleGroup], dict[int, np.ndarray], dict[int, dict[int, np.ndarray]]]:
        """Returns samples to learn from, the mean advantage of each rollout, and the advantages of tokens of rollouts
        in which they differ."""
        samples, advantages = self.objective.shaping.batch(groups, self.objective.advantage.of_batch)
        means = {
            group.group_id: np.array([advantages_T.mean() if len(advantages_T) else 0.0 for advantages_T in of_tokens])
            for group, of_tokens in zip(groups, advantages, strict=True)
        }
        differ = {
            group.group_id: {
                index: advantages_T.astype(np.float32)
                for index, advantages_T in enumerate(of_tokens)
                if len(np.unique(advantages_T)) > 1
            }
            for group, of_tokens in zip(groups, advantages, strict=True)
        }
        return samples, means, differ

    def _forward(self, microbatch: Microbatch, hidden_M_D: Tensor | None) -> Tensor:
        inputs = self.policy.place(microbatch, self.device)
        with self.load.counting(inputs.num_tokens):
            return self.policy(inputs, hidden_M_D, self.objective.temperature, self.config.dtype == "bfloat16")

    def _loss(self, microbatch: Microbatch, output_R: Tensor, first_R: Tensor | None, totals: Totals) -> Tensor:
        if not len(microbatch.targets_R):
            return output_R.sum()
        columns_R = {name: self.tensor(values_R) for name, values_R in microbatch.columns_R.items()}
        inputs = LossInputs(
            logprobs_N=output_R,
            behavior_logprobs_N=columns_R["behavior_logprobs"],
            advantages_N=columns_R["advantages"],
            loss_mask_N=columns_R["loss_mask"],
            sequence_N=self.tensor(microbatch.sequence_R),
            num_sequences=sum(map(len, microbatch.response_lengths)),
            proximal_logprobs_N=first_R,
            reference_logprobs_N=columns_R.get("reference_logprobs"),
            columns_N=columns_R,
            kl=self.objective.kl_in_loss,
        )
        output = self.objective.loss(inputs)
        is_first_pass = first_R is None
        is_stale_R = columns_R["policy_versions"] < self.policy_version
        # The difference of later passes from the behavior policy is neither staleness nor mismatch.
        behavior_R, mask_R = inputs.behavior_logprobs_N, inputs.loss_mask_N
        ages = age_sums(output_R, behavior_R, mask_R, is_stale_R) if is_first_pass else {}
        totals.add(output.sums | ages, output.maxima)
        return output.loss

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Returns log-probabilities of the response tokens at the sampling temperature, float32 [R]. Needs a single
        pipeline stage."""
        return self._forward(microbatch, None)

    def score(
        self,
        sequences: Sequence[np.ndarray],
        temperature: float = 1.0,
        half: bool = False,
        cutoffs_N: np.ndarray | None = None,
        rounded: bool = False,
        contexts: Sequence[int] | None = None,
        recurrent: bool = False,
    ) -> list[np.ndarray]:
        """Returns log-probabilities of all tokens but the first, float32 [T - 1] each, on every rank.

        They are computed in float32, unless weights are gathered, or kept, in bfloat16. With `half` they are computed
        as in steps, which `trainer.dtype` may round. With `rounded` they are computed in float32 by matrices whose
        values are rounded to bfloat16. With `recurrent` delta nets are computed token by token, as in generators.

        Args:
            cutoffs_N: cutoffs of those tokens, one sequence after the other, as in `llamarl.types.COLUMNS`. None means
                none.
            contexts: number of first tokens of each sequence whose log-probabilities are not needed. These are NaN. The
                default is 1. A common beginning of all contexts is computed once.
        """
        contexts = contexts or [1] * len(sequences)
        ends, groups = np.cumsum([0, *(len(ids_T) - 1 for ids_T in sequences)]), list[SampleGroup]()
        for ids_T, num, start, end in zip(sequences, contexts, ends, ends[1:], strict=False):
            columns: Columns = {"token_ids": ids_T[num:]}
            if cutoffs_N is not None:
                columns["cutoffs"] = cutoffs_N[start + num - 1 : end]
            if len(ids_T) > num:
                groups.append(SampleGroup(prompt_token_ids_T=ids_T[:num], samples=(TrainSample(columns=columns),)))
        shares = self.policy.shares_beginnings
        (microbatch,) = pack(groups, sum(map(len, sequences)), shares=shares) or [EMPTY]
        inputs = self.policy.place(microbatch, self.device)
        if recurrent:
            inputs = replace(inputs, attend=inputs.attend.in_recurrent_form())
        is_rounded = self.mesh.shards is not None or self.config.weights == "bfloat16"
        half = (half or is_rounded) and self.config.dtype == "bfloat16"
        with self._rounded() if rounded and not half else nullcontext():
            result = self.pipeline.infer(
                self.policy.hidden_shape(microbatch),
                lambda _, hidden_M_D: self.policy(inputs, hidden_M_D, temperature, half),
            )
        self.reshard()
        logprobs_R = self.mesh.exchange(result.cpu().numpy() if self.mesh.pp.is_last else None)[-1]
        scores, start = [np.full(len(ids_T) - 1, np.nan, np.float32) for ids_T in sequences], 0
        for scores_T, num in zip(scores, contexts, strict=True):
            scores_T[num - 1 :] = logprobs_R[start : start + len(scores_T) + 1 - num]
            start += len(scores_T) + 1 - num
        return scores

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """Rounds float32 matrices to bfloat16 values, as generators get them, and restores the master weights at the
        end."""
        # In place: FSDP2 gathers from separate memory, not from the tensor that a parameter's `data` is set to.
        named = [(name, weight.detach()) for name, weight in self.model.named_parameters()]
        matrices = [local(weight) for name, weight in named if weight.ndim > 1 and not is_router(name)]
        masters = [matrix.clone() for matrix in matrices]
        for matrix in matrices:
            matrix.copy_(rounded(matrix))
        try:
            yield
        finally:
            for matrix, master in zip(matrices, masters, strict=True):
                matrix.copy_(master)
