"""Records that executors exchange. Plain data: numpy arrays, strings, numbers; no torch.

Shape suffixes: T tokens of one sequence, P tokens of its prompt, W experts of a token in all layers.

Order of the records::

    Prompt -> GenerationRequest -> Rollout (x group_size) -> RewardResult -> RolloutGroup -> TrainSample
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from itertools import chain, pairwise
from typing import Any, Literal, Protocol

import numpy as np

_NOTHING = np.empty(0, np.float32)  # shared, so that a message carries it once


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One number, or several, for each token of a response, from the executor that computes it to the loss.

    A row in `COLUMNS` is all that a new column needs. Rollouts are parked, resumed, packed and recorded with every
    column of the table, and the loss receives all columns by name.
    """

    name: str
    dtype: Any
    filled_by: str
    """Executor that fills the column. `generator`: while it samples. `rescorer`: when tokens leave the generator.
    `environments`: when they reply. `agents`: when a session ends. `reference` and `critic`: for whole rollouts.
    `trainer`: when it builds a batch."""
    default: float | bool | None = None
    """Value for tokens that lack the column. None means that the column has no default."""
    is_recorded: bool = False
    """The column is written to the row of a rollout."""
    is_wide: bool = False
    """Arrays have shape [T, W]. The model determines W and the unsigned type. The largest number of that type marks
    an unknown token. A response without the column has only unknown tokens."""


OBSERVED = -1
"""Policy version of tokens that an environment wrote."""
COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        # Generated tokens, the stop token included.
        Column(name="token_ids", dtype=np.int32, filled_by="generator", is_recorded=True),
        # Natural-log probability under the distribution that the token was sampled from.
        Column(name="behavior_logprobs", dtype=np.float32, filled_by="generator", is_recorded=True),
        # Policy version that sampled the token, or `OBSERVED`; falls only where an older generator resumed the rollout.
        Column(name="policy_versions", dtype=np.int32, filled_by="generator", is_recorded=True),
        # Experts of the position that predicts the token, so of the prompt's last for the first: layer after layer.
        Column(name="routes", dtype=np.uint8, filled_by="generator", is_wide=True),
        # The token was sampled from tokens whose log-probability is at least its own plus this number, at most 0.
        Column(name="cutoffs", dtype=np.float32, filled_by="generator", default=-math.inf),
        # Natural-log probability by a forward without a cache, with the weights that sampled it. NaN: not computed.
        Column(name="fresh_logprobs", dtype=np.float32, filled_by="rescorer", default=math.nan),
        # Reward that the environment gave for a turn, at the turn's last sampled token.
        Column(name="turn_rewards", dtype=np.float32, filled_by="environments", default=0.0, is_recorded=True),
        # Number of the token sequence within an outside agent's episode. Each sequence includes its own prompt.
        Column(name="sequence", dtype=np.int32, filled_by="agents", is_recorded=True),
        # Natural-log probability under the frozen reference.
        Column(name="reference_logprobs", dtype=np.float32, filled_by="reference"),
        # The critic's estimate of the return from this token on, made before the token was sampled.
        Column(name="values", dtype=np.float32, filled_by="critic"),
        # 0 for tokens without a training signal.
        Column(name="advantages", dtype=np.float32, filled_by="trainer"),
        # False for tokens that are excluded from the loss.
        Column(name="loss_mask", dtype=np.bool_, filled_by="trainer", default=True),
    )
}
"""Every per-token column, by name."""


def add_column(column: Column) -> None:
    """Registers a column of a module outside this package at import. Raises ValueError if the name is taken."""
    if COLUMNS.setdefault(column.name, column) != column:
        raise ValueError(f"a column {column.name!r} exists, with another meaning; choose another name")
    _no_columns.cache_clear()


Columns = dict[str, np.ndarray]
"""Arrays of one length T, by the name of their column."""


@cache
def _no_columns() -> Columns:
    """Returns the columns of zero tokens that a generator fills."""
    always = (one for one in COLUMNS.values() if one.filled_by == "generator" and not one.is_wide)
    return {column.name: np.empty(0, column.dtype) for column in always}


def unknown_routes(num_tokens: int, width: int, dtype: Any) -> np.ndarray:
    """Returns rows of a wide column that mark unknown tokens."""
    return np.full((num_tokens, width), np.iinfo(dtype).max, dtype)


