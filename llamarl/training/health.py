"""Health of a step: how far the policy has moved from the one that sampled, and what made it non-finite.

Shape suffix: R response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from llamarl.algorithms.kl import MAX_LOG_RATIO
from llamarl.config.schema import TrainerConfig
from llamarl.distributed.mesh import RankMesh
from llamarl.training.result import NonFiniteStep
from llamarl.types import RolloutGroup, SampleGroup

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
