"""Records that executors receive and answer with, and probes that compare trainer and generators.

The controller reads the records, so this module imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from llamarl.config import RunConfig
from llamarl.config.roles import LoraConfig
from llamarl.training.probe import NUM_SEQUENCES, CauseProbe, contexts_of, is_probed, probe_sequences
from llamarl.training.result import CauseScores, RoutingEffect
from llamarl.types import RewardResult, Rollout, RolloutGroup
from llamarl.weight_sync.layout import Address

if TYPE_CHECKING:
    from llamarl.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """How a generator works together with a trainer."""

    delta: bool = False
    """Weights may come as changes of the version in use."""
    lora: LoraConfig | None = None
    """Settings of the adapters that come in the place of weights. None means that weights come."""
    sleeps: bool = False
    """Use memory only from an adoption until the next call of `sleep`."""
    beside_bytes: int = 0
    """Memory of the device that the trainer will use from its first step on, while the generator works."""


UNPAIRED = Pairing()
"""For a generator that serves a model as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A few sequences with the trainer's log-probabilities, for generators to compare with."""

    sequences: list[np.ndarray]
    """Token ids, int32 [T] each."""
    logprobs: list[np.ndarray]
    """Log-probabilities of all tokens but the first at temperature 1, float32 [T - 1] each. NaN before the first
    compared token."""
    is_compared_N: np.ndarray
    """bool. False for prompts and text of environments, which are only context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Distance between a generator's and the trainer's log-probabilities of the same tokens with the same weights."""

    kl: float
    """Estimate of KL(generator || trainer) per token, in nats."""
    largest: float
    """Largest absolute difference, in nats."""
    mean: float
    """Mean absolute difference, in nats."""


class Probes:
    """Creates the trainer's probes. They depend only on groups and versions, so that all ranks create the same ones at
    once."""

    def __init__(self, trainer: Trainer, config: RunConfig) -> None:
        self._trainer = trainer
        self._every_steps, self._first = config.weight_sync.probe_every_steps, 0
        """Steps between two probes, and the first version that was trained here. 0 means none."""
        self._temperature = config.rollout.temperature
        self._serves_bfloat16 = config.generator.dtype == "bfloat16"
        self._groups: Sequence[RolloutGroup] = ()
        """A few groups of the last step."""

    def step(self, groups: Sequence[RolloutGroup]) -> CauseScores | None:
        """Prepares for a step on these groups. Returns the trainer's scores of sequences that show causes, or None."""
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
        is_rounded = self._serves_bfloat16 or self._trainer.config.dtype != "float32"
        recurrent_N = (
            self._scored(probe, rounded=is_rounded, recurrent=True) if self._trainer.model.shape.delta else None
        )
        is_whole = np.isneginf(cutoffs_N).all()
        among_N = own_N if is_whole else self._scored(probe, half=True, cutoffs_N=cutoffs_N)
        return CauseScores(
            logprobs_4_N=np.stack((own_N, exact_N, rounded_N, among_N)), recurrent_N=recurrent_N, unserved=unserved,
            routing=self._routing(probe), seconds=time.monotonic() - start_s,
        )  # fmt: skip

    def of(self, version: int) -> Probe | None:
        """Returns a probe with the trainer's weights of this version. None means that this version is not probed."""
        self._first = self._first or (version if self._groups else 0)
        if not self._groups or not is_probed(self._every_steps, version, self._first):
            return None
        sequences, is_sampled_N = probe_sequences(self._groups)
        # Generators use the trainer's compute type. Its float32 master weights differ by rounding.
        logprobs = self._trainer.score(sequences, half=True, contexts=contexts_of(sequences, is_sampled_N))
        return Probe(sequences=sequences, logprobs=logprobs, is_compared_N=is_sampled_N)

    def _routing(self, probe: CauseProbe) -> RoutingEffect | None:
        if not any(group.rollouts[0].routes_bytes for group in probe.groups):
            return None
        from llamarl.training.routing import routing_of  # imports torch

        return routing_of(self._trainer, probe.groups, half=True)

    def _scored(
        self,
        probe: CauseProbe,
        half: bool = False,
        cutoffs_N: np.ndarray | None = None,
        rounded: bool = False,
        recurrent: bool = False,
    ) -> np.ndarray:
        """Returns the log-probabilities of the tokens whose `fresh_N` is known, and NaN before the first of them."""
        contexts = contexts_of(probe.sequences, ~np.isnan(probe.fresh_N))
        return np.concatenate(
            self._trainer.score(probe.sequences, self._temperature, half, cutoffs_N, rounded, contexts, recurrent)
        )


REPLY_INTERVAL_S = 0.02
"""Shortest time between two replies with finished rollouts that are waited for, unless the generator is idle."""
GROUPS_INTERVAL_S = 0.5
"""Shortest time between two replies with complete groups, unless a step lacks only these."""
LATEST_S = 1.0
"""Longest time until rollouts of incomplete groups are sent. Rollouts that were sent survive a crash."""


