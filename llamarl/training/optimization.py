"""`Optimization`: the optimizer step of a model with any objective, together with the other ranks of a mesh.

`Totals` sums the numbers of a rank's microbatches. Values stay on the device until all are read at once. `Health` finds
what made a step non-finite. `age_sums` measures how far the policy has moved from the one that sampled.

Shape suffixes: R response tokens (targets), M rows of this rank, D model dim.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from llamarl.algorithms.kl import MAX_LOG_RATIO
from llamarl.config.schema import TrainerConfig
from llamarl.distributed.mesh import RankMesh
from llamarl.kernels import half, products
from llamarl.sharding.tensor_parallel import is_router
from llamarl.training.optimizer import build_optimizer, set_learning_rate
from llamarl.training.packing import Microbatch
from llamarl.training.parallel import Pipeline, Read, held_tensors, parallelize
from llamarl.training.policy import Model, RankModel, copying, rank_share, set_compute
from llamarl.training.result import NonFiniteStep
from llamarl.types import RolloutGroup, SampleGroup
from llamarl.weight_sync.layout import TensorSpec


class Logged(NamedTuple):
    """Sums and maxima, by name."""

    sums: dict[str, float]
    maxima: dict[str, float]


class Totals:
    """Scalars of the microbatches of one pass."""

    def __init__(self) -> None:
        self._sums = list[tuple[str, Tensor]]()
        self._maxima = list[tuple[str, Tensor]]()

    def add(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> None:
        """Adds the scalars of one microbatch. Does not wait for the device."""
        self._sums += ((name, value.detach().double()) for name, value in sums.items())
        self._maxima += ((name, value.detach().double()) for name, value in maxima.items())

    def read(self) -> tuple[Logged, list[float]]:
        """Returns all sums and maxima, and the loss of each microbatch. Waits for the device once."""
        values = [value for _, value in (*self._sums, *self._maxima)]
        numbers = iter(torch.stack(values).tolist() if values else ())
        sums = [Logged({name: next(numbers)}, {}) for name, _ in self._sums]
        maxima = [Logged({}, {name: next(numbers)}) for name, _ in self._maxima]
        return merged((*sums, *maxima)), [logged.sums["loss"] for logged in sums if "loss" in logged.sums]


def merged(logged: Iterable[Logged]) -> Logged:
    """Adds sums and takes the largest of maxima."""
    all_sums, all_maxima = dict[str, float](), dict[str, float]()
    for sums, maxima in logged:
        for name, value in sums.items():
            all_sums[name] = all_sums.get(name, 0.0) + value
        for name, value in maxima.items():
            all_maxima[name] = max(all_maxima.get(name, -math.inf), value)
    return Logged(all_sums, all_maxima)


MAX_NAMED_GROUPS = 4
"""Largest number of groups in which the faulty rollouts are searched. Each rollout costs a forward and backward."""
MAX_SKIPPED_STEPS = 3
"""Consecutive skipped steps that end the run."""
PARTS = ("staleness", "same_version")
Alone = Callable[[Sequence[SampleGroup]], tuple[dict[str, float], float]]
"""alone(groups): returns the sums to log, including the loss, and the gradient norm of a step on these groups only."""


class Health:
    """Checks the steps of a trainer or a critic for non-finite numbers. All ranks decide alike."""

    def __init__(self, config: TrainerConfig, mesh: RankMesh, rate: str = "trainer.learning_rate") -> None:
        """
        Args:
            rate: name of the option of the learning rate.
        """
        self.num_skipped_in_row = 0
        self._config = config
        self._mesh = mesh
        self._rate = rate
        self._first_bad = ""
        """First non-finite microbatch of this rank's share."""

    def begin(self) -> None:
        """Begins a step."""
        self._first_bad = ""

    def computed(self, losses: Sequence[float]) -> None:
        """Receives the loss of each microbatch of this rank."""
        bad = (number for number, loss in enumerate(losses, 1) if not math.isfinite(loss))
        if not self._first_bad and (first := next(bad, None)):
            self._first_bad = f"microbatch {first} of {len(losses)}"
            if self._mesh.fsdp.size > 1:
                self._first_bad += f" on fsdp rank {self._mesh.fsdp.rank}"

    def ended(self, text: str, is_finite: bool, find: Callable[[], str] | None = None, known: str = "") -> str:
        """Ends a step. Returns why it is to be skipped, or "" if it is not.

        Args:
            text: describes the step.
            find: see `find_cause`.
            known: a cause that needs no search, with its fix.

        Raises:
            NonFiniteStep: the step ends the run, by `trainer.on_nonfinite`, or after MAX_SKIPPED_STEPS.
        """
        if is_finite:
            self.num_skipped_in_row = 0
            return ""
        places = ", ".join(dict.fromkeys(place for place in self._mesh.exchange(self._first_bad) if place))
        cause = f"{text}{places and f' from {places}'}"
        details = known or (find() if find else "")
        cause += details and f": {details}"
        lower = "" if known else f"; lower {self._rate}"
        if self._config.on_nonfinite == "stop":
            raise NonFiniteStep(cause + (lower and f"{lower}, or set trainer.on_nonfinite = 'skip'"))
        self.num_skipped_in_row += 1
        if self.num_skipped_in_row == MAX_SKIPPED_STEPS:
            raise NonFiniteStep(f"{cause}; {self.num_skipped_in_row} steps in a row{lower}")
        return cause


