"""Removes ids without a token from logits.

Shape suffixes: N rows, V (a tile of the) vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from llamarl.models.vocabulary import Spans

NEVER = -1e30
"""Logit of an unused id, whose probability is exactly 0. Finite, because the difference of two infinities is NaN."""


class UnusedIds:
    """Token ids without probability. Generators and trainers remove the same ids, so both normalize over the same
    tokens."""

    def __init__(self, spans: Spans) -> None:
        self._ids = np.array([token for span in spans for token in range(*span)], np.int64)
        self._tensors = dict[torch.device, Tensor]()

    def __len__(self) -> int:
        return len(self._ids)

    def remove(self, logits_N_V: Tensor, first: int = 0) -> Tensor:
        """Sets the logits of unused ids to `NEVER`, in place, and returns them.

        Args:
            first: id of the first column.
        """
        start, stop = np.searchsorted(self._ids, (first, first + logits_N_V.shape[1]))
        if start == stop:
            return logits_N_V
        columns = self._on(logits_N_V.device)[start:stop]
        return logits_N_V.index_fill_(1, columns - first if first else columns, NEVER)

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._tensors:
            with torch.inference_mode(False):  # a later backward pass may need it
                self._tensors[device] = torch.from_numpy(self._ids).to(device)
        return self._tensors[device]
