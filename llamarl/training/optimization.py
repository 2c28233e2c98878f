"""`Totals`: what a rank's microbatches add up to. Values stay on the device until all of them are read at once.

Health of a step: how far the policy has moved from the one that sampled, and what made it non-finite.

Shape suffix: R response tokens.

`Optimization`: a model in training, whatever its objective, together with the other ranks of a mesh.

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
from llamarl.training.policy import Model, RankModel, copying, own_share, set_compute
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
        """All together, and the loss of each microbatch. Waits for the device, once."""
        values = [value for _, value in (*self._sums, *self._maxima)]
        numbers = iter(torch.stack(values).tolist() if values else ())
        sums = [Logged({name: next(numbers)}, {}) for name, _ in self._sums]
        maxima = [Logged({}, {name: next(numbers)}) for name, _ in self._maxima]
        return merged((*sums, *maxima)), [one.sums["loss"] for one in sums if "loss" in one.sums]


def merged(logged: Iterable[Logged]) -> Logged:
    """Sums added, maxima compared."""
    all_sums, all_maxima = dict[str, float](), dict[str, float]()
    for sums, maxima in logged:
        for name, value in sums.items():
            all_sums[name] = all_sums.get(name, 0.0) + value
        for name, value in maxima.items():
            all_maxima[name] = max(all_maxima.get(name, -math.inf), value)
    return Logged(all_sums, all_maxima)


MAX_NAMED_GROUPS = 4
"""Groups in which the rollouts at fault are looked for: each rollout costs a forward and backward."""
PARTS = ("staleness", "same_version")
Alone = Callable[[Sequence[SampleGroup]], tuple[dict[str, float], float]]
"""alone(groups): sums to log, the loss among them, and gradient norm of a step on nothing else."""


class Health:
    """Watches the steps of a trainer or a critic for what is not finite. All ranks decide alike."""

    def __init__(self, config: TrainerConfig, mesh: RankMesh, rate: str = "trainer.learning_rate") -> None:
        """`rate` is the option of the learning rate."""
        self.num_skipped_in_row = 0
        self._config = config
        self._mesh = mesh
        self._rate = rate
        self._first_bad = ""
        """Microbatch of this rank's share."""

    def begin(self) -> None:
        """Begins a step."""
        self._first_bad = ""

    def computed(self, losses: Sequence[float]) -> None:
        """Loss of each microbatch of this rank."""
        bad = (number for number, loss in enumerate(losses, 1) if not math.isfinite(loss))
        if not self._first_bad and (first := next(bad, None)):
            self._first_bad = f"microbatch {first} of {len(losses)}"
            if self._mesh.fsdp.size > 1:
                self._first_bad += f" on fsdp rank {self._mesh.fsdp.rank}"

    def ended(self, said: str, is_finite: bool, find: Callable[[], str] | None = None, known: str = "") -> str:
        """Why the step is to be skipped; empty when it is not.

        Args:
            find: see `find_cause`.
            known: a cause that needs no search, with the way out.

        Raises:
            NonFiniteStep: it ends the run, by `trainer.on_nonfinite` or `trainer.max_skipped_steps`.
        """
        if is_finite:
            self.num_skipped_in_row = 0
            return ""
        places = ", ".join(dict.fromkeys(place for place in self._mesh.exchange(self._first_bad) if place))
        cause = f"{said}{places and f' from {places}'}"
        found = known or (find() if find else "")
        cause += found and f": {found}"
        if self._config.on_nonfinite == "stop":
            fix = "" if known else f"; lower {self._rate}, or set trainer.on_nonfinite = 'skip'"
            raise NonFiniteStep(cause + fix)
        self.num_skipped_in_row += 1
        if self.num_skipped_in_row == self._config.max_skipped_steps:
            raise NonFiniteStep(f"{cause}; {self.num_skipped_in_row} steps in a row (trainer.max_skipped_steps)")
        return cause


def age_sums(
    logprobs_R: Tensor, behavior_logprobs_R: Tensor, loss_mask_R: Tensor, is_stale_R: Tensor
) -> dict[str, Tensor]:
    """Sums over tokens that an older version sampled, and over those of the version in training, for `split_by_age`."""
    sums = dict[str, Tensor]()
    for part, of_part_R in zip(PARTS, (is_stale_R, ~is_stale_R), strict=True):
        own_R = loss_mask_R & of_part_R
        log_ratio_R = (logprobs_R.detach() - behavior_logprobs_R).masked_fill(~own_R, 0.0)
        log_ratio_R = log_ratio_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        excess_R = log_ratio_R.expm1()
        sums |= {f"{part}_tokens": own_R.sum(), f"{part}_excess": excess_R.sum()}
        sums |= {f"{part}_kl": (excess_R - log_ratio_R).sum(), f"{part}_size": log_ratio_R.abs().sum()}
    return sums


def split_by_age(sums: dict[str, float]) -> dict[str, float]:
    """Importance ratio, KL to the behavior policy and size of the log-ratio in two parts; takes what `age_sums` gave
    out of `sums`.

    Tokens of older versions differ by training, kernels and precision (staleness); those of the version in training by
    the latter two alone (same_version). Each is a mean over its own tokens, and missing where there are none:
    ``kl_to_behavior = stale_share * kl_staleness + (1 - stale_share) * kl_same_version``, of a batch's first pass.
    """
    taken = {part: [sums.pop(f"{part}_{what}", 0.0) for what in ("tokens", "excess", "kl", "size")] for part in PARTS}
    found = {"stale_share": taken["staleness"][0] / max(taken["staleness"][0] + taken["same_version"][0], 1)}
    for part, (tokens, excess, kl, size) in taken.items():
        if tokens:
            found |= {f"importance_ratio_{part}": 1 + excess / tokens, f"kl_{part}": kl / tokens}
            found[f"difference_{part}"] = size / tokens
    return found


def find_cause(groups: Sequence[RolloutGroup], computed: Sequence[SampleGroup], alone: Alone) -> str:
    """Which rollouts make a step non-finite, by computing each group and then its rollouts alone.

    Args:
        groups: of the step.
        computed: what the step learns from, one for each group.
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
        return f"every group, which points at weights or loss, first of all {named[0]}"
    more = [f"{num_bad - MAX_NAMED_GROUPS} more groups"] if num_bad > MAX_NAMED_GROUPS else []
    return "; ".join(named + more) or "no group by itself: their sum is not finite"


def _fault(sums: dict[str, float], grad_norm: float) -> str:
    """Name of what is not finite first in the order of computation; empty when all is finite."""
    for name, value in {
        "log-probs": sums.get("kl_to_behavior", 0.0), "loss": sums.get("loss", 0.0), "gradient": grad_norm
    }.items():  # fmt: skip
        if not math.isfinite(value):
            return name
    return ""


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
