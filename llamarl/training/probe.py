"""Which tokens trainer and generators compare their log-probabilities on after a weight sync."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamarl.types import OBSERVED, RolloutGroup, filled

NUM_SEQUENCES, SEQUENCE_TOKENS = 4, 32
"""128 tokens in all: 5 ms of the demo's steps of 730 ms, on either side."""
CAUSES_EVERY, FIRST_CAUSES = 16, 4
"""One of so many probes is by cause; the first one is, after which steps learn from rollouts as old as later ones."""
WHOLE_TOKENS = 1024
"""Tokens of each sequence in a probe by cause, from its beginning."""


def probe_sequences(groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
    """The ends of a few sequences that were just trained on: prompt and response, as far as they fit."""
    return [token_ids_T[-SEQUENCE_TOKENS:] for token_ids_T, *_ in map(_of_group, groups[:NUM_SEQUENCES])]


def whole_sequences(groups: Sequence[RolloutGroup]) -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """The same from their beginnings; of each token but the first which version sampled it, OBSERVED where none did,
    one sequence after the other; and their cutoffs."""
    found = [*map(_of_group, groups[:NUM_SEQUENCES])]
    ids, cutoffs = [one[0][:WHOLE_TOKENS] for one in found], [one[2][1:WHOLE_TOKENS] for one in found]
    return ids, np.concatenate([versions_T[1:WHOLE_TOKENS] for _, versions_T, _ in found]), cutoffs


def _of_group(group: RolloutGroup) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of its first rollout with the prompt, their versions and cutoffs; of an agent's episode those of the first
    sequence, which has its prompt in it."""
    prompt_T, columns = group.prompt.token_ids_T, group.rollouts[0].columns
    prompt = {"token_ids": prompt_T, "policy_versions": np.full_like(prompt_T, OBSERVED)}
    length, end = len(columns["token_ids"]), None
    if "sequence" in columns:
        prompt, end = {}, int((columns["sequence"] == columns["sequence"][:1]).sum())
    parts = [(prompt, len(prompt_T))] * bool(prompt) + [(columns, length)]
    token_ids_T, versions_T, cutoffs_T = (
        np.concatenate([filled(part, name, size) for part, size in parts])[:end]
        for name in ("token_ids", "policy_versions", "cutoffs")
    )
    return token_ids_T, versions_T, cutoffs_T
