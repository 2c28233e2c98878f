"""`DecodeGraphs`: decode steps as CUDA graphs, with one launch each instead of hundreds.

A graph repeats kernels on the addresses of its capture. The inputs of a step are therefore in one fixed buffer, padded
to one of a few numbers of rows, and attention reads lengths and table width on the device: one graph per number of rows
serves every context. An engine captures all graphs when it starts. Logits and sampling run after the graph, so sampling
parameters do not matter.

Weights are adopted by switching the model between two buffers. There are graphs for both, and a step is replayed only
by a graph that was captured with the current addresses.

Without a GPU nothing is captured, and a replay calls the same function on the same buffers. Tests use this.

Shape suffixes: B rows of a step, with padding; R rows of the largest; D model dim; W experts of a token in all layers.
"""

from __future__ import annotations

import copy
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

_KEPT = 2
"""Number of weight buffers: current and next."""


class DecodeGraphs:
    """Runs decode steps of an engine's running rows."""

    def __init__(self, model: GeneratorModel, cache: KVCache, spare_block: int, max_running: int) -> None:
        """`spare_block` receives the writes of padded rows and is never read. Tensor-parallel ranks must capture at the
        same time."""
        assert cache.library is None, "the C++ kernels are no part of a graph"
        self._model, self._cache, self._spare_block = model, cache, spare_block
        self.sizes = sizes(max_running)
        width = -(-model.shape.max_position_embeddings // BLOCK_SIZE) + 1  # a prefix may leave the rest of a block
        self._array = torch.zeros(
            num_inputs(max_running, max_running, width), dtype=torch.int32, device=cache.device
        )  # the one that all graphs read
        self._width = width
        self._routes_R_W = new_routes(model.shape, max_running, cache.device)
        self._replays = dict[int, dict[int, Callable[[], Tensor]]]()
        """Weights -> rows -> function that returns the hidden states."""
        self.routes_B_W: Tensor | None = None
        """Experts of the last step's rows, valid until the next step. None means a dense model."""
        self._pool = torch.cuda.graph_pool_handle() if cache.device.type == "cuda" else None
        self._capture(model)
        if self._pool is not None:
            other = copy.copy(model)
            other.use(model.spare())
            self._capture(other)

    def __call__(self, rows: Rows, of_tokens: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Returns hidden states of the rows, valid until the next step, and sampling inputs. See `gather_inputs`."""
        count = len(rows)
        size = next(size for size in self.sizes if size >= count)
        if self._model.weights_at not in self._replays:
            self._capture(self._model)
        host = gather_inputs(rows, of_tokens, self._cache.device, size, self._spare_block)
        self._array[: len(host)].copy_(host, non_blocking=True)
        hidden_B_D = self._replays[self._model.weights_at][size]()
        self.routes_B_W = None if self._routes_R_W is None else self._routes_R_W[:count]
        return hidden_B_D[:count], self._inputs(size).settings_5_B[:, :count]

    def _inputs(self, size: int) -> StepInputs:
        routes_B_W = None if self._routes_R_W is None else self._routes_R_W[:size]
        return StepInputs(self._array[: num_inputs(size, size, self._width)], size, size, routes_B_W)

    def _capture(self, model: GeneratorModel) -> None:
        """Captures all sizes with one set of weights, the largest first, so that the others reuse its memory."""
        for weights in list(self._replays)[: 1 - _KEPT]:
            del self._replays[weights]
        model = copy.copy(model)  # bound to these weights, like the graph
        replays = {size: self._captured(model, size) for size in reversed(self.sizes)}
        self._replays[model.weights_at] = replays

    def _captured(self, model: GeneratorModel, size: int) -> Callable[[], Tensor]:
        inputs = self._inputs(size)

        def run() -> Tensor:
            attend = TorchAttention(self._cache, inputs)
            return model(inputs.token_N, inputs.position_N, attend, inputs.routes_N_W)

        # An empty step. Libraries initialize themselves in it, which cannot be captured.
        self._array.zero_()
        for values in (inputs.block_N, inputs.table):
            values.fill_(self._spare_block)
        inputs.own_B.fill_(1)
        if self._pool is None:
            return run
        device = self._cache.device  # may differ from the current device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may copy weights to the GPU during the capture, which must not fail.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            hidden_B_D = run()

        def replay() -> Tensor:
            graph.replay()
            return hidden_B_D

        return replay


def sizes(max_running: int) -> list[int]:
    """Returns the numbers of rows to capture."""
    steps = {1, 2, 4, *range(8, 257, 8), *range(256, max_running, 16), max_running}
    return sorted(size for size in steps if size <= max_running)