def age_sums(
    logprobs_R: Tensor, behavior_logprobs_R: Tensor, loss_mask_R: Tensor, is_stale_R: Tensor
) -> dict[str, Tensor]:
    """Returns sums over tokens that an older version sampled, and over tokens of the version in training, for
    `split_by_age`."""
    sums = dict[str, Tensor]()
    for part, of_part_R in zip(PARTS, (is_stale_R, ~is_stale_R), strict=True):
        mask_R = loss_mask_R & of_part_R
        log_ratio_R = (logprobs_R.detach() - behavior_logprobs_R).masked_fill(~mask_R, 0.0)
        log_ratio_R = log_ratio_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        excess_R = log_ratio_R.expm1()
        sums |= {f"{part}_tokens": mask_R.sum(), f"{part}_excess": excess_R.sum()}
        sums |= {f"{part}_kl": (excess_R - log_ratio_R).sum(), f"{part}_size": log_ratio_R.abs().sum()}
    return sums


def split_by_age(sums: dict[str, float]) -> dict[str, float]:
    """Returns importance ratio, KL to the behavior policy and size of the log-ratio in two parts. Removes the sums of
    `age_sums` from `sums`.

    Tokens of older versions differ by training, kernels and precision (staleness). Tokens of the version in training
    differ only by kernels and precision (same_version). Each number is a mean over the tokens of its part, and is
    missing if there are none: ``kl_to_behavior = stale_share * kl_staleness + (1 - stale_share) * kl_same_version``, of
    a batch's first pass.
    """
    names = ("tokens", "excess", "kl", "size")
    parts = {part: [sums.pop(f"{part}_{name}", 0.0) for name in names] for part in PARTS}
    stale, current = parts["staleness"][0], parts["same_version"][0]
    metrics = {"stale_share": stale / max(stale + current, 1)}
    for part, (tokens, excess, kl, size) in parts.items():
        if tokens:
            metrics |= {f"importance_ratio_{part}": 1 + excess / tokens, f"kl_{part}": kl / tokens}
            metrics[f"difference_{part}"] = size / tokens
    return metrics


def find_cause(groups: Sequence[RolloutGroup], computed: Sequence[SampleGroup], alone: Alone) -> str:
    """Returns which rollouts make a step non-finite. Computes each group and then its rollouts alone.

    Args:
        groups: groups of the step.
        computed: samples that the step learns from, for each group.
    """
    named, num_bad = list[str](), 0
    for group, part in zip(groups, computed, strict=True):
        if not part.samples or not _fault(*alone([part])):
            continue
        num_bad += 1
        if num_bad > MAX_NAMED_GROUPS:
            continue
        faults = list[str]()
        for sample in part.samples:
            fault = _fault(*alone([replace(part, samples=(sample,))]))
            if fault:
                fault = fault if np.isfinite(sample.behavior_logprobs_T).all() else "behavior log-probs"
                index = next(r.index for r in group.rollouts if np.may_share_memory(r.token_ids_T, sample.token_ids_T))
                faults.append(f"{index} ({fault})")
        named.append(f"group {group.group_id} rollout {', '.join(faults)}" if faults else f"group {group.group_id}")
    num_computed = sum(bool(part.samples) for part in computed)
    if num_bad == num_computed > 1:
        return f"every group, so check weights and loss; the first is {named[0]}"
    more = [f"{num_bad - MAX_NAMED_GROUPS} more groups"] if num_bad > MAX_NAMED_GROUPS else []
    return "; ".join(named + more) or "no single group: their sum is not finite"


