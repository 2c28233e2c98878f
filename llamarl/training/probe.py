"""The tokens on which trainer and generators compare their log-probabilities. No torch.

Shape suffixes: T tokens of one sequence, N tokens except the first of each of several sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from llamarl.config import RunConfig
from llamarl.types import OBSERVED, CandidateSets, Columns, Rollout, RolloutGroup, continued, filled, observed

NUM_SEQUENCES = 4
WHOLE_TOKENS = 1024
"""Tokens of a probe after a weight sync, and of each sequence of a `CauseProbe`. They are the first ones, so that each
token has its context."""
CAUSES_EVERY, FIRST_CAUSES = 16, 4
"""A few rollouts are probed for causes in one of `CAUSES_EVERY` steps. The first such step is late enough for rollouts
as old as those of later steps."""
_COMPARED = ("token_ids", "behavior_logprobs", "policy_versions", "cutoffs", "fresh_logprobs")


def is_probed(every_steps: int, version: int, first: int = 1) -> bool:
    """Returns whether trainer and generators are compared when this version is adopted.

    Args:
        first: first version that the trainer's processes have made. It is always probed, because wrong weights show at
            once.
    """
    return every_steps > 0 and version > 0 and (version == first or version % every_steps == 0)


def is_rescored(config: RunConfig, group_id: int) -> bool:
    """Returns whether the first rollout of a group is probed for causes. The group id tells its step."""
    every = config.weight_sync.probe_every_steps if config.generator.backend == "native" else 0
    step, place = divmod(group_id, config.rollout.prompts_per_step)
    if every == 0 or place >= NUM_SEQUENCES:
        return False
    period, first = (every * max(1, count // every) for count in (CAUSES_EVERY, FIRST_CAUSES))
    return (step + 1) % period == first % period


def probe_sequences(groups: Sequence[RolloutGroup]) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns a few sequences that were just trained on, prompt and response, `WHOLE_TOKENS` in all, and which of their
    tokens except the first were sampled, bool [N], or all if none was."""
    sequences, num_left = list[Columns](), WHOLE_TOKENS
    for group in groups[:NUM_SEQUENCES]:
        if num_left > 1:
            sequences.append(_whole(group, num_left))
            num_left -= len(sequences[-1]["token_ids"])
    is_sampled_N = _behind_first(sequences, "policy_versions") != OBSERVED
    token_ids = [columns["token_ids"] for columns in sequences]
    return token_ids, is_sampled_N if is_sampled_N.any() else ~is_sampled_N


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseProbe:
    """Sequences of a step that show causes of its importance ratio (`controller/causes.py`)."""

    groups: Sequence[RolloutGroup]
    """Groups of whose first rollouts these are."""
    sequences: list[np.ndarray]
    """Token ids, int32 [T] each."""
    candidates: CandidateSets
    """Tokens among which each token was drawn."""
    behavior_N: np.ndarray
    """Log-probabilities recorded at sampling, float32."""
    fresh_N: np.ndarray
    """The same by a forward without a cache. NaN means unknown: the token does not count."""
    is_over_kept_N: np.ndarray
    """bool. True if the token was sampled over keys and values of older weights."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup], temperature: float) -> Self | None:
        """Returns the probe of a step on `groups`, or None if no generator rescored any of them."""
        rescored = [group for group in groups if group.rollouts and "fresh_logprobs" in group.rollouts[0].columns]
        if not (rescored := rescored[:NUM_SEQUENCES]):
            return None
        columns = [_whole(group, WHOLE_TOKENS) for group in rescored]
        is_over_kept = [np.pad(over_kept(group.rollouts[0]), (len(group.prompt.token_ids_T), 0)) for group in rescored]
        cutoffs = [filled(sequence, "cutoffs", len(sequence["token_ids"]))[1:] for sequence in columns]
        return cls(
            groups=rescored,
            sequences=[sequence["token_ids"] for sequence in columns],
            candidates=CandidateSets(temperature=temperature, cutoffs=cutoffs),
            behavior_N=_behind_first(columns, "behavior_logprobs"),
            fresh_N=_behind_first(columns, "fresh_logprobs"),
            is_over_kept_N=np.concatenate([kept_T[1:WHOLE_TOKENS] for kept_T in is_over_kept]),
        )


def contexts_of(sequences: Sequence[np.ndarray], is_needed_N: np.ndarray) -> list[int]:
    """Returns for each sequence the number of tokens before the first one that is needed.

    Args:
        is_needed_N: bool, of all tokens except the first, one sequence after the other.
    """
    parts = np.split(is_needed_N, np.cumsum([len(ids_T) - 1 for ids_T in sequences])[:-1])
    return [1 + (int(part_T.argmax()) if part_T.any() else len(part_T)) for part_T in parts]


def over_kept(rollout: Rollout) -> np.ndarray:
    """Returns which tokens of a rollout were sampled over keys and values of older weights, bool [T]: their version is
    not the one with which the cache began."""
    caches = [(num_tokens, version) for num_tokens, start, _, version in rollout.prefills if start == 0]
    if not caches:
        return np.zeros(rollout.num_tokens, bool)
    begins, versions = np.array(caches).T
    cache_version_T = versions[np.searchsorted(begins, np.arange(rollout.num_tokens), side="right") - 1]
    return rollout.is_sampled_T & (rollout.policy_versions_T != cache_version_T)


def _whole(group: RolloutGroup, most: int) -> Columns:
    """Returns columns of the first rollout with the prompt, up to `most` tokens. For an agent's episode these are the
    first sequence, which contains its prompt."""
    prompt_T, columns = group.prompt.token_ids_T, group.rollouts[0].columns
    compared = {name: columns[name] for name in _COMPARED if name in columns}
    if "sequence" in columns:
        most = min(most, int((columns["sequence"] == columns["sequence"][:1]).sum()))
    else:
        compared = continued(observed(Rollout.empty(0, 0).columns, prompt_T), compared)
    return {name: values_T[:most] for name, values_T in compared.items()}


def _behind_first(sequences: Sequence[Columns], name: str) -> np.ndarray:
    return np.concatenate([columns[name][1:] for columns in sequences])
