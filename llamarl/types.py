"""Records that cross the borders between executors. Plain data: numpy arrays, strings, numbers; no torch.

Shape suffixes: T tokens of one sequence, P tokens of its prompt, W experts of a token in all layers.

Life of a record::

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
    """One number for each token of a response, or several, from where it is made to where it is used.

    A row in `COLUMNS` is all that a new one needs: it is parked, resumed, packed, recorded and handed to the loss by
    what the row says.
    """

    name: str
    dtype: Any
    filled_by: str
    """`generator`, as tokens are sampled; `rescorer`, as they leave it; `agents`, when a session ends; an executor that
    scores whole rollouts (`reference`, `critic`); or `trainer`, when it makes a batch."""
    default: float | bool | None = None
    """Value for tokens sampled after the column's beginning, and for rollouts without it. None: each has its own."""
    is_recorded: bool = False
    """Part of the row of a rollout."""
    is_wide: bool = False
    """Arrays are [T, W]: W, and which unsigned type, is the model's; its largest number means that nothing is known of
    a token. A response without the column is one of which nothing is known."""


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
        # The token was drawn among those whose natural-log probability is at least its own plus this, 0 or less.
        Column(name="cutoffs", dtype=np.float32, filled_by="generator", default=-math.inf),
        # Natural-log probability by a forward that reads no cache, with the weights that sampled it; NaN: nobody asked.
        Column(name="fresh_logprobs", dtype=np.float32, filled_by="rescorer", default=math.nan),
        # Which token sequence of an outside agent's episode the token is of; each holds its own prompt.
        Column(name="sequence", dtype=np.int32, filled_by="agents", is_recorded=True),
        # Natural-log probability under the frozen reference.
        Column(name="reference_logprobs", dtype=np.float32, filled_by="reference"),
        # What the critic expected of the token and those after it, before it was known.
        Column(name="values", dtype=np.float32, filled_by="critic"),
        # 0 where nothing is to be learnt.
        Column(name="advantages", dtype=np.float32, filled_by="trainer"),
        # False for tokens that nobody learns from.
        Column(name="loss_mask", dtype=np.bool_, filled_by="trainer", default=True),
    )
}
"""Every per-token column, by name."""


def add_column(column: Column) -> None:
    """Adds a column of a module outside this package, as that is imported. Raises ValueError: the name is taken."""
    if COLUMNS.setdefault(column.name, column) != column:
        raise ValueError(f"a column {column.name!r} exists, with another meaning; choose another name")
    _no_columns.cache_clear()


Columns = dict[str, np.ndarray]
"""Arrays of one length T, by the name of their column."""


@cache
def _no_columns() -> Columns:
    """Columns of no token, as a generator makes them."""
    always = (one for one in COLUMNS.values() if one.filled_by == "generator" and not one.is_wide)
    return {column.name: np.empty(0, column.dtype) for column in always}


def unknown_routes(num_tokens: int, width: int, dtype: Any) -> np.ndarray:
    """Rows of a wide column of which nothing is known."""
    return np.full((num_tokens, width), np.iinfo(dtype).max, dtype)


def continued(before: Columns, sampled: Columns) -> Columns:
    """The columns of a response of which `sampled` came after `before`; what one of them lacks gets its default."""
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
    """The columns of several responses, end to end; what one of them lacks gets its default."""
    likes = {name: values_T for columns in responses for name, values_T in columns.items()}
    return {
        name: np.concatenate([filled(columns, name, len(columns["token_ids"]), like) for columns in responses])
        for name, like in likes.items()
    }


def observed(response: Columns, token_ids_T: np.ndarray) -> Columns:
    """A response and what its environment answered: tokens that nobody sampled, so with log-probability 0 and without a
    version."""
    num = len(token_ids_T)
    answer = {
        "token_ids": token_ids_T.astype(np.int32),
        "behavior_logprobs": np.zeros(num, np.float32),
        "policy_versions": np.full(num, OBSERVED, np.int32),
    }
    return continued(response, answer)


