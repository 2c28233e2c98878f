"""`Optimization`: a model in training, whatever its objective, together with the other ranks of a mesh.

Shape suffixes: R response tokens (targets), M rows of this rank, D model dim.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from llamarl.config.schema import TrainerConfig
from llamarl.distributed.mesh import RankMesh
from llamarl.kernels import half, products
from llamarl.sharding.tensor_parallel import is_router
from llamarl.training.compute import copying, set_compute
from llamarl.training.health import Health, find_cause
from llamarl.training.optimizer import build_optimizer, set_learning_rate
from llamarl.training.packing import Microbatch
from llamarl.training.parallel import Read, held_tensors, parallelize
from llamarl.training.pipeline import Pipeline
from llamarl.training.policy import Model, RankModel, own_share
from llamarl.training.totals import Logged, Totals, merged
from llamarl.types import RolloutGroup, SampleGroup
from llamarl.weight_sync.layout import TensorSpec

T = TypeVar("T")
OUTSIZED = 1e9
"""Neither rewards nor weights are so large in a training that goes wrong by itself: learning rates are 10 at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Numbers that a step, of whatever objective, says."""

    loss: float
    """Over the denominator, the mean of the passes."""
    grad_norm: float
    """Norm of the gradient in the last pass, before clipping."""
    learning_rate: float
    sums: dict[str, float]
    """Sums of all passes, by name."""
    maxima: dict[str, float]
    num_passes: int
    skipped: bool
    cause: str
    """Cause of a skipped step."""
    outputs: dict[int, Tensor]
    """Outputs of the first pass, by microbatch of this rank, on the device; none before the last pipeline stage."""


class Optimization(ABC, Generic[Model]):
    """Master weights in `config.weights`, compute in `config.dtype`; microbatches, passes, gradients and steps.

    All ranks of `mesh` make the same calls, in the same order, with the same groups; each computes its share.
    """

    NAME: ClassVar[str] = ""
    """Words in front of `step`, in what is said of one."""

    def __init__(
        self,
        module: RankModel[Model],
        config: TrainerConfig,
        mesh: RankMesh,
        device: torch.device,
        dtype: torch.dtype,
        read: Read | None,
        rate: str,
    ) -> None:
        """
        Args:
            module: holds the whole model; what other ranks compute with is dropped.
            dtype: of hidden states between pipeline stages.
            read: for a model on the meta device: where its weights come from.
            rate: the option of the learning rate.
        """
        self.model, self.config, self.mesh, self.device = module.transformer, config, mesh, device
        module.fused = set_compute(self.model, config, device)
        module.even = max(mesh.exchange(products.even() if module.fused else 1))  # one for all ranks
        self.module = module
        for name, weight in module.named_parameters() if not config.train_router else ():
            weight.requires_grad_(weight.requires_grad and not is_router(name))
        narrow = torch.bfloat16 if config.dtype == "bfloat16" else None
        if config.weights == "bfloat16":
            module.to(torch.bfloat16)
            # The residual stream stays what it is beside float32 weights.
            self.model.model.embed_tokens.register_forward_hook(lambda _module, _args, x_N_D: x_N_D.to(dtype))
        self.sharding = parallelize(module, self.model, mesh, device, read, narrow)
        self.copying = copying(self.model)
        """Products that keep copies of weights until a step changes these."""
        self.pipeline = Pipeline(mesh.pp, dtype, device)
        weights, specs = self.sharding.weights, self.sharding.specs
        self.optimizer: torch.optim.Optimizer = build_optimizer(
            weights.values(), config, [specs[name] for name in weights]
        )
        self.policy_version = 0
        """Completed steps."""
        self.health = Health(config, mesh, rate)

    @abstractmethod
    def _forward(self, microbatch: Microbatch, hidden_M_D: Tensor | None) -> Tensor:
        """Outputs that the objective needs of each target, [R]; before the last stage, hidden states [M, D]."""

    @abstractmethod
    def _loss(self, microbatch: Microbatch, output_R: Tensor, first_R: Tensor | None, totals: Totals) -> Tensor:
        """Sum over one microbatch; what else is to be logged goes to `totals`. `first_R` is the first pass's output."""

    def update(
        self, groups: Sequence[SampleGroup], denominator: int, rollouts: Sequence[RolloutGroup] = ()
    ) -> Generator[None, None, Update]:
        """One step, of `trainer.passes` passes, a microbatch at a time.

        The first pass finds what later ones stay near. One that is not finite is the last, and changes no weights;
        those before it stay.

        Args:
            rollouts: which `groups` were made of, if of any, to name those that are not finite.

        Raises:
            NonFiniteStep: loss or gradient is NaN or infinite, and that ends the run.
        """
        rate = set_learning_rate(self.optimizer, self.policy_version, self.config)
        logged, at_first, grad_norm, finite = list[Logged](), dict[int, Tensor](), 0.0, True
        self.health.begin()
        self.sharding.hold_gradients()
        while finite and len(logged) < self.config.passes:
            logged.append((yield from self.accumulate(groups, denominator, at_first)))
            grad_norm = self.sharding.clip_gradients(self.config.max_grad_norm)
            finite = math.isfinite(grad_norm) and math.isfinite(logged[-1].sums.get("loss", 0.0))
            if finite:
                self.optimizer.step()
                half.forget(self.copying)
            self.optimizer.zero_grad(set_to_none=False)  # a step without any gradient still moves by its momentum
        sums, maxima = merged(logged)
        loss = sums.pop("loss", 0.0) / denominator / len(logged)
        of_pass = f" pass {len(logged)} of {self.config.passes}" if self.config.passes > 1 else ""
        said = f"{self.NAME}step {self.policy_version}{of_pass}: loss {loss}, gradient norm {grad_norm}"
        alone = partial(self.alone, denominator=denominator)
        outsized = "" if finite else self.outsized(rollouts)
        find = partial(find_cause, rollouts, groups, alone) if rollouts else None
        cause = self.health.ended(said, finite, find, outsized)
        self.policy_version += 1
        return Update(
            loss=loss, grad_norm=grad_norm, learning_rate=rate, sums=sums, maxima=maxima, num_passes=len(logged),
            skipped=not finite, cause=cause, outputs=at_first,
        )  # fmt: skip

    def accumulate(
        self, groups: Sequence[SampleGroup], denominator: int, at_first: dict[int, Tensor] | None = None
    ) -> Generator[None, None, Logged]:
        """Gradient of (sum of losses) / `denominator`, a microbatch at a time (with stages: all in one go); sums and
        maxima over all ranks.

        Args:
            at_first: outputs by microbatch at the first pass, which fills it.
        """
        mesh, first = self.mesh, {} if at_first is None else at_first
        shares = self.module.shares_beginnings
        own = own_share(groups, mesh, self.config.microbatch_tokens, shares_beginnings=shares)
        totals = Totals()

        def forward(index: int, hidden_M_D: Tensor | None) -> Tensor:
            output = self._forward(own[index], hidden_M_D)
            if not mesh.pp.is_last:
                return output
            loss = self._loss(own[index], output, first.get(index), totals)
            totals.add({"loss": loss}, {})
            first.setdefault(index, output.detach())
            return loss / denominator

        size = 1 if mesh.pp.size == 1 else max(len(own), 1)
        for start in range(0, len(own), size):
            shapes = [self.module.hidden_shape(microbatch) for microbatch in own[start : start + size]]
            self.pipeline.train(shapes, lambda index, hidden_M_D, start=start: forward(start + index, hidden_M_D))
            yield
        self.sharding.finish_gradients()
        logged, losses = totals.read()
        self.health.computed(losses)
        logged.sums["num_input_tokens"] = float(sum(len(microbatch.token_ids_N) for microbatch in own))
        return merged(mesh.exchange(logged if self.is_logging else Logged({}, {})))

    def alone(self, groups: Sequence[SampleGroup], denominator: int) -> tuple[dict[str, float], float]:
        """Sums and gradient norm of a step on nothing else, which is not taken."""
        sums, _ = finished(self.accumulate(groups, denominator))
        norm = self.sharding.clip_gradients(self.config.max_grad_norm)
        self.optimizer.zero_grad(set_to_none=False)
        return sums, norm

    def outsized(self, groups: Sequence[RolloutGroup] = ()) -> str:
        """A reward or weight that no learning rate has made so large, and the way out; empty: there is none."""
        found = [
            f"the reward of group {group.group_id} rollout {index} is {one.value:g}; bound what the reward gives"
            for group in groups
            for index, one in enumerate(group.results)
            if not abs(one.value) < OUTSIZED
        ]
        for name, weight in self.sharding.weights.items() if not found else ():
            if weight.numel() and not (largest := float(weight.detach().abs().max())) < OUTSIZED:
                found.append(f"{name} holds {largest:g}, as of damaged memory; go on from an earlier checkpoint")
        return next(filter(None, self.mesh.exchange("".join(found[:1]))), "")

    @property
    def is_logging(self) -> bool:
        """The first of each data-parallel rank's tensor and context ranks, on the last stage."""
        return self.mesh.pp.is_last and self.mesh.tp.rank == self.mesh.cp.rank == 0

    def rest(self) -> None:
        """Gives what only a step needs to others on the device: gradients, copies, and memory kept for later."""
        self.sharding.drop_gradients()
        half.forget(self.copying)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reshard(self) -> None:
        """Drops weights gathered for a forward alone: else the next one would use those of before the next step."""
        if self.mesh.shards is not None:
            self.module.reshard()  # pyrefly: ignore[not-callable]

    def shards(self) -> dict[str, tuple[TensorSpec, Tensor]]:
        """Parts that this rank holds of weights, `NAME`, and of the moments of AdamW, `NAME:MOMENT`, once there are
        some.

        Tensors are those in use. Several ranks may hold the same part.
        """
        return held_tensors(self.sharding, self.optimizer)

    def tensor(self, array: np.ndarray) -> Tensor:
        """The array on the device, without waiting for it: small ones lie in the stream when this returns."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def finished(pieces: Generator[None, None, T]) -> T:
    """Does all of them; the result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value
