"""Probes by which trainer and generators are compared after a weight sync. No torch here.

Shape suffixes: T tokens of one sequence, N tokens but the first of each of several sequences.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from llamarl.config import RunConfig
from llamarl.training.probe import CAUSES_EVERY, FIRST_CAUSES, NUM_SEQUENCES, probe_sequences, whole_sequences
from llamarl.training.result import RoutingEffect
from llamarl.types import OBSERVED, CandidateSets, RolloutGroup

if TYPE_CHECKING:
    from llamarl.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseProbe:
    """Sequences as a step learnt from them, to tell what makes the importance ratio (`controller/causes.py`)."""

    version: int
    """Whose weights score them here."""
    sequences: list[np.ndarray]
    """Token ids, int32 [T] each."""
    is_sampled_N: np.ndarray
    """bool; False for prompts and what environments wrote."""
    candidates: CandidateSets
    """Tokens among which they were drawn."""
    logprobs_N: np.ndarray
    """Log-probabilities at the temperature of sampling, computed as steps do; float32."""
    exact_logprobs_N: np.ndarray
    """The same in float32 arithmetic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A few sequences and what the trainer's weights say of them, for generators to compare with."""

    sequences: list[np.ndarray]
    """Token ids, int32 [T] each."""
    logprobs: list[np.ndarray]
    """Log-probabilities of all tokens but the first at temperature 1, float32 [T - 1] each."""
    causes: CauseProbe | None = None
    """Probe by cause that this version is to score, too; None: not now."""
    later: tuple[int, np.ndarray, np.ndarray | None] | None = None
    """Version of a `CauseProbe`, maybe of an earlier one, its `logprobs_N` by the weights of this version, and the same
    among candidates alone; None: no token is left out."""
    routing: RoutingEffect | None = None
    """Effect of router replay on what a `CauseProbe` brings, by the weights with which the step began to learn from it;
    None: not now, or no experts were recorded."""
    causes_s: float = 0.0
    """Seconds that the trainer took for the last three."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Distance between a generator's and the trainer's log-probabilities of the same tokens by the same weights."""

    kl: float
    """Estimate of KL(generator || trainer) per token, in nats."""
    largest: float
    """Largest absolute difference, in nats."""
    mean: float
    """Mean absolute difference, in nats."""
    by_cause: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the causes of the importance ratio, where a `CauseProbe` has ended."""


class Probes:
    """The trainer's. Which versions are probed depends on their number alone, so that all ranks do the same."""

    def __init__(self, trainer: Trainer, config: RunConfig) -> None:
        self._trainer = trainer
        self._every_steps = config.weight_sync.probe_every_steps
        self._temperature = config.rollout.temperature
        self._is_by_cause = config.generator.backend == "native"  # others compute in one way only
        self._groups: Sequence[RolloutGroup] = ()
        """A few of the last step."""
        self._begun: CauseProbe | None = None
        self._ends = -1
        """Version that scores the tokens of `_begun` once more."""
        self._routing: RoutingEffect | None = None
        """Effect on `_groups`."""
        self._routing_s = 0.0

    def step(self, groups: Sequence[RolloutGroup]) -> None:
        """The trainer is about to learn from these."""
        self._groups, start_s = groups[:NUM_SEQUENCES], time.monotonic()
        self._routing = self._routed() if self._begins(self._trainer.policy_version + 1) else None
        self._routing_s = time.monotonic() - start_s

    def of(self, version: int) -> Probe | None:
        """The probe by the trainer's weights, which are this version; None where it is not to be probed."""
        between = version % self._every_steps if self._every_steps and self._groups else 1
        start_s, causes, later, routing, routing_s = time.monotonic(), None, None, None, 0.0
        if self._begins(version):
            self._begun = causes = self._causes(version)
            routing, routing_s = self._routing, self._routing_s
        if self._begun and version == self._ends:
            now_N = causes.logprobs_N if causes else self._scored(self._begun.sequences, half=True)
            cutoffs_N, kept_N = np.concatenate(self._begun.candidates.cutoffs), None
            if not np.isneginf(cutoffs_N).all():
                kept_N = self._scored(self._begun.sequences, half=True, cutoffs_N=cutoffs_N)
            later = self._begun.version, now_N, kept_N
        causes_s = time.monotonic() - start_s + routing_s
        if between and later is None:
            return None
        sequences = probe_sequences(self._groups)
        return Probe(
            sequences=sequences, logprobs=self._trainer.score(sequences), causes=causes, later=later, routing=routing,
            causes_s=causes_s,
        )  # fmt: skip

    def _begins(self, version: int) -> bool:
        """Whether a probe by cause begins with this version."""
        number, between = divmod(version, self._every_steps) if self._every_steps and self._groups else (0, 1)
        return self._is_by_cause and not between and number % CAUSES_EVERY == FIRST_CAUSES

    def _routed(self) -> RoutingEffect | None:
        if not any(group.rollouts[0].routes_bytes for group in self._groups):
            return None
        from llamarl.training.routing import routing_of  # no torch here

        return routing_of(self._trainer, self._groups, half=True)

    def _causes(self, version: int) -> CauseProbe | None:
        sequences, versions_N, cutoffs = whole_sequences(self._groups)
        is_sampled_N = versions_N != OBSERVED
        if not is_sampled_N.any():
            return None
        age = round(version - 1 - float(versions_N[is_sampled_N].mean()))  # of what the step has learnt from
        self._ends = version + min(age, CAUSES_EVERY * self._every_steps - 1)
        logprobs_N = self._scored(sequences, half=True)
        is_exact = self._trainer.config.dtype == "float32"
        return CauseProbe(
            version=version, sequences=sequences, is_sampled_N=is_sampled_N,
            candidates=CandidateSets(temperature=self._temperature, cutoffs=cutoffs),
            logprobs_N=logprobs_N, exact_logprobs_N=logprobs_N if is_exact else self._scored(sequences),
        )  # fmt: skip

    def _scored(
        self, sequences: list[np.ndarray], half: bool = False, cutoffs_N: np.ndarray | None = None
    ) -> np.ndarray:
        return np.concatenate(self._trainer.score(sequences, self._temperature, half, cutoffs_N))
