"""Pipeline parallelism: the 1F1B schedule (PipeDream-Flush, Narayanan et al., arXiv 2006.09503, section 2.2).

Every stage packs the same microbatches, so each knows the shape of what comes and none has to be padded to another's.

Shape suffixes: M rows of a microbatch on this rank, D model dim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llamarl.distributed.mesh import Axis

Forward = Callable[[int, Tensor | None], Tensor]
"""forward(microbatch, hidden states from the stage before): hidden states for the next stage; on the last, a loss."""


class Pipeline:
    """One stage."""

    def __init__(self, axis: Axis, dtype: torch.dtype, device: torch.device) -> None:
        self._axis = axis
        self._dtype = dtype
        self._device = device

    def train(self, shapes: Sequence[tuple[int, int]], forward: Forward) -> None:
        """Forward and backward of microbatches whose hidden states have these shapes [M, D].

        With one stage this is one microbatch after the other. Otherwise a stage holds the activations of at most as
        many as there are stages from it to the last.
        """
        axis, count = self._axis, len(shapes)
        ahead = min(axis.size - 1 - axis.rank, count)
        begun = deque[tuple[Tensor | None, Tensor]]()
        for index in range(ahead):
            begun.append(self._forward(index, self._pass(receive=shapes[index]), forward))
            self._pass(send=begun[-1][1])
        x = self._pass(receive=shapes[ahead]) if ahead < count else None
        for index in range(ahead, count):
            begun.append(self._forward(index, x, forward))
            grad = self._turn(send=begun[-1][1], receive=shapes[index - ahead])
            following = shapes[index + 1] if index + 1 < count else None
            x = self._pass_back(*begun.popleft(), grad, following)
        for index in range(count - ahead, count):
            grad = self._turn(receive=shapes[index])
            self._pass_back(*begun.popleft(), grad)

    @torch.no_grad()
    def infer(self, shape: tuple[int, int], forward: Forward) -> Tensor:
        """Forward of microbatch 0 alone; on the last stage its result."""
        y = forward(0, self._pass(receive=shape))
        self._pass(send=y)
        return y

    def _forward(self, index: int, x: Tensor | None, forward: Forward) -> tuple[Tensor | None, Tensor]:
        if x is not None:
            x.requires_grad_()
        return x, forward(index, x)

    def _pass(self, send: Tensor | None = None, receive: tuple[int, int] | None = None) -> Tensor | None:
        """Hidden states, to the next stage and from the one before; what has no such neighbor does nothing."""
        axis = self._axis
        sends = {axis.rank + 1: send.detach().contiguous()} if send is not None and not axis.is_last else {}
        x = self._empty(receive) if receive and axis.rank else None
        axis.swap(sends, {} if x is None else {axis.rank - 1: x})
        return x

    def _turn(self, receive: tuple[int, int], send: Tensor | None = None) -> Tensor | None:
        """Hidden states to the next stage, and from there the gradient of some that it had before."""
        axis = self._axis
        if axis.is_last:
            return None
        grad = self._empty(receive)
        axis.swap({} if send is None else {axis.rank + 1: send.detach().contiguous()}, {axis.rank + 1: grad})
        return grad

    def _pass_back(
        self, x: Tensor | None, y: Tensor, grad: Tensor | None, following: tuple[int, int] | None = None
    ) -> Tensor | None:
        """Backward; the gradient goes to the stage before, and from there come the next hidden states."""
        torch.autograd.backward(y, grad)
        if x is None:
            return None
        assert x.grad is not None
        received = self._empty(following) if following else None
        neighbor = self._axis.rank - 1
        self._axis.swap({neighbor: x.grad.contiguous()}, {} if received is None else {neighbor: received})
        return received

    def _empty(self, shape: tuple[int, int]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