def continued(before: Columns, sampled: Columns) -> Columns:
    """Returns the columns of a response that begins with `before` and continues with `sampled`. Fills missing columns
    with their default."""
    lengths = len(before["token_ids"]), len(sampled["token_ids"])
    if not lengths[0]:
        return sampled
    return {
        name: np.concatenate(
            [filled(part, name, length, like) for part, length in zip((before, sampled), lengths, strict=True)]
        )
        for name, like in (before | sampled).items()
    }


def packed_columns(responses: Sequence[Columns]) -> Columns:
    """Returns the columns of several responses, end to end. Fills missing columns with their default."""
    likes = {name: values_T for columns in responses for name, values_T in columns.items()}
    return {
        name: np.concatenate([filled(columns, name, len(columns["token_ids"]), like) for columns in responses])
        for name, like in likes.items()
    }


def observed(response: Columns, token_ids_T: np.ndarray) -> Columns:
    """Returns a response followed by the reply of its environment. The tokens of the reply were not sampled: they have
    log-probability 0 and no policy version."""
    num = len(token_ids_T)
    answer = {
        "token_ids": token_ids_T.astype(np.int32),
        "behavior_logprobs": np.zeros(num, np.float32),
        "policy_versions": np.full(num, OBSERVED, np.int32),
    }
    return continued(response, answer)


def filled(columns: Columns, name: str, length: int, like: np.ndarray | None = None) -> np.ndarray:
    """Returns a column of a response, or its default if the response lacks it. `like` sets the width of a default."""
    if name in columns:
        return columns[name]
    column = COLUMNS[name]
    if column.is_wide:
        assert like is not None, f"how wide {name} is, others say"
        return unknown_routes(length, like.shape[1], like.dtype)
    assert column.default is not None, f"{name} is missing, and has no default"
    return np.full(length, column.default, column.dtype)


class _PerToken(Protocol):
    """Views of the columns that this package knows, [T] each. Empty means that the response lacks the column."""

    __slots__ = ()

    @property
    def columns(self) -> Columns: ...

    @property
    def token_ids_T(self) -> np.ndarray:
        """int32."""
        return self.columns["token_ids"]

    @property
    def behavior_logprobs_T(self) -> np.ndarray:
        """float32."""
        return self.columns.get("behavior_logprobs", _NOTHING)

    @property
    def policy_versions_T(self) -> np.ndarray:
        """int32."""
        return self.columns["policy_versions"]

    @property
    def reference_logprobs_T(self) -> np.ndarray:
        """float32."""
        return self.columns.get("reference_logprobs", _NOTHING)

    @property
    def values_T(self) -> np.ndarray:
        """float32."""
        return self.columns.get("values", _NOTHING)

    @property
    def num_tokens(self) -> int:
        return len(self.columns["token_ids"])

    @property
    def routes_bytes(self) -> int:
        """Bytes of the recorded experts. 0 means none."""
        return self.columns["routes"].nbytes if "routes" in self.columns else 0

    @property
    def is_sampled_T(self) -> np.ndarray:  # bool; False for tokens that an environment wrote
        return self.columns["policy_versions"] != OBSERVED


class FinishReason(StrEnum):
    """Reason why generation of a rollout stopped."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the rollout."""
    LENGTH = "length"
    """`max_new_tokens` or the end of the context was reached."""
    ABORTED = "aborted"
    """The controller aborted the rollout. Its tokens so far are valid."""
    PARKED = "parked"
    """`segment_tokens` were sampled. Any generator can continue the rollout."""
    FAILED = "failed"
    """The engine failed to generate the rollout. `Rollout.error` has the cause."""

    @property
    def is_final(self) -> bool:
        """Returns whether no generator will continue the rollout."""
        return self not in (FinishReason.PARKED, FinishReason.ABORTED)


