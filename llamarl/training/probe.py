"""Which tokens trainer and generators compare their log-probabilities on after a weight sync."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamarl.types import OBSERVED, RolloutGroup

NUM_SEQUENCES, SEQUENCE_TOKENS = 4, 32
"""128 tokens in all: 5 ms of the demo's steps of 730 ms, on either side."""
CAUSES_EVERY, FIRST_CAUSES = 16, 4
"""One of so many probes is by cause; the first one is, after which steps learn from rollouts as old as later ones."""
WHOLE_TOKENS = 1024
"""Of a sequence of such a probe, from its beginning."""


def probe_sequences(groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
    """The ends of a few sequences that were just trained on: prompt and response, as far as they fit."""
    return [
        np.concatenate([group.prompt.token_ids_T, group.rollouts[0].token_ids_T])[-SEQUENCE_TOKENS:]
        for group in groups[:NUM_SEQUENCES]
    ]


def whole_sequences(groups: Sequence[RolloutGroup]) -> tuple[list[np.ndarray], np.ndarray]:
    """The same from their beginnings; and which version sampled each token but the first, one sequence after the other,
    OBSERVED where none did."""
    pairs = [(group.prompt.token_ids_T, group.rollouts[0]) for group in groups[:NUM_SEQUENCES]]
    ids = [np.concatenate([prompt_T, one.token_ids_T])[:WHOLE_TOKENS] for prompt_T, one in pairs]
    versions = [np.concatenate([np.full_like(prompt_T, OBSERVED), one.policy_versions_T]) for prompt_T, one in pairs]
    return ids, np.concatenate([part_T[1:WHOLE_TOKENS] for part_T in versions])
