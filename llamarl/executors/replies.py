"""Records that executors answer with. No torch: the controller reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from llamarl.executors.probes import Probe
from llamarl.types import RewardResult, Rollout
from llamarl.weight_sync.layout import Address

REPLY_INTERVAL_S = 0.02
"""Finished rollouts that somebody waits for are handed over at most this often, unless there is nothing else to do."""
GROUPS_INTERVAL_S = 0.5
"""Whole groups are handed over at most this often, unless a step lacks no others."""
LATEST_S = 1.0
"""Rollouts of groups that are not whole are handed over after this time: what is handed over is not lost in a crash."""


class GeneratorStats(NamedTuple):
    """Counters of what a generator does, and has done since its start: sums over its forwards, so that a line through
    (rows, seconds) is in them.

    Seconds are processor time on a CPU, where others may use the core too, and wall time on other devices.
    """

    num_running: int = 0
    """Rollouts being decoded now."""
    num_waiting: int = 0
    """Rollouts queued or parked now."""
    generated_tokens: int = 0
    """Tokens sampled."""
    decode_steps: float = 0
    """Forwards without prefill."""
    decode_rows: float = 0
    """Sum of the rollouts in them."""
    decode_rows_squared: float = 0
    """Sum of the squares of the same."""
    decode_s: float = 0.0
    """Seconds of these forwards."""
    decode_rows_s: float = 0.0
    """Sum of rollouts times seconds."""
    prefill_steps: float = 0
    """Forwards with prefill."""
    prefill_rows: float = 0
    """Sum of the rollouts that decoded in them."""
    prefill_tokens: float = 0
    """Prompt tokens computed in them."""
    prefill_s: float = 0.0
    """Seconds of these forwards."""
    background_s: float = 0.0
    """Processor seconds of the process outside its executor's thread: messages."""
    recomputed_tokens: float = 0
    """Tokens prefilled again because weights had changed (`generator.kv_on_update`)."""
    recompute_s: float = 0.0
    """Seconds of that; they are in `prefill_s` too."""

    def forward(self, rows: int, prefill_tokens: int, seconds: float) -> GeneratorStats:
        """One forward more."""
        if prefill_tokens:
            new = GeneratorStats(prefill_steps=1, prefill_rows=rows, prefill_tokens=prefill_tokens, prefill_s=seconds)
        else:
            new = GeneratorStats(decode_steps=1, decode_rows=rows, decode_rows_squared=rows * rows, decode_s=seconds)
            new = new._replace(decode_rows_s=rows * seconds)
        return self.plus(new)

    def plus(self, other: GeneratorStats) -> GeneratorStats:
        """Both together."""
        return GeneratorStats._make(a + b for a, b in zip(self, other, strict=True))

    def since(self, start: GeneratorStats) -> dict[str, float]:
        """Sums over the forwards after `start`, by name."""
        return {name: float(a - b) for name, a, b in list(zip(self._fields, self, start, strict=True))[3:]}


NO_STATS = GeneratorStats()


class JournalPosition(TypedDict):
    """Part of the journal that it takes to go on from a moment."""

    first: int
    """The first file that is needed."""
    segment: int
    """The file that was written."""
    bytes: int
    """Size of the file `segment` at that moment, in bytes."""


class ControllerState(TypedDict):
    """State of the controller that a checkpoint keeps: plain JSON."""

    step: int
    """Completed optimizer steps."""
    sampler: dict[str, Any]
    """`PromptOrder.state`."""
    next_group_id: int
    unconsumed: list[tuple[int, int]]
    """Group id and prompt index of each group that was admitted and not trained on."""
    num_dropped: NotRequired[int]
    """`RolloutBuffer.num_dropped`; not in states that older code saved."""
    journal: NotRequired[JournalPosition]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """Finished, parked and aborted rollouts of a generator, and where it stands."""

    rollouts: list[Rollout]
    """Whole: of a resumed one, with the tokens that it came with."""
    stats: GeneratorStats = NO_STATS


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A version that generators may fetch."""

    version: int
    """Optimizer steps of the weights."""
    addresses: Mapping[str, Address]
    """Addresses of the version, for each transport in use."""
    probe: Probe | None = None
    """Probe by the same weights; None where this version is not to be probed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoption:
    """Outcome of the adoption of a version. Rank 0 speaks for all ranks: they adopt together or not at all."""

    version: int
    """The one asked for."""
    outcome: Literal["adopted", "superseded", "mismatch", "failed"] = "adopted"
    """It serves; it was gone before all of it had arrived; what arrived is not what was published; it could not be
    fetched. Except in the first case the old version serves on."""
    reason: str = ""
    """Reason of a mismatch or failure: one sentence with tensor, version and rank."""
    fetch_s: float = 0.0
    """Seconds of fetching and proving, while decoding goes on."""
    stall_s: float = 0.0
    """Seconds for which decoding stood still."""
    num_bytes: int = 0  # that came, of all ranks: changes only, where those are sent
    fingerprint: str = ""
    """Fingerprint of the weights that serve now, over all tensors and ranks, in hexadecimal digits."""
    tensors: str = ""  # last eight digits of each tensor's, rank by rank, in the order of `weight_specs`


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredResponse:
    """One response, judged."""

    response: str
    """Decoded text without special tokens."""
    result: RewardResult


class Replied(NamedTuple):
    """An environment's reply to an episode."""

    group_id: int
    index: int
    num_tokens: int
    """Tokens of the episode when it was asked for: which of its turns this follows."""
    observation_T: np.ndarray | None
    """Token ids to go on from, int32; None: it has ended."""
    result: RewardResult | None
    """Its reward, or why it is INVALID; None: it goes on, or `[reward]` judges it."""
    seconds: float
    """Seconds that the reply took."""
    calls: tuple[int, int] = (0, 0)
    """Calls of tools in the turn: how many, and how many of them were malformed or failed."""