class GeneratorStats(NamedTuple):
    """Current and total counters of a generator. Totals are sums over its forward passes, from which a line of seconds
    over rows can be fitted.

    Seconds are processor time on a CPU, where other processes may use the core, too, and wall time on other devices.
    """

    num_running: int = 0
    """Rollouts that are decoding."""
    num_waiting: int = 0
    """Rollouts that are queued or parked."""
    generated_tokens: int = 0
    """Sampled tokens."""
    decode_steps: float = 0
    """Forward passes without prefill."""
    decode_rows: float = 0
    """Sum of the rollouts in these passes."""
    decode_rows_squared: float = 0
    """Sum of the squared rollouts in these passes."""
    decode_s: float = 0.0
    """Seconds of these passes."""
    decode_rows_s: float = 0.0
    """Sum of rollouts times seconds."""
    prefill_steps: float = 0
    """Forward passes with prefill."""
    prefill_rows: float = 0
    """Sum of the rollouts that decoded in these passes."""
    prefill_tokens: float = 0
    """Prompt tokens in these passes."""
    prefill_s: float = 0.0
    """Seconds of these passes."""
    background_s: float = 0.0
    """Processor seconds of other threads of the process: messages."""
    recomputed_tokens: float = 0
    """Tokens prefilled again after weights changed (`generator.kv_on_update`)."""
    recompute_s: float = 0.0
    """Seconds of these prefills. `prefill_s` includes them."""

    def forward(self, rows: int, prefill_tokens: int, seconds: float) -> GeneratorStats:
        """Returns the counters with one more forward pass."""
        if prefill_tokens:
            new = GeneratorStats(prefill_steps=1, prefill_rows=rows, prefill_tokens=prefill_tokens, prefill_s=seconds)
        else:
            new = GeneratorStats(decode_steps=1, decode_rows=rows, decode_rows_squared=rows * rows, decode_s=seconds)
            new = new._replace(decode_rows_s=rows * seconds)
        return self.plus(new)

    def plus(self, other: GeneratorStats) -> GeneratorStats:
        """Returns the sum of both."""
        return GeneratorStats._make(a + b for a, b in zip(self, other, strict=True))

    def since(self, start: GeneratorStats) -> dict[str, float]:
        """Returns sums over the forward passes since `start`, by name."""
        return {name: float(a - b) for name, a, b in list(zip(self._fields, self, start, strict=True))[3:]}


NO_STATS = GeneratorStats()


class JournalPosition(TypedDict):
    """Part of the journal that is needed to resume from a moment."""

    first: int
    """First file that is needed."""
    segment: int
    """File that was being written."""
    bytes: int
    """Size of the file `segment` at that moment, in bytes."""


class ControllerState(TypedDict):
    """State of the controller in a checkpoint, as plain JSON."""

    step: int
    """Completed optimizer steps."""
    sampler: dict[str, Any]
    """`PromptOrder.state`."""
    next_group_id: int
    unconsumed: list[tuple[int, int]]
    """Group id and prompt index of each group that was admitted and not trained on."""
    num_dropped: NotRequired[int]
    """`RolloutBuffer.num_dropped`. States of earlier versions lack it."""
    journal: NotRequired[JournalPosition]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """Finished, parked and aborted rollouts of a generator, and its counters."""

    rollouts: list[Rollout]
    """Complete rollouts. Resumed ones include the tokens of their request."""
    stats: GeneratorStats = NO_STATS


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A version that generators can fetch."""

    version: int
    """Optimizer steps of the weights."""
    addresses: Mapping[str, Address]
    """Addresses of the version by transport in use."""
    probe: Probe | None = None
    """Probe with the same weights. None means that this version is not probed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoption:
    """Outcome of an adoption. Rank 0 answers for all ranks, which adopt together or not at all."""

    version: int
    """The requested version."""
    outcome: Literal["adopted", "superseded", "mismatch", "failed"] = "adopted"
    """adopted: the version is in use; superseded: it was dropped before it had arrived; mismatch: it is not what was
    published; failed: it could not be fetched. In the last three cases, the old version stays in use."""
    reason: str = ""
    """Reason of a mismatch or failure: one sentence with tensor, version and rank."""
    fetch_s: float = 0.0
    """Seconds of fetching and verifying, while decoding continues."""
    stall_s: float = 0.0
    """Seconds without decoding."""
    num_bytes: int = 0
    """Received bytes of all ranks. Only changes count if only changes are sent."""
    fingerprint: str = ""
    """Fingerprint of the weights in use, over all tensors and ranks, in hexadecimal digits."""
    tensors: str = ""
    """Last eight digits of each tensor's fingerprint, rank by rank, in the order of `weight_specs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredResponse:
    """A response with its reward."""

    response: str
    """Decoded text without special tokens."""
    result: RewardResult


class Replied(NamedTuple):
    """An environment's reply to an episode."""

    group_id: int
    index: int
    num_tokens: int
    """Tokens of the episode at the request, which identify the turn."""
    observation_T: np.ndarray | None
    """Token ids to continue from, int32. None means that the episode has ended."""
    result: RewardResult | None
    """Reward of the environment, or why it is INVALID. None means that the episode continues, or that `[reward]` scores
    it."""
    seconds: float
    """Seconds until the reply."""
    calls: tuple[int, int] = (0, 0)
    """Tool calls in the turn, and how many of them were malformed or failed."""
    turn_reward: float = 0.0
    """Reward of the turn, if the episode continues."""