def filled(columns: Columns, name: str, length: int, like: np.ndarray | None = None) -> np.ndarray:
    """A column of a response; its default where the response lacks it, as wide as `like`."""
    if name in columns:
        return columns[name]
    column = COLUMNS[name]
    if column.is_wide:
        assert like is not None, f"how wide {name} is, others say"
        return unknown_routes(length, like.shape[1], like.dtype)
    assert column.default is not None, f"{name} is missing, and has no default"
    return np.full(length, column.default, column.dtype)


class _PerToken(Protocol):
    """Views of the columns that this package knows, [T] each; empty where there is none."""

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
        """Size of the recorded experts; 0 where there are none."""
        return self.columns["routes"].nbytes if "routes" in self.columns else 0

    @property
    def is_sampled_T(self) -> np.ndarray:  # bool; False for tokens that an environment wrote
        return self.columns["policy_versions"] != OBSERVED


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

    @property
    def is_final(self) -> bool:
        """No generator goes on with it."""
        return self not in (FinishReason.PARKED, FinishReason.ABORTED)


class Outcome(StrEnum):
    """Kind of judgment by a reward on one response."""

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
    """Name of the row in its data set, for example `gsm8k_train-17`; in a mixture behind the source's label."""
    text: str
    """The rendered prompt, after the template."""
    token_ids_T: np.ndarray
    """Tokens of `text`, int32 [T]."""
    answer: str
    """Answer that the reward compares with; may be empty."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Every other field of the row, unchanged."""
    source: str = ""
    """Label of its source, whose limit, environment and rewards are meant; empty: the run's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateSets:
    """Tokens among which given ones were drawn."""

    temperature: float
    cutoffs: list[np.ndarray]
    """Float32 [T - 1] for each sequence: of all tokens but the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters with which tokens are drawn."""

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
    is_repeatable: bool = False
    """The rollout id is left out of the key, so that equal requests are answered equally."""


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
    has_turns: bool = False
    """The engine holds what its rollouts that stop have computed, for when an environment has answered."""
    purpose: Literal["train", "eval", "greedy"] = "train"
    """Purpose of its rollouts: to learn from, to measure the policy, or as the baseline of the group."""
    is_rescored: bool = False
    """The generator fills `fresh_logprobs` of the first rollout, to tell what a cache changes."""
    from_version: int = 0
    """Oldest policy version that may sample it. A request may leave before its generator serves that one; it waits
    there."""

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the rollouts that are asked for."""
        return [one.index for one in self.partials] or range(self.group_size)

    def starts(self) -> Sequence[Rollout]:
        """Rollouts that are asked for, each as it begins."""
        return self.partials or [Rollout.empty(self.group_id, index) for index in range(self.group_size)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout(_PerToken):
    """One generated attempt at a prompt."""

    group_id: int
    """The request that it answers."""
    index: int
    """Position in its group, 0 to group_size - 1."""
    columns: Columns
    """Columns of its tokens; those that the generator fills are always there."""
    finish_reason: FinishReason
    error: str = ""
    """Set when `finish_reason` is FAILED."""
    prefills: tuple[tuple[int, int, int, int], ...] = ()
    """(tokens by then, first position, position after the last, policy version) of each prefill, in order. One from
    position 0 begins the cache anew. Empty: not known."""
    prompt_routes: np.ndarray | None = None
    """Experts of the prompt's tokens but the last, [P - 1, W], layer after layer, one array for all rollouts that share
    a prefix; that of the last token is the first of the column `routes`. None: not recorded."""

    @classmethod
    def empty(cls, group_id: int, index: int, reason: FinishReason = FinishReason.PARKED, error: str = "") -> Rollout:
        """One without a token: not begun yet, or failed."""
        return cls(group_id=group_id, index=index, columns=dict(_no_columns()), finish_reason=reason, error=error)

    def with_only(self, *names: str) -> Rollout:
        """The rollout with these columns alone: what is not read need not travel."""
        columns = {name: self.columns[name] for name in names}
        return Rollout(  # once per rollout, and five times as fast as `replace`
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
        """Turns of the policy; 0 for a rollout without tokens."""
        is_sampled_T = self.is_sampled_T
        return int(is_sampled_T[:1].sum() + (is_sampled_T[1:] & ~is_sampled_T[:-1]).sum())

    @property
    def turns(self) -> list[tuple[bool, np.ndarray]]:
        """Its tokens in the order of who wrote them: (whether they were sampled, token ids int32)."""
        is_sampled_T, token_ids_T = self.is_sampled_T, self.token_ids_T
        ends = [*(np.flatnonzero(is_sampled_T[1:] != is_sampled_T[:-1]) + 1).tolist(), self.num_tokens]
        return [(bool(is_sampled_T[start]), token_ids_T[start:stop]) for start, stop in pairwise([0, *ends]) if stop]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardItem:
    """One response as a reward sees it."""

    prompt: str
    response: str
    """Decoded text without special tokens."""
    answer: str
    metadata: dict[str, Any]


MAX_REASON_CHARS = 1000
"""Longest reason of a reward: code of the user's may give one of any length, and every rollout carries its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """Result of a reward for one response."""

    outcome: Outcome
    value: float
    """The reward; 0.0 for INVALID, where it must not be used."""
    reason: str = ""
    """Short and for people: `no #### line`, `grader timed out after 3 s CPU`."""
    first_part: RewardResult | None = None
    """Result of a weighted sum's first part, which alone decides whether the response is right."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Values of a weighted sum's parts by name, before their weights."""
    is_absent: bool = False
    """The reward has no opinion about this row, as `None` says. A weighted sum leaves such a part out; INVALID where
    no part has an opinion. Not on record."""

    def __post_init__(self) -> None:
        """Cuts the reason."""
        if isinstance(self.reason, str) and len(self.reason) > MAX_REASON_CHARS:
            object.__setattr__(self, "reason", self.reason[:MAX_REASON_CHARS])

    @property
    def is_right(self) -> bool:
        """Scored above 0. An invalid result is not right: nobody has proved it."""
        judged = self.first_part or self
        return judged.outcome is Outcome.SCORE and judged.value > 0

    @property
    def right(self) -> bool | None:
        """Whether the response is right. None means that the reward could not judge it."""
        judged = self.first_part or self
        return None if judged.outcome is Outcome.INVALID else self.is_right


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
    """Result of the prompt's greedy response, which nobody learns from; None where the advantage needs none."""
    environment_s: tuple[float, ...] = ()
    """Seconds that the environment's replies took, one per rollout; empty where nothing is known."""

    @property
    def oldest_version(self) -> int:
        """Smallest policy version among all tokens of the group; -1 when no rollout has a token."""
        versions = [rollout.oldest_version for rollout in self.rollouts if rollout.num_tokens]
        return min(versions) if versions else -1

    def some(self, places: Sequence[int]) -> RolloutGroup:
        """The group with some of its rollouts, by their places in it."""
        return self._of([self._row(place) for place in places])

    def with_more(self, other: RolloutGroup) -> RolloutGroup:
        """The group with the rollouts of another part of it; where both have one, the other's stays."""
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
    """Samples that begin with the same prompt, which the trainer then computes only once."""

    prompt_token_ids_T: np.ndarray
    """int32 [T]."""
    samples: tuple[TrainSample, ...]
    prompt_routes: np.ndarray | None = None
    """Experts of the prompt's tokens but the last, [P - 1, W]; None: not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A tool that the policy calls, in the format of its model family."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    """JSON values by name."""
    error: str = ""
    """Fault in the form of the call, for the policy to read; empty when there is none."""


RAISED = "environment: "
"""Begins the reasons of results whose environment has raised."""
