"""Records that cross the borders between executors. Plain data: numpy arrays, strings, numbers; no torch.

Shape suffixes: T tokens of one sequence.

Life of a record::

    Prompt -> GenerationRequest -> Rollout (x group_size) -> RewardResult -> RolloutGroup -> TrainSample -> TrainBatch
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

_NOTHING = np.empty(0, np.float32)
"""Shared, so that a message carries it once."""


def _nothing() -> np.ndarray:
    return _NOTHING


class FinishReason(StrEnum):
    """Why a rollout has no more tokens."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the rollout."""
    LENGTH = "length"
    """`max_new_tokens` or the end of the context was reached."""
    ABORTED = "aborted"
    """The controller took it back; its tokens so far are valid."""
    PARKED = "parked"
    """`segment_tokens` were sampled; any generator can go on from its tokens."""
    FAILED = "failed"
    """The engine could not generate it; `Rollout.error` says why."""


class Outcome(StrEnum):
    """What a reward says about one response."""

    SCORE = "score"
    """Judged; `RewardResult.value` is the reward."""
    WRONG = "wrong"
    """Judged and wrong: reward `RewardResult.value`, usually 0."""
    INVALID = "invalid"
    """Not judged (grader crashed, timed out, sandbox failed): masked out of the loss and counted, never scored 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem, rendered and tokenized."""

    prompt_id: str
    """Name of the row in its data set, for example `gsm8k_train-17`."""
    text: str
    """The rendered prompt, after the template."""
    token_ids_T: np.ndarray
    """Tokens of `text`, int32 [T]."""
    answer: str
    """What the reward compares with; may be empty."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Every other field of the row, unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn."""

    temperature: float = 1.0
    """Divides the logits; 0 means greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 drops none."""
    max_new_tokens: int = 128
    """Upper bound of generated tokens, over all segments."""
    stop_token_ids: tuple[int, ...] = ()
    """A rollout ends with the first of these that it samples."""
    stop_strings: tuple[str, ...] = ()
    """A rollout ends with the token that completes one of these in its text; that token is kept."""
    seed: int = 0
    """First part of the sampling key (seed, rollout id, position)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """`group_size` attempts at one prompt. The engine prefills the prompt once and shares it."""

    group_id: int
    """Unique within a run; with the rollout's index it keys the sampling noise."""
    prompt_token_ids_T: np.ndarray
    """int32 [T], at least one token."""
    group_size: int
    """Number of rollouts."""
    sampling: SamplingParams
    segment_tokens: int = 0
    """A rollout is parked after so many new tokens; 0: never."""
    partials: tuple[Rollout, ...] = ()
    """Parked or aborted rollouts of this group to go on with; when there are some, only their indices are generated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One generated attempt at a prompt."""

    group_id: int
    """The request that it answers."""
    index: int
    """Position in its group, 0 to group_size - 1."""
    token_ids_T: np.ndarray
    """Generated tokens, the stop token included, int32 [T]."""
    behavior_logprobs_T: np.ndarray
    """Natural-log probability of each token under the distribution it was sampled from, float32 [T]."""
    policy_versions_T: np.ndarray
    """Policy version that sampled each token, int32 [T]; falls only where an older generator resumed it."""
    finish_reason: FinishReason
    error: str = ""
    """Set when `finish_reason` is FAILED."""
    reference_logprobs_T: np.ndarray = field(default_factory=_nothing)
    """Natural-log probability of each token under the frozen reference, float32 [T]; empty without one."""
    values_T: np.ndarray = field(default_factory=_nothing)
    """What the critic expected of each token and those after it, before it was known, float32 [T]; empty without
    one."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def oldest_version(self) -> int:
        """Smallest policy version among the tokens; -1 for a rollout without tokens."""
        return int(self.policy_versions_T.min()) if self.num_tokens else -1


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardItem:
    """What a reward sees of one response."""

    prompt: str
    response: str
    """Decoded text without special tokens."""
    answer: str
    metadata: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """What a reward says of one response."""

    outcome: Outcome
    value: float
    """The reward; 0.0 for INVALID, where it must not be used."""
    reason: str = ""
    """Short and for people: `no #### line`, `grader timed out after 3 s CPU`."""
    first_part: RewardResult | None = None
    """Of a weighted sum: what its first part said, which alone decides whether the response is right."""

    @property
    def is_right(self) -> bool:
        """Scored above 0. An invalid result is not right: nobody has proved it."""
        judged = self.first_part or self
        return judged.outcome is Outcome.SCORE and judged.value > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All attempts at one prompt, scored: what the trainer consumes."""

    group_id: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    results: tuple[RewardResult, ...]
    """One per rollout."""
    responses: tuple[str, ...]
    """Decoded text, one per rollout."""
    baseline: RewardResult | None = None
    """Of the greedy response to the same prompt, which nobody learns from; None where the advantage needs none."""

    @property
    def oldest_version(self) -> int:
        """Smallest policy version among all tokens of the group; -1 when no rollout has a token."""
        versions = [rollout.oldest_version for rollout in self.rollouts if rollout.num_tokens]
        return min(versions) if versions else -1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSample:
    """One trainable token sequence: a prompt shared by its group and one response."""

    response_token_ids_T: np.ndarray
    """int32 [T]."""
    behavior_logprobs_T: np.ndarray
    """float32 [T]."""
    policy_versions_T: np.ndarray
    """int32 [T]."""
    advantages_T: np.ndarray
    """float32 [T]; 0 where nothing is to be learnt."""
    loss_mask_T: np.ndarray
    """bool [T]; False for tokens of invalid or failed rollouts."""
    reference_logprobs_T: np.ndarray = field(default_factory=_nothing)
    """float32 [T]; empty without a reference."""
    values_T: np.ndarray = field(default_factory=_nothing)
    """float32 [T]; empty without a critic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleGroup:
    """Samples that begin with the same prompt, which the trainer then computes only once."""

    prompt_token_ids_T: np.ndarray
    """int32 [T]."""
    samples: tuple[TrainSample, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """What one optimizer step learns from."""

    groups: tuple[SampleGroup, ...]

    @property
    def num_loss_tokens(self) -> int:
        """Trainable positions: the global denominator of token-mean losses."""
        return int(sum(sample.loss_mask_T.sum() for group in self.groups for sample in group.samples))

    @property
    def num_loss_sequences(self) -> int:
        """Samples with a trainable position: the global denominator of sequence-mean losses."""
        return sum(bool(sample.loss_mask_T.any()) for group in self.groups for sample in group.samples)
