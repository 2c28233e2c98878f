"""`Trainer`: one optimizer step on one batch of scored groups, together with the other ranks of a mesh.

Shape suffixes: R response tokens (targets), G rollouts of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from llamarl.algorithms.advantages._base import Advantage
from llamarl.algorithms.kl import KlPenalty
from llamarl.algorithms.losses._base import Loss, LossInputs
from llamarl.config.schema import TrainerConfig
from llamarl.distributed.mesh import ALONE, RankMesh
from llamarl.models.transformer import Transformer
from llamarl.training.compute import set_compute
from llamarl.training.cost import step_cost
from llamarl.training.health import Health, age_sums, split_by_age
from llamarl.training.optimizer import build_optimizer, set_learning_rate
from llamarl.training.packing import EMPTY, Microbatch, with_advantage
from llamarl.training.parallel import Read, held_tensors, parallelize
from llamarl.training.pipeline import Pipeline
from llamarl.training.policy import Policy, own_share
from llamarl.training.result import StepResult
from llamarl.training.shaping import UNSHAPED, Shaping
from llamarl.types import RolloutGroup, SampleGroup, TrainBatch
from llamarl.weight_sync.layout import TensorSpec

Logged = tuple[dict[str, float], dict[str, float]]
"""Sums and maxima, by name."""


class Trainer:
    """A model in training: float32 master weights, compute in `config.dtype`.

    All ranks of `mesh` make the same calls with the same groups; each computes its share.
    """

    def __init__(
        self,
        model: Transformer,
        config: TrainerConfig,
        loss: Loss,
        advantage: Advantage,
        temperature: float,
        mesh: RankMesh = ALONE,
        device: torch.device | None = None,
        shaping: Shaping = UNSHAPED,
        kl_in_loss: KlPenalty | None = None,
        read: Read | None = None,
    ) -> None:
        """
        Args:
            model: the whole of it; what other ranks compute with is dropped.
            device: to compute on; none: where the model is.
            shaping: what the tokens of a group have earned.
            kl_in_loss: price of leaving the reference, beside the loss.
            read: for a model on the meta device: where its weights come from.
        """
        self.model = model
        self.config = config
        self.loss = loss
        self.advantage = advantage
        self.temperature = temperature
        self.shaping = shaping
        self.kl_in_loss = kl_in_loss
        self.mesh = mesh
        self.device, dtype = device or model.device, model.kv_dtype
        set_compute(model, config)
        self.policy = Policy(model, mesh)
        self.sharding = parallelize(self.policy, model, mesh, self.device, read)
        self.pipeline = Pipeline(mesh.pp, dtype, self.device)
        self.optimizer = build_optimizer(self.sharding.weights.values(), config)
        self.policy_version = 0
        self.health = Health(config, mesh)

    def step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """Learns from `groups` and completes one policy version.

        Raises:
            NonFiniteStep: loss or gradient is NaN or infinite, and the policy is to stop.
        """
        batch, advantages = self._batch(groups)
        count = batch.num_loss_tokens if self.loss.MEAN_OVER == "tokens" else batch.num_loss_sequences
        denominator = max(count, 1)
        rate = set_learning_rate(self.optimizer, self.policy_version, self.config)

        # Samples without gradient still count in the denominator: leaving them out changes nothing but the time.
        needs_all = self.loss.LEARNS_WITHOUT_ADVANTAGE or self.kl_in_loss is not None
        computed = batch.groups if needs_all else with_advantage(batch.groups)
        logged, grad_norm, finite = self._updates(computed, denominator)
        sums, maxima = _merged(logged)
        loss, num_inputs = sums.pop("loss", 0.0) / denominator / len(logged), sums.pop("num_input_tokens")
        num_computed = len(logged) * TrainBatch(groups=tuple(computed)).num_loss_tokens
        ages, cost = split_by_age(sums), step_cost(self.model.shape, computed, self.config.lora)
        metrics = {name: value / num_computed for name, value in sums.items()} | maxima | self.shaping.metrics(groups)
        metrics |= {
            "loss": loss,
            "importance_ratio_mean": 1 + metrics.pop("importance_ratio_excess", 0.0),
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "num_loss_tokens": float(batch.num_loss_tokens),
            "num_computed_tokens": float(num_computed),
            "num_input_tokens": num_inputs,
            "num_flops": cost.flops * len(logged),
            "padding_share": cost.padding_share,
            **ages,
        }

        def alone(some: Sequence[SampleGroup]) -> tuple[dict[str, float], float]:
            sums, _ = self.accumulate(some, denominator)
            norm = self.sharding.clip_gradients(self.config.max_grad_norm)
            self.optimizer.zero_grad(set_to_none=False)
            return sums, norm

        of_pass = f" pass {len(logged)} of {self.config.passes}" if self.config.passes > 1 else ""
        said = f"step {self.policy_version}{of_pass}: loss {loss}, gradient norm {grad_norm}"
        cause = self.health.ended(said, finite, groups, computed, alone)
        self.policy_version += 1
        return StepResult(
            policy_version=self.policy_version, skipped=not finite, cause=cause, metrics=metrics, advantages=advantages
        )

    def _batch(self, groups: Sequence[RolloutGroup]) -> tuple[TrainBatch, dict[int, np.ndarray]]:
        """What is learnt from, and the advantage of each rollout."""
        batch, advantages = self.shaping.batch(groups, self.advantage.of_batch)
        means = {
            group.group_id: np.array([one_T.mean() if len(one_T) else 0.0 for one_T in of_tokens])
            for group, of_tokens in zip(groups, advantages, strict=True)
        }
        return batch, means

    def _updates(self, groups: Sequence[SampleGroup], denominator: int) -> tuple[list[Logged], float, bool]:
        """`trainer.passes` updates; what each logs, the last gradient norm, and whether all was finite.

        The first pass finds the log-probabilities that later ones stay near. One that is not finite is the last, and
        makes no update; those before it stay.
        """
        logged, proximal, grad_norm, finite = list[Logged](), dict[int, Tensor](), 0.0, True
        self.health.begin()
        while finite and len(logged) < self.config.passes:
            logged.append(self.accumulate(groups, denominator, proximal))
            grad_norm = self.sharding.clip_gradients(self.config.max_grad_norm)
            finite = math.isfinite(grad_norm) and math.isfinite(logged[-1][0].get("loss", 0.0))
            if finite:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)  # a step without any gradient still moves by its momentum
        return logged, grad_norm, finite

    def accumulate(
        self, groups: Sequence[SampleGroup], denominator: int, proximal: dict[int, Tensor] | None = None
    ) -> Logged:
        """Gradient of (sum of losses) / (global count of tokens or sequences); sums and maxima over all ranks.

        Args:
            proximal: log-probabilities by microbatch at the first pass, which fills it.
        """
        mesh, at_first = self.mesh, {} if proximal is None else proximal
        own = own_share(groups, mesh, self.config.microbatch_tokens)
        num_inputs = float(sum(len(microbatch.token_ids_N) for microbatch in own))
        sums, maxima = {"num_input_tokens": num_inputs}, dict[str, float]()

        def forward(index: int, hidden_M_D: Tensor | None) -> Tensor:
            output = self._forward(own[index], hidden_M_D)
            if not mesh.pp.is_last:
                return output
            loss = self._loss(own[index], output, at_first.get(index), sums, maxima)
            at_first.setdefault(index, output.detach())
            self.health.computed(index, len(own), sums)
            return loss / denominator

        self.pipeline.train([self.policy.hidden_shape(microbatch) for microbatch in own], forward)
        self.sharding.finish_gradients()
        return self._together(sums, maxima)

    def _forward(self, microbatch: Microbatch, hidden_M_D: Tensor | None) -> Tensor:
        inputs = self.policy.place(microbatch, self.device)
        return self.policy(inputs, hidden_M_D, self.temperature, self.config.dtype == "bfloat16")

    def _loss(
        self,
        microbatch: Microbatch,
        logprobs_R: Tensor,
        proximal_R: Tensor | None,
        sums: dict[str, float],
        maxima: dict[str, float],
    ) -> Tensor:
        """Sum over one microbatch; adds to what is logged."""
        if not len(microbatch.targets_R):
            return logprobs_R.sum()
        columns_R = {name: self._tensor(values_R) for name, values_R in microbatch.columns_R.items()}
        inputs = LossInputs(
            logprobs_N=logprobs_R,
            behavior_logprobs_N=columns_R["behavior_logprobs"],
            advantages_N=columns_R["advantages"],
            loss_mask_N=columns_R["loss_mask"],
            sequence_N=self._tensor(microbatch.sequence_R),
            num_sequences=sum(map(len, microbatch.response_lengths)),
            proximal_logprobs_N=proximal_R,
            reference_logprobs_N=columns_R.get("reference_logprobs"),
            columns_N=columns_R,
            kl=self.kl_in_loss,
        )
        output = self.loss(inputs)
        at_first = proximal_R is None
        is_stale_R = columns_R["policy_versions"] < self.policy_version
        # Later passes move away from the behavior policy by themselves, which is neither staleness nor mismatch.
        ages = age_sums(logprobs_R, inputs.behavior_logprobs_N, inputs.loss_mask_N, is_stale_R) if at_first else {}
        for name, value in {"loss": output.loss, **output.sums, **ages}.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach())
        for name, value in output.maxima.items():
            maxima[name] = max(maxima.get(name, -math.inf), float(value))
        return output.loss

    def _together(self, sums: dict[str, float], maxima: dict[str, float]) -> Logged:
        """Of all data-parallel ranks; the first of each one's tensor and context ranks speaks, on the last stage."""
        speaks = self.mesh.pp.is_last and self.mesh.tp.rank == self.mesh.cp.rank == 0
        return _merged(self.mesh.exchange((sums, maxima) if speaks else ({}, {})))

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Log-probabilities of the response tokens at the sampling temperature, float32 [R]; with one stage."""
        return self._forward(microbatch, None)

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities of all tokens but the first at temperature 1, float32 [T - 1] each; on every rank."""
        lengths = [len(token_ids_T) - 1 for token_ids_T in sequences]
        starts = np.cumsum([0, *lengths])[:-1]
        microbatch = replace(
            EMPTY,
            token_ids_N=np.concatenate([token_ids_T[:-1] for token_ids_T in sequences]).astype(np.int64),
            positions_N=np.concatenate([np.arange(length) for length in lengths]),
            prompt_lengths=tuple(lengths),
            response_lengths=((),) * len(lengths),
            predictors_R=np.arange(sum(lengths)),
            targets_R=np.concatenate([token_ids_T[1:] for token_ids_T in sequences]).astype(np.int64),
        )
        inputs = self.policy.place(microbatch, self.device)
        result = self.pipeline.infer(
            self.policy.hidden_shape(microbatch), lambda _, hidden_M_D: self.policy(inputs, hidden_M_D, 1.0, False)
        )
        if isinstance(self.policy, FSDPModule):
            self.policy.reshard()  # else the next forward would use the gathered weights of before the next step
        logprobs_R = self.mesh.exchange(result.cpu().numpy() if self.mesh.pp.is_last else None)[-1]
        return np.split(logprobs_R, starts[1:])

    def shards(self) -> dict[str, tuple[TensorSpec, Tensor]]:
        """What this rank holds of weights, `NAME`, and of the moments of AdamW, `NAME:MOMENT`, once there are some.

        Tensors are those in use. Several ranks may hold the same part.
        """
        return held_tensors(self.sharding, self.optimizer)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _merged(logged: Iterable[Logged]) -> Logged:
    all_sums, all_maxima = dict[str, float](), dict[str, float]()
    for sums, maxima in logged:
        for name, value in sums.items():
            all_sums[name] = all_sums.get(name, 0.0) + value
        for name, value in maxima.items():
            all_maxima[name] = max(all_maxima.get(name, -math.inf), value)
    return all_sums, all_maxima
