"""`DecodeGraphs`: decode steps as CUDA graphs, one launch each in place of hundreds.

A graph repeats kernels on the addresses with which it was captured. So a step's arrays lie in fixed buffers, padded to
powers of two in rows and in blocks per row, and a few graphs serve all steps without prefill or truncated sampling.
All of a step is in them: forward, attention over block tables, log-probabilities and sampling. The host copies one
array in, with the noise of each row in it (see `sampler.py`), and one out.

Weights are adopted by pointing the model elsewhere, to and fro between two buffers. Graphs are kept for the last two
sets of addresses, and a step is replayed only by one that was captured with those in use.

Off GPUs nothing is captured, and a replay runs the same function on the same buffers again: this is how it is tested.

Shape suffixes: B rows of a step and M blocks of one row, both with padding; X inputs of a row, J kv heads, r query
heads per kv head, H = J * r, K head dim, S tokens of one block, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.kv_cache import BLOCK_SIZE, KVCache
from llamarl.generation.model import GeneratorModel
from llamarl.generation.rows import Rows
from llamarl.generation.sampler import invert, truncated, uniforms, unpacked
from llamarl.generation.torch_attention import TorchAttention, block_table

_HEAD = 8
"""Inputs of a row before its blocks: token, position, where its keys and values go (block, place), tokens of its prefix
and of its own, bits of its noise and of its temperature."""
LEAST_BYTES = 256 << 20
"""Tables make copies of keys and values. Beyond this, and beyond the bytes of the weights, these would cost more than
launching kernels does, and the step goes without a graph: an estimate, not measured."""
_KEPT = 2
"""Sets of weights: in use, and about to be."""


class DecodeGraphs:
    """Runs steps of an engine's running rows."""

    def __init__(self, model: GeneratorModel, cache: KVCache, spare_block: int) -> None:
        """`spare_block` is one that nobody reads: what padded rows write goes there."""
        assert cache.library is None, "the C++ kernels are no part of a graph"
        self._model, self._cache, self._spare_block = model, cache, spare_block
        self._block_bytes = KVCache.block_bytes(
            len(cache.keys_L_C_J_K_S), cache.num_kv_heads, cache.head_dim, cache.dtype
        )
        self._max_bytes = max(LEAST_BYTES, sum(spec.num_bytes for spec in model.specs()))
        self._replays = dict[int, dict[tuple[int, int], tuple[Tensor, Callable[[], Tensor]]]]()
        """Weights -> rows and blocks -> inputs, and what makes outputs of them."""
        self._pool = torch.cuda.graph_pool_handle() if cache.device.type == "cuda" else None

    def __call__(self, rows: Rows) -> tuple[np.ndarray, np.ndarray] | None:
        """Tokens and log-probabilities as of `Sampler`; None when the step is none for a graph."""
        count = len(rows)
        table_B_M, prefix_B, own_B = block_table(rows)
        shape = _power(count), _power(table_B_M.shape[1])
        is_truncated = truncated(rows.sampling.params_R_4[:count]).any()
        if is_truncated or shape[0] * shape[1] * self._block_bytes > self._max_bytes:
            return None
        inputs_B_X = self._inputs(rows, table_B_M, prefix_B, own_B, *shape)
        replays = self._replays.get(self._model.weights_at)
        if replays is None:
            replays = self._replays[self._model.weights_at] = {}
            for weights in list(self._replays)[:-_KEPT]:
                del self._replays[weights]
        inputs, replay = replays.get(shape, (None, None))
        if inputs is None or replay is None:
            step = _Step(self._model, self._cache, *shape)
            step.inputs_B_X.copy_(torch.from_numpy(inputs_B_X))
            inputs, replay = replays[shape] = step.inputs_B_X, self._captured(step)
        inputs.copy_(torch.from_numpy(inputs_B_X))
        tokens_B, logprobs_B = unpacked(replay())
        return tokens_B[:count], logprobs_B[:count]

    def _inputs(
        self, rows: Rows, table_B_M: np.ndarray, prefix_B: np.ndarray, own_B: np.ndarray, size: int, width: int
    ) -> np.ndarray:
        """All that changes from step to step, int64 [B, X]."""
        count = len(rows)
        inputs_B_X = np.zeros((size, _HEAD + width), np.int64)
        inputs_B_X[:, 2], inputs_B_X[:, 5], inputs_B_X[:, _HEAD:] = self._spare_block, 1, self._spare_block
        head_B_X = inputs_B_X[:count, :_HEAD]
        head_B_X[:, 0], head_B_X[:, 1] = rows.input_R[:count], rows.position_R[:count]
        head_B_X[:, 2] = rows.blocks_R_M[np.arange(count), (own_B - 1) // BLOCK_SIZE]
        head_B_X[:, 3], head_B_X[:, 4], head_B_X[:, 5] = (own_B - 1) % BLOCK_SIZE, prefix_B, own_B
        head_B_X[:, 6] = uniforms(rows.sampling.keys_R[:count], own_B - 1).view(np.int32)
        head_B_X[:, 7] = rows.sampling.params_R_4[:count, 0].copy().view(np.int32)
        inputs_B_X[:count, _HEAD:] = rows.blocks_R_M[:count, :1]
        inputs_B_X[:count, _HEAD : _HEAD + table_B_M.shape[1]] = table_B_M
        return inputs_B_X

    def _captured(self, step: _Step) -> Callable[[], Tensor]:
        if self._pool is None:
            return step.run
        device = self._cache.device  # it need not be the current one
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step.run()  # libraries set themselves up, which cannot be captured; what it writes is written again
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Meanwhile another thread may bring weights to the GPU, which must not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            outputs = step.run()

        def replay() -> Tensor:
            graph.replay()
            return outputs

        return replay


class _Step:
    """One step of so many rows with so many blocks, by the weights in use when it was made."""

    def __init__(self, model: GeneratorModel, cache: KVCache, size: int, width: int) -> None:
        self._model = copy.copy(model)  # bound to these weights, as a graph is
        self._cache = cache
        self.inputs_B_X = torch.zeros((size, _HEAD + width), dtype=torch.int64, device=cache.device)

    def run(self) -> Tensor:
        """Token and bits of its log-probability, int32 [B, 2]."""
        token_B, position_B, block_B, offset_B, prefix_B, own_B, *bits = self.inputs_B_X[:, :_HEAD].unbind(1)
        noise_B, temperature_B = (one.int().view(torch.float32) for one in bits)
        attend = TorchAttention(self._cache, block_B, offset_B, self.inputs_B_X[:, _HEAD:], prefix_B, own_B)
        logits_B_V = self._model.logits(self._model(token_B, position_B, attend)).float()
        greedy_B = temperature_B == 0
        logits_B_V = logits_B_V / temperature_B.masked_fill(greedy_B, 1.0)[:, None]
        return invert(logits_B_V, torch.softmax(logits_B_V, -1), noise_B, greedy_B)


def _power(count: int) -> int:
    """The power of two that is not less."""
    return 1 << (count - 1).bit_length()