class Outcome(StrEnum):
    """Kind of result that a reward returns for one response."""

    SCORE = "score"
    """Scored. `RewardResult.value` is the reward."""
    WRONG = "wrong"
    """Scored as wrong. `RewardResult.value` is the reward, usually 0."""
    INVALID = "invalid"
    """Not scored, for example because the grader crashed or timed out. Masked out of the loss and counted, never 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem, rendered and tokenized."""

    prompt_id: str
    """Name of the row in its dataset, for example `gsm8k_train-17`. A mixture prefixes the label of the source."""
    text: str
    """The rendered prompt, after the template."""
    token_ids_T: np.ndarray
    """Tokens of `text`, int32 [T]."""
    answer: str
    """Reference answer for the reward. May be empty."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Every other field of the row, unchanged."""
    source: str = ""
    """Label of the source, which selects limits, environment and rewards. Empty means those of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateSets:
    """Sets of tokens that could be sampled at each position of given sequences."""

    temperature: float
    cutoffs: list[np.ndarray]
    """float32 [T - 1] for each sequence: the cutoffs of all tokens but the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters."""

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
    """Sampling one of these tokens ends the rollout."""
    stop_strings: tuple[str, ...] = ()
    """The token that completes one of these strings ends the rollout and is kept."""
    seed: int = 0
    """First part of the sampling key (seed, rollout id, position)."""
    is_repeatable: bool = False
    """Leaves the rollout id out of the sampling key, so that equal requests get equal responses."""


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
    """Number of new tokens after which a rollout is parked. 0 means never."""
    partials: tuple[Rollout, ...] = ()
    """Parked or aborted rollouts of this group to continue. If present, only their indices are generated."""
    has_turns: bool = False
    """The engine keeps the KV cache of rollouts that stop, until the environment has replied."""
    purpose: Literal["train", "eval", "greedy"] = "train"
    """Use of the rollouts: training, evaluation of the policy, or greedy baseline of the group."""
    is_rescored: bool = False
    """The generator fills `fresh_logprobs` of the first rollout, which measures the error of the cache."""
    from_version: int = 0
    """Oldest policy version that may sample the request. A generator with an older version holds the request until it
    has adopted this one."""

    @property
    def indices(self) -> Sequence[int]:
        """Returns the indices of the requested rollouts."""
        return [one.index for one in self.partials] or range(self.group_size)

    def starts(self) -> Sequence[Rollout]:
        """Returns the requested rollouts, each in its state at the start."""
        return self.partials or [Rollout.empty(self.group_id, index) for index in range(self.group_size)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout(_PerToken):
    """One generated attempt at a prompt."""

    group_id: int
    """The request that it answers."""
    index: int
    """Position in its group, 0 to group_size - 1."""
    columns: Columns
    """Columns of the tokens. The columns that the generator fills are always present."""
    finish_reason: FinishReason
    error: str = ""
    """Set when `finish_reason` is FAILED."""
    prefills: tuple[tuple[int, int, int, int], ...] = ()
    """(tokens at that time, first position, end position, policy version) of each prefill, in order. A prefill from
    position 0 rebuilds the cache. Empty means unknown."""
    prompt_routes: np.ndarray | None = None
    """Experts of the prompt's tokens except the last, [P - 1, W], layer after layer. Rollouts with a common prefix
    share the array. The first row of the column `routes` belongs to the last prompt token. None means not recorded."""

    @classmethod
    def empty(cls, group_id: int, index: int, reason: FinishReason = FinishReason.PARKED, error: str = "") -> Rollout:
        """Returns a rollout without tokens, which has not started or has failed."""
        return cls(group_id=group_id, index=index, columns=dict(_no_columns()), finish_reason=reason, error=error)

    def with_only(self, *names: str) -> Rollout:
        """Returns the rollout with only these columns, to reduce the size of a message."""
        columns = {name: self.columns[name] for name in names}
        return Rollout(  # called once per rollout; five times as fast as `replace`
            group_id=self.group_id, index=self.index, columns=columns, finish_reason=self.finish_reason,
            error=self.error,
        )  # fmt: skip

    @property
    def oldest_version(self) -> int:
        """Smallest policy version among the sampled tokens; -1 for a rollout without tokens."""
        if not self.num_tokens:
            return -1
        oldest = self.policy_versions_T.min()
        return int(self.policy_versions_T[self.is_sampled_T].min() if oldest == OBSERVED else oldest)

    @property
    def num_turns(self) -> int:
        """Number of turns of the policy. 0 for a rollout without tokens."""
        is_sampled_T = self.is_sampled_T
        return int(is_sampled_T[:1].sum() + (is_sampled_T[1:] & ~is_sampled_T[:-1]).sum())

    @property
    def turn_rewards_T(self) -> np.ndarray:
        """float32: rewards of turns, at their last sampled tokens."""
        return filled(self.columns, "turn_rewards", self.num_tokens)

    @property
    def turn_T(self) -> np.ndarray:
        """Number of the turn of each token, int64. Tokens that an environment wrote belong to the turn before them."""
        is_sampled_T = self.is_sampled_T
        begins_T = is_sampled_T.copy()
        begins_T[1:] &= ~is_sampled_T[:-1]
        return np.maximum(np.cumsum(begins_T) - 1, 0)

    @property
    def turns(self) -> list[tuple[bool, np.ndarray]]:
        """Returns the tokens in order, in pieces: (whether the policy sampled them, token ids int32)."""
        is_sampled_T, token_ids_T = self.is_sampled_T, self.token_ids_T
        ends = [*(np.flatnonzero(is_sampled_T[1:] != is_sampled_T[:-1]) + 1).tolist(), self.num_tokens]
        return [(bool(is_sampled_T[start]), token_ids_T[start:stop]) for start, stop in pairwise([0, *ends]) if stop]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardItem:
    """Input of a reward for one response."""

    prompt: str
    response: str
    """Decoded text without special tokens."""
    answer: str
    metadata: dict[str, Any]


MAX_REASON_CHARS = 1000
"""Maximum length of a reward's reason, because every rollout carries one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """Result of a reward for one response."""

    outcome: Outcome
    value: float
    """The reward. 0.0 for INVALID, where it must not be used."""
    reason: str = ""
    """Short explanation for people, such as `no #### line` or `grader timed out after 3 s CPU`."""
    first_part: RewardResult | None = None
    """Result of the first part of a weighted sum, which decides whether the response is right."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Values of the parts of a weighted sum by name, before weighting."""
    is_absent: bool = False
    """The reward returned None for this row. A weighted sum leaves such a part out, and is INVALID if all parts are
    absent. Not recorded."""

    def __post_init__(self) -> None:
        """Truncates the reason."""
        if isinstance(self.reason, str) and len(self.reason) > MAX_REASON_CHARS:
            object.__setattr__(self, "reason", self.reason[:MAX_REASON_CHARS])

    @property
    def is_right(self) -> bool:
        """Returns whether the value is above 0. An invalid result is not right."""
        judged = self.first_part or self
        return judged.outcome is Outcome.SCORE and judged.value > 0

    @property
    def right(self) -> bool | None:
        """Whether the response is right. None means that the reward could not score it."""
        judged = self.first_part or self
        return None if judged.outcome is Outcome.INVALID else self.is_right


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All rollouts of one prompt with their rewards: the unit that the trainer consumes."""

    group_id: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    results: tuple[RewardResult, ...]
    """One per rollout."""
    responses: tuple[str, ...]
    """Decoded text, one per rollout."""
    baseline: RewardResult | None = None
    """Result of the prompt's greedy response, which is not trained on. None if the advantage needs no baseline."""
    environment_s: tuple[float, ...] = ()
    """Seconds of the environment's replies, one entry per rollout. Empty means unknown."""

    @property
    def oldest_version(self) -> int:
        """Smallest policy version among all tokens of the group; -1 when no rollout has a token."""
        versions = [rollout.oldest_version for rollout in self.rollouts if rollout.num_tokens]
        return min(versions) if versions else -1

    def some(self, places: Sequence[int]) -> RolloutGroup:
        """Returns the group with only the rollouts at these positions."""
        return self._of([self._row(place) for place in places])

    def with_more(self, other: RolloutGroup) -> RolloutGroup:
        """Returns the union of two parts of the group. If both have a rollout, the one of `other` is kept."""
        rows = {
            part.rollouts[place].index: part._row(place)
            for part in (self, other)
            for place in range(len(part.rollouts))
        }
        return other._of([rows[index] for index in sorted(rows)])

    def _row(self, place: int) -> tuple[Rollout, RewardResult, str, tuple[float, ...]]:
        return self.rollouts[place], self.results[place], self.responses[place], self.environment_s[place : place + 1]

    def _of(self, rows: Sequence[tuple[Rollout, RewardResult, str, tuple[float, ...]]]) -> RolloutGroup:
        rollouts, results, responses, environment_s = zip(*rows, strict=True) if rows else ((), (), (), ())
        return replace(
            self, rollouts=rollouts, results=results, responses=responses, environment_s=tuple(chain(*environment_s))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSample(_PerToken):
    """One trainable token sequence: a prompt shared by its group and one response."""

    columns: Columns
    """Columns of its tokens, `advantages` and `loss_mask` among them."""

    @property
    def advantages_T(self) -> np.ndarray:  # float32
        return self.columns["advantages"]

    @property
    def loss_mask_T(self) -> np.ndarray:  # bool
        return self.columns["loss_mask"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleGroup:
    """Samples that share a prompt, which the trainer computes only once."""

    prompt_token_ids_T: np.ndarray
    """int32 [T]."""
    samples: tuple[TrainSample, ...]
    prompt_routes: np.ndarray | None = None
    """Experts of the prompt's tokens except the last, [P - 1, W]. None means not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A tool call by the policy, in the format of its model family."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    """JSON values by name."""
    error: str = ""
    """Error in the format of the call, which the policy reads. Empty means valid."""


RAISED = "environment: "
"""Prefix of the reason of a result whose environment raised an exception."""
