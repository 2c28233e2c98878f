"""Which tokens trainer and generators compare their log-probabilities on after a weight sync."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamarl.types import RolloutGroup

NUM_SEQUENCES, SEQUENCE_TOKENS = 4, 32
"""128 tokens in all: 5 ms of the demo's steps of 730 ms, on either side."""


def probe_sequences(groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
    """The ends of a few sequences that were just trained on: prompt and response, as far as they fit."""
    return [
        np.concatenate([group.prompt.token_ids_T, group.rollouts[0].token_ids_T])[-SEQUENCE_TOKENS:]
        for group in groups[:NUM_SEQUENCES]
    ]