def _fault(sums: dict[str, float], grad_norm: float) -> str:
    """Returns the name of the number that is non-finite first in the order of computation, or "" if all are finite."""
    for name, value in {
        "log-probs": sums.get("kl_to_behavior", 0.0), "loss": sums.get("loss", 0.0), "gradient": grad_norm
    }.items():  # fmt: skip
        if not math.isfinite(value):
            return name
    return ""


T = TypeVar("T")
OUTSIZED = 1e9
"""Bound for rewards and weights. Training alone does not reach it: learning rates are 10 at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Numbers of a step, for any objective."""

    loss: float
    """Mean of the passes, over the denominator."""
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
    """Outputs of the first pass, by microbatch of this rank, on the device. Empty before the last pipeline stage."""


class Optimization(ABC, Generic[Model]):
    """Master weights in `config.weights`, compute in `config.dtype`; microbatches, passes, gradients and steps.

    All ranks of `mesh` make the same calls, in the same order, with the same groups; each computes its share.
    """

    NAME: ClassVar[str] = ""
    """Prefix of `step` in messages."""

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
            module: holds the whole model. Parts that other ranks compute with are dropped.
            dtype: type of hidden states between pipeline stages.
            read: reads the weights of a model on the meta device.
            rate: name of the option of the learning rate.
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
            # The residual stream keeps the type that it has with float32 weights.
            self.model.model.embed_tokens.register_forward_hook(lambda _module, _args, x_N_D: x_N_D.to(dtype))
        self.sharding = parallelize(module, self.model, mesh, device, read, narrow)
        self.copying = copying(self.model)
        """Products that keep copies of weights, which must be dropped after each change of the weights."""
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
        """Returns the outputs of each target that the objective needs, [R]; before the last stage, hidden states [M,
        D]."""

    @abstractmethod
    def _loss(self, microbatch: Microbatch, output_R: Tensor, first_R: Tensor | None, totals: Totals) -> Tensor:
        """Returns the sum over one microbatch, and adds other numbers to be logged to `totals`.

        Args:
            first_R: the first pass's output; None means that this is the first pass.
        """

    def update(
        self, groups: Sequence[SampleGroup], denominator: int, rollouts: Sequence[RolloutGroup] = ()
    ) -> Generator[None, None, Update]:
        """Takes one step of `trainer.passes` passes, a microbatch at a time.

        The first pass stores the outputs that later passes stay near. A non-finite pass is the last, and changes no
        weights. Earlier passes stay.

        Args:
            rollouts: rollouts of `groups`, to name non-finite ones. May be empty.

        Raises:
            NonFiniteStep: loss or gradient is NaN or infinite, and that ends the run.
        """
        rate = set_learning_rate(self.optimizer, self.policy_version, self.config)
        logged, first_outputs, grad_norm, finite = list[Logged](), dict[int, Tensor](), 0.0, True
        self.health.begin()
        self.sharding.hold_gradients()
        while finite and len(logged) < self.config.passes:
            logged.append((yield from self.accumulate(groups, denominator, first_outputs)))
            grad_norm = self.sharding.clip_gradients(self.config.max_grad_norm)
            finite = math.isfinite(grad_norm) and math.isfinite(logged[-1].sums.get("loss", 0.0))
            if finite:
                self.optimizer.step()
                half.forget(self.copying)
            self.optimizer.zero_grad(set_to_none=False)  # without a gradient a step still moves by its momentum
        sums, maxima = merged(logged)
        loss = sums.pop("loss", 0.0) / denominator / len(logged)
        of_pass = f" pass {len(logged)} of {self.config.passes}" if self.config.passes > 1 else ""
        text = f"{self.NAME}step {self.policy_version}{of_pass}: loss {loss}, gradient norm {grad_norm}"
        alone = partial(self.alone, denominator=denominator)
        outsized = "" if finite else self.outsized(rollouts)
        find = partial(find_cause, rollouts, groups, alone) if rollouts else None
        cause = self.health.ended(text, finite, find, outsized)
        self.policy_version += 1
        return Update(
            loss=loss, grad_norm=grad_norm, learning_rate=rate, sums=sums, maxima=maxima, num_passes=len(logged),
            skipped=not finite, cause=cause, outputs=first_outputs,
        )  # fmt: skip

    def accumulate(
        self, groups: Sequence[SampleGroup], denominator: int, first_outputs: dict[int, Tensor] | None = None
    ) -> Generator[None, None, Logged]:
        """Accumulates the gradient of (sum of losses) / `denominator`, a microbatch at a time (with pipeline stages:
        all in one call). Returns sums and maxima over all ranks.

        Args:
            first_outputs: outputs by microbatch of the first pass, which fills it.
        """
        mesh, first = self.mesh, {} if first_outputs is None else first_outputs
        shares = self.module.shares_beginnings
        share = rank_share(groups, mesh, self.config.microbatch_tokens, shares_beginnings=shares)
        totals = Totals()

        def forward(index: int, hidden_M_D: Tensor | None) -> Tensor:
            output = self._forward(share[index], hidden_M_D)
            if not mesh.pp.is_last:
                return output
            loss = self._loss(share[index], output, first.get(index), totals)
            totals.add({"loss": loss}, {})
            first.setdefault(index, output.detach())
            return loss / denominator

        size = 1 if mesh.pp.size == 1 else max(len(share), 1)
        for start in range(0, len(share), size):
            shapes = [self.module.hidden_shape(microbatch) for microbatch in share[start : start + size]]
            self.pipeline.train(shapes, lambda index, hidden_M_D, start=start: forward(start + index, hidden_M_D))
            yield
        self.sharding.finish_gradients()
        logged, losses = totals.read()
        self.health.computed(losses)
        logged.sums["num_input_tokens"] = float(sum(len(microbatch.token_ids_N) for microbatch in share))
        return merged(mesh.exchange(logged if self.is_logging else Logged({}, {})))

    def alone(self, groups: Sequence[SampleGroup], denominator: int) -> tuple[dict[str, float], float]:
        """Returns sums and gradient norm of a step on `groups` only, without taking it."""
        sums, _ = finished(self.accumulate(groups, denominator))
        norm = self.sharding.clip_gradients(self.config.max_grad_norm)
        self.optimizer.zero_grad(set_to_none=False)
        return sums, norm

    def outsized(self, groups: Sequence[RolloutGroup] = ()) -> str:
        """Returns a reward or weight too large for any learning rate to have caused, with the fix, or "" if there is
        none."""
        causes = [
            f"the reward of group {group.group_id} rollout {index} is {result.value:g}; bound the reward's values"
            for group in groups
            for index, result in enumerate(group.results)
            if not abs(result.value) < OUTSIZED
        ]
        for name, weight in self.sharding.weights.items() if not causes else ():
            if weight.numel() and not (largest := float(weight.detach().abs().max())) < OUTSIZED:
                causes.append(f"{name} holds {largest:g}, perhaps from damaged memory; resume from an older checkpoint")
        return next(filter(None, self.mesh.exchange("".join(causes[:1]))), "")

    @property
    def is_logging(self) -> bool:
        """True for the first of each data-parallel rank's tensor and context ranks, on the last stage."""
        return self.mesh.pp.is_last and self.mesh.tp.rank == self.mesh.cp.rank == 0

    def rest(self) -> None:
        """Frees memory that only a step needs for others on the device: gradients, copies, and memory kept for
        later."""
        self.sharding.drop_gradients()
        half.forget(self.copying)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reshard(self) -> None:
        """Drops weights that were gathered for a forward without a step. Otherwise the next forward would use outdated
        ones."""
        if self.mesh.shards is not None:
            self.module.reshard()  # pyrefly: ignore[not-callable]

    def shards(self) -> dict[str, tuple[TensorSpec, Tensor]]:
        """Returns parts that this rank holds: of weights, `NAME`, and of the moments of AdamW, `NAME:MOMENT`, once
        there are some.

        Tensors are those in use. Several ranks may hold the same part.
        """
        return held_tensors(self.sharding, self.optimizer)

    def tensor(self, array: np.ndarray) -> Tensor:
        """Returns the array on the device, without waiting for it. Small arrays are in the stream when this returns."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def finished(pieces: Generator[None, None, T]) -> T:
    """Runs a generator to its end. Returns its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value
