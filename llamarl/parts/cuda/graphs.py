"""`DecodeGraphs`: decode steps as CUDA graphs, one launch each in place of hundreds.

A graph repeats kernels on the addresses with which it was captured. So a step's inputs lie in one fixed buffer, padded
to a few numbers of rows, and attention reads lengths, and how wide the table is, on the device: one graph for each
number of rows serves every context. A graph ends with the tokens that it draws, and keeps them for the next step, which
can be launched before the host has read them. Steps with truncated sampling have graphs that end with
hidden states.

Graphs are captured at first use. A step of fewer rows than the graphs at hand is padded to one of them, until enough
such steps have been padded to pay for a capture.

Weights are adopted by pointing the model elsewhere, to and fro between two buffers. There are graphs for both, and a
step is replayed only by one that was captured with the addresses in use.

Off GPUs nothing is captured, and a replay runs the same function on the same buffers again: this is how it is tested.

Shape suffixes: B rows of a step, with padding; R rows of the largest; D model dim; C numbers of a drawn token; W
experts of a token in all layers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.attention import (
    BLOCK_SIZE,
    KVCache,
    StepInputs,
    TorchAttention,
    gather_inputs,
    new_routes,
    num_inputs,
)
from llamarl.generation.model import GeneratorModel
from llamarl.generation.rows import Rows
from llamarl.generation.sampler import draw_on_device
from llamarl.kernels.linear import few_rows

_KEPT = 2
"""Sets of weights: in use, and about to be."""
_PATIENCE = 32
"""Steps of a size that are padded to a larger graph before the size gets its own. Capturing takes about as long."""
_TIMED = 8
"""Replays of each way to compute a step, of which the median decides."""


class DecodeGraphs:
    """Runs steps of an engine's running rows."""

    def __init__(self, model: GeneratorModel, cache: KVCache, spare_block: int, max_running: int) -> None:
        """`spare_block` is one that nobody reads: what padded rows write goes there. Tensor-parallel ranks capture at
        the same time, as all of them see the same steps."""
        assert cache.library is None, "the C++ kernels are no part of a graph"
        self._model, self._cache, self._spare_block = model, cache, spare_block
        self.sizes = sizes(max_running)
        self.num_captured = 0
        width = -(-model.shape.max_position_embeddings // BLOCK_SIZE) + 1  # a prefix may leave the rest of a block
        self._array = torch.zeros(
            num_inputs(max_running, max_running, width), dtype=torch.int32, device=cache.device
        )  # the one that all graphs read
        self._width = width
        self._fed_R = torch.zeros(max_running, dtype=torch.int32, device=cache.device)
        """Tokens that the rows of the last step drew."""
        self._routes_R_W = new_routes(model.shape, max_running, cache.device)
        self._replays = dict[int, dict[tuple[int, bool], Callable[[], Tensor]]]()
        """Weights -> rows and whether tokens are drawn -> what gives their result."""
        self._padded = Counter[tuple[int, bool]]()
        """Steps of a size that a larger graph has computed."""
        self._faster = dict[int, bool]()
        """Rows -> whether the products of few rows are faster there."""
        self.routes_B_W: Tensor | None = None
        """Experts of the rows of the last step, until the next; None: the model is no mixture."""
        is_on_gpu = cache.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if is_on_gpu else None
        self._stream = torch.cuda.Stream(cache.device) if is_on_gpu else None
        """Captures. Libraries keep memory for each stream that they have worked in."""

    def __call__(
        self, rows: Rows, of_tokens: Sequence[np.ndarray], draws: bool, ahead: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See `StepGraphs`."""
        count = len(rows)
        if (size := self._at_hand(count, draws)) is None:
            size = self._size_of(count)
            self._capture(size, draws)
        if size != self._size_of(count):
            self._padded[self._size_of(count), draws] += 1
        host = gather_inputs(rows, of_tokens, self._cache.device, size, self._spare_block, ahead)
        self._array[: len(host)].copy_(host, non_blocking=True)
        result = self._replays[self._model.weights_at][size, draws]()
        self.routes_B_W = None if self._routes_R_W is None else self._routes_R_W[:count]
        return result[:count], self._inputs(size).settings_5_B[:, :count]

    def feed(self, drawn_B_C: Tensor) -> None:
        """See `StepGraphs`."""
        self._fed_R[: len(drawn_B_C)].copy_(drawn_B_C[:, 0])

    def is_ready(self, num_rows: int, draws: bool) -> bool:
        """See `StepGraphs`."""
        return self._at_hand(num_rows, draws) is not None

    def state(self) -> tuple[int, ...]:
        """See `StepGraphs`: the number of captures, and the place of the weights in use among those with graphs."""
        captured = [*self._replays]
        is_known = self._model.weights_at in captured
        return self.num_captured, captured.index(self._model.weights_at) if is_known else -1

    def describe(self) -> str:
        """Returns text for the log: which products serve at which numbers of rows, as far as that was measured."""
        few = [str(size) for size, is_faster in sorted(self._faster.items()) if is_faster]
        return f"products of few rows at {', '.join(few)} rows" if few else ""

    def _size_of(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _at_hand(self, count: int, draws: bool) -> int | None:
        """Returns the size of the graph for this number of rows; None means none: capture it."""
        captured, exact = self._replays.get(self._model.weights_at, {}), self._size_of(count)
        if (exact, draws) in captured:
            return exact
        if self._padded[exact, draws] >= _PATIENCE:
            return None
        return next((size for size in self.sizes if size > exact and (size, draws) in captured), None)

    def _inputs(self, size: int) -> StepInputs:
        routes_B_W = None if self._routes_R_W is None else self._routes_R_W[:size]
        return StepInputs(self._array[: num_inputs(size, size, self._width)], size, size, routes_B_W)

    def _capture(self, size: int, draws: bool) -> None:
        """One graph with the weights in use. It replaces the values of the fixed buffers."""
        weights_at = self._model.weights_at
        if weights_at not in self._replays:
            for weights in list(self._replays)[: 1 - _KEPT]:
                del self._replays[weights]
            self._replays[weights_at] = {}
        model, self.num_captured = (
            copy.copy(self._model),
            self.num_captured + 1,
        )  # bound to these weights, as a graph is
        if size not in self._faster:
            self._faster[size] = self._measure(model, size, draws)
        self._replays[weights_at][size, draws] = self._captured(model, size, draws, self._faster[size])

    def _measure(self, model: GeneratorModel, size: int, draws: bool) -> bool:
        """Returns whether the products of few rows are faster at this number of rows."""
        if self._pool is None or not model.multiplies_few(size):
            return False
        times = list[float]()
        for is_few in (False, True):
            replay = self._captured(model, size, draws, is_few)
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            of_each = list[float]()
            for _ in range(_TIMED):
                started.record()
                replay()
                ended.record()
                ended.synchronize()
                of_each.append(started.elapsed_time(ended))
            times.append(sorted(of_each)[_TIMED // 2])
        return times[1] < times[0]

    def _captured(self, model: GeneratorModel, size: int, draws: bool, is_few: bool) -> Callable[[], Tensor]:
        inputs = self._inputs(size)

        def run() -> Tensor:
            attend = TorchAttention(self._cache, inputs)
            with few_rows(is_few):
                hidden_B_D = model(inputs.token_N, inputs.position_N, attend, inputs.routes_N_W, fed_R=self._fed_R)
            if not draws:
                return hidden_B_D
            return draw_on_device(model.logits(hidden_B_D), inputs.settings_5_B, False, True, self._fed_R)

        # What a step with nothing to do looks like: libraries set themselves up in it, which cannot be captured.
        self._array.zero_()
        for values in (inputs.block_N, inputs.table):
            values.fill_(self._spare_block)
        inputs.own_B.fill_(1)
        device, stream = self._cache.device, self._stream  # it need not be the current device
        if stream is None:
            return run
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Meanwhile another thread may bring weights to the GPU, which must not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def sizes(max_running: int) -> list[int]:
    """Numbers of rows for which there are graphs."""
    steps = {1, 2, 4, *range(8, 257, 8), *range(256, max_running, 16), max_running}
    return sorted(size for size in steps if size <= max_running)
