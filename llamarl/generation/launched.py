"""A step that was launched on a device and not yet read.

Shape suffixes: B rows, C numbers of a drawn token, N packed tokens, W experts of a token in all layers.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.sampler import Drawn, unpacked
from llamarl.generation.scheduler import Sequence


class Launched:
    """The results of one step, on their way to the host."""

    def __init__(
        self, drawn: Drawn | Tensor | None, routes_N_W: Tensor | None, sequences: list[Sequence], num_tokens: int
    ) -> None:
        """
        Args:
            drawn: tokens, or the tensor of `sampler.invert`; None if no row decodes.
            sequences: the row of each drawn token.
        """
        self.sequences, self.num_tokens = sequences, num_tokens
        self._drawn = drawn if not isinstance(drawn, Tensor) else _sent(drawn)
        self._routes_N_W = None if routes_N_W is None else _sent(routes_N_W)
        tensors = [one for one in (drawn, routes_N_W) if isinstance(one, Tensor) and one.is_cuda]
        self._event = torch.cuda.current_stream(tensors[0].device).record_event() if tensors else None

    def order(self, sequences: Ordered[Sequence]) -> np.ndarray:
        """Returns the place in this step of each of these rollouts, which may be fewer now."""
        if len(sequences) == len(self.sequences) and all(map(lambda a, b: a is b, sequences, self.sequences)):
            return np.arange(len(sequences))
        places = {id(sequence): place for place, sequence in enumerate(self.sequences)}
        return np.array([places[id(sequence)] for sequence in sequences], np.int64)

    def read(self, sequences: Ordered[Sequence]) -> tuple[Drawn | None, np.ndarray | None]:
        """Waits for the device. Returns what was drawn for these rollouts, and the experts of all tokens, if they were
        recorded; those of the rollouts come first."""
        if self._event is not None:
            self._event.synchronize()
        drawn = unpacked(self._drawn) if isinstance(self._drawn, Tensor) else self._drawn
        routes_N_W = None if self._routes_N_W is None else self._routes_N_W.numpy()
        order_B = self.order(sequences)
        if len(order_B) == len(self.sequences) and (order_B[:-1] < order_B[1:]).all():
            return drawn, routes_N_W
        assert drawn is not None
        cutoffs_B = None if drawn.cutoffs_B is None else drawn.cutoffs_B[order_B]
        drawn = Drawn(drawn.token_ids_B[order_B], drawn.logprobs_B[order_B], cutoffs_B)
        return drawn, None if routes_N_W is None else routes_N_W[order_B]


def _sent(x: Tensor) -> Tensor:
    """Returns a copy on the host, which arrives when the device has caught up, or a CPU tensor itself."""
    if not x.is_cuda:
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=torch.backends.cuda.is_built())
    host.copy_(x, non_blocking=True)
    return host
