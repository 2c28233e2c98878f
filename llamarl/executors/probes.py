"""Probes: trainer and generators are compared after a weight sync, and an importance ratio by cause. No torch here.

Shape suffixes: T tokens of one sequence, N tokens but the first of each of several sequences.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llamarl.config import RunConfig
from llamarl.training.probe import NUM_SEQUENCES, CauseProbe, contexts_of, is_probed, probe_sequences
from llamarl.training.result import CauseScores, RoutingEffect
from llamarl.types import RolloutGroup

if TYPE_CHECKING:
    from llamarl.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A few sequences and what the trainer's weights say of them, for generators to compare with."""

    sequences: list[np.ndarray]
    """Token ids, int32 [T] each."""
    logprobs: list[np.ndarray]
    """Log-probabilities of all tokens but the first at temperature 1, float32 [T - 1] each; NaN before the first one
    that is compared."""
    is_compared_N: np.ndarray
    """bool; False for prompts and what environments wrote, which are context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Distance between a generator's and the trainer's log-probabilities of the same tokens by the same weights."""

    kl: float
    """Estimate of KL(generator || trainer) per token, in nats."""
    largest: float
    """Largest absolute difference, in nats."""
    mean: float
    """Mean absolute difference, in nats."""


class Probes:
    """The trainer's. What is probed depends on groups and versions alone, so that all ranks, which begin together, do
    the same."""

    def __init__(self, trainer: Trainer, config: RunConfig) -> None:
        self._trainer = trainer
        self._every_steps, self._first = config.weight_sync.probe_every_steps, 0
        """Steps from a probe to the next, and the first version that was learnt here; 0: none was."""
        self._temperature = config.rollout.temperature
        self._serves_bfloat16 = config.generator.dtype == "bfloat16"
        self._groups: Sequence[RolloutGroup] = ()
        """A few of the last step."""

    def step(self, groups: Sequence[RolloutGroup]) -> CauseScores | None:
        """The trainer is about to learn from these; what it says of those that tell causes."""
        self._groups, start_s = groups[:NUM_SEQUENCES], time.monotonic()
        if (probe := CauseProbe.of(groups, self._temperature)) is None:
            return None
        cutoffs_N, own_N = np.concatenate(probe.candidates.cutoffs), self._scored(probe, half=True)
        if self._trainer.config.dtype == "float32":
            exact_N, unserved = own_N, 0.0
            rounded_N = self._scored(probe, rounded=True) if self._serves_bfloat16 else exact_N
        else:
            exact_N = rounded_N = self._scored(probe, rounded=True)
            distance_N = np.abs(self._scored(probe) - exact_N)[~np.isnan(probe.fresh_N)]
            unserved = float(distance_N.mean()) if distance_N.size else 0.0
        is_whole = np.isneginf(cutoffs_N).all()
        among_N = own_N if is_whole else self._scored(probe, half=True, cutoffs_N=cutoffs_N)
        return CauseScores(
            logprobs_4_N=np.stack((own_N, exact_N, rounded_N, among_N)), unserved=unserved,
            routing=self._routing(probe), seconds=time.monotonic() - start_s,
        )  # fmt: skip

    def of(self, version: int) -> Probe | None:
        """The probe by the trainer's weights, which are this version; None where it is not to be probed."""
        self._first = self._first or (version if self._groups else 0)
        if not self._groups or not is_probed(self._every_steps, version, self._first):
            return None
        sequences, is_sampled_N = probe_sequences(self._groups)
        # Generators serve what the trainer computes with, and float32 masters run ahead of their rounding.
        logprobs = self._trainer.score(sequences, half=True, contexts=contexts_of(sequences, is_sampled_N))
        return Probe(sequences=sequences, logprobs=logprobs, is_compared_N=is_sampled_N)

    def _routing(self, probe: CauseProbe) -> RoutingEffect | None:
        if not any(group.rollouts[0].routes_bytes for group in probe.groups):
            return None
        from llamarl.training.routing import routing_of  # no torch here

        return routing_of(self._trainer, probe.groups, half=True)

    def _scored(
        self, probe: CauseProbe, half: bool = False, cutoffs_N: np.ndarray | None = None, rounded: bool = False
    ) -> np.ndarray:
        """Returns the log-probabilities of the tokens whose `fresh_N` is known, and NaN before the first of them."""
        contexts = contexts_of(probe.sequences, ~np.isnan(probe.fresh_N))
        return np.concatenate(
            self._trainer.score(probe.sequences, self._temperature, half, cutoffs_N, rounded, contexts)
        )
