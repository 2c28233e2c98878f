"""Which tokens trainer and generators compare their log-probabilities on. No torch here.

Shape suffixes: T tokens of one sequence, N tokens but the first of each of several sequences.
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
"""Tokens of a probe after a weight sync, and of each sequence in one by cause: from their beginnings, so that each
token has its context."""
CAUSES_EVERY, FIRST_CAUSES = 16, 4
"""In one of so many steps a few rollouts tell causes; the first one is late enough to learn from rollouts as old as
those of later steps."""
_COMPARED = ("token_ids", "behavior_logprobs", "policy_versions", "cutoffs", "fresh_logprobs")


def is_probed(every_steps: int, version: int, first: int = 1) -> bool:
    """Whether trainer and generators are compared as this version is adopted: wrong weights show at the `first` one
    that the trainer's processes have made."""
    return every_steps > 0 and version > 0 and (version == first or version % every_steps == 0)


def is_rescored(config: RunConfig, group_id: int) -> bool:
    """Whether the first rollout of a group is to tell causes: so numbered, it is of a step that is probed by cause."""
    every = config.weight_sync.probe_every_steps if config.generator.backend == "native" else 0
    step, place = divmod(group_id, config.rollout.prompts_per_step)
    if every == 0 or place >= NUM_SEQUENCES:
        return False
    period, first = (every * max(1, count // every) for count in (CAUSES_EVERY, FIRST_CAUSES))
    return (step + 1) % period == first % period


def probe_sequences(groups: Sequence[RolloutGroup]) -> tuple[list[np.ndarray], np.ndarray]:
    """A few sequences that were just trained on, prompt and response, `WHOLE_TOKENS` in all; which of their tokens but
    the first were sampled, bool [N], or all where none was."""
    found, room = list[Columns](), WHOLE_TOKENS
    for group in groups[:NUM_SEQUENCES]:
        if room > 1:
            found.append(_whole(group, room))
            room -= len(found[-1]["token_ids"])
    is_sampled_N = _behind_first(found, "policy_versions") != OBSERVED
    return [one["token_ids"] for one in found], is_sampled_N if is_sampled_N.any() else ~is_sampled_N


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseProbe:
    """Sequences of a step that tell what makes its importance ratio (`controller/causes.py`)."""

    groups: Sequence[RolloutGroup]
    """Groups whose first rollouts they are."""
    sequences: list[np.ndarray]
    """Token ids, int32 [T] each."""
    candidates: CandidateSets
    """Tokens among which they were drawn."""
    behavior_N: np.ndarray
    """Log-probabilities that were recorded as they were drawn, float32."""
    fresh_N: np.ndarray
    """The same by a forward that reads no cache; NaN: not known, and the token does not count."""
    is_over_kept_N: np.ndarray
    """bool; True where keys and values of older weights were read."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup], temperature: float) -> Self | None:
        """The probe of a step on `groups`; None: no generator was asked of any."""
        asked = [one for one in groups if one.rollouts and "fresh_logprobs" in one.rollouts[0].columns]
        if not (asked := asked[:NUM_SEQUENCES]):
            return None
        found = [_whole(one, WHOLE_TOKENS) for one in asked]
        is_over_kept = [np.pad(over_kept(one.rollouts[0]), (len(one.prompt.token_ids_T), 0)) for one in asked]
        return cls(
            groups=asked,
            sequences=[one["token_ids"] for one in found],
            candidates=CandidateSets(
                temperature=temperature, cutoffs=[filled(one, "cutoffs", len(one["token_ids"]))[1:] for one in found]
            ),
            behavior_N=_behind_first(found, "behavior_logprobs"),
            fresh_N=_behind_first(found, "fresh_logprobs"),
            is_over_kept_N=np.concatenate([kept_T[1:WHOLE_TOKENS] for kept_T in is_over_kept]),
        )


def contexts_of(sequences: Sequence[np.ndarray], is_needed_N: np.ndarray) -> list[int]:
    """Returns for each sequence the number of tokens before the first one that is needed.

    Args:
        is_needed_N: bool, of all tokens but the first, one sequence after the other.
    """
    parts = np.split(is_needed_N, np.cumsum([len(ids_T) - 1 for ids_T in sequences])[:-1])
    return [1 + (int(part_T.argmax()) if part_T.any() else len(part_T)) for part_T in parts]


def over_kept(rollout: Rollout) -> np.ndarray:
    """Which tokens of a rollout were sampled over keys and values that older weights had computed, bool [T]: their
    version is not that with which the cache began."""
    births = [(num_tokens, version) for num_tokens, start, _, version in rollout.prefills if start == 0]
    if not births:
        return np.zeros(rollout.num_tokens, bool)
    begins, versions = np.array(births).T
    born_T = versions[np.searchsorted(begins, np.arange(rollout.num_tokens), side="right") - 1]
    return rollout.is_sampled_T & (rollout.policy_versions_T != born_T)


def _whole(group: RolloutGroup, most: int) -> Columns:
    """Columns of its first rollout behind the prompt, up to so many tokens; of an agent's episode those of the first
    sequence, which has its prompt in it."""
    prompt_T, columns = group.prompt.token_ids_T, group.rollouts[0].columns
    found = {name: columns[name] for name in _COMPARED if name in columns}
    if "sequence" in columns:
        most = min(most, int((columns["sequence"] == columns["sequence"][:1]).sum()))
    else:
        found = continued(observed(Rollout.empty(0, 0).columns, prompt_T), found)
    return {name: values_T[:most] for name, values_T in found.items()}


def _behind_first(sequences: Sequence[Columns], name: str) -> np.ndarray:
    return np.concatenate([one[name][1:] for one in sequences])
