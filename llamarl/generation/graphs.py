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
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.kv_cache import BLOCK_SIZE, KVCache
from llamarl.generation.model import GeneratorModel
from llamarl.generation.rows import Rows
from llamarl.generation.sampler import invert, truncated, uniforms, unpacked

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
        prefixes = [sequence.group.prefix.blocks for sequence in rows.sequences]
        num_blocks_B = np.array([len(blocks) for blocks in prefixes]) + rows.length_R[:count] // BLOCK_SIZE + 1
        shape = _power(count), _power(int(num_blocks_B.max()))
        is_truncated = truncated(rows.sampling.params_R_4[:count]).any()
        if is_truncated or shape[0] * shape[1] * self._block_bytes > self._max_bytes:
            return None
        inputs_B_X = self._inputs(rows, prefixes, *shape)
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

    def _inputs(self, rows: Rows, prefixes: list[list[int]], size: int, width: int) -> np.ndarray:
        """All that changes from step to step, int64 [B, X]; `prefixes` are the blocks that each row shares."""
        count, own_B = len(rows), rows.length_R[: len(rows)]
        start_B = np.array([len(blocks) for blocks in prefixes])
        inputs_B_X = np.zeros((size, _HEAD + width), np.int64)
        inputs_B_X[:, 2], inputs_B_X[:, 5], inputs_B_X[:, _HEAD:] = self._spare_block, 1, self._spare_block
        head_B_X, table_B_M = inputs_B_X[:count, :_HEAD], inputs_B_X[:count, _HEAD:]
        head_B_X[:, 0], head_B_X[:, 1] = rows.input_R[:count], rows.position_R[:count]
        head_B_X[:, 2] = rows.blocks_R_M[np.arange(count), own_B // BLOCK_SIZE]
        head_B_X[:, 3], head_B_X[:, 5] = own_B % BLOCK_SIZE, own_B + 1
        head_B_X[:, 4] = [sequence.group.prefix_tokens for sequence in rows.sequences]
        head_B_X[:, 6] = uniforms(rows.sampling.keys_R[:count], own_B).view(np.int32)
        head_B_X[:, 7] = rows.sampling.params_R_4[:count, 0].copy().view(np.int32)
        # Places behind a row's blocks name its first own one: masked, yet multiplied by 0, which leaves NaN of others.
        table_B_M[:] = rows.blocks_R_M[:count, :1]
        column_B_M = np.arange(rows.blocks_R_M.shape[1])[None].repeat(count, 0)
        row, column = np.nonzero(column_B_M < own_B[:, None] // BLOCK_SIZE + 1)
        table_B_M[row, column + start_B[row]] = rows.blocks_R_M[row, column]
        for table_M, blocks in zip(table_B_M, prefixes, strict=True):
            table_M[: len(blocks)] = blocks
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
        self._dtype = torch.float32 if cache.device.type == "cpu" else cache.dtype
        self.inputs_B_X = torch.zeros((size, _HEAD + width), dtype=torch.int64, device=cache.device)
        self._blocks = self._valid_B_M_S = torch.empty(0)

    def run(self) -> Tensor:
        """Token and bits of its log-probability, int32 [B, 2]."""
        token_B, position_B, _, _, prefix_B, own_B, *bits = self.inputs_B_X[:, :_HEAD].unbind(1)
        noise_B, temperature_B = (one.int().view(torch.float32) for one in bits)
        self._blocks = self.inputs_B_X[:, _HEAD:].flatten()
        place_M_S = torch.arange(self.inputs_B_X.shape[1] - _HEAD, device=token_B.device)[:, None] * BLOCK_SIZE
        place_M_S = place_M_S + torch.arange(BLOCK_SIZE, device=token_B.device)
        prefix_B, own_B = prefix_B[:, None, None], own_B[:, None, None]
        start_B = (prefix_B + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE  # own tokens begin with a block
        in_own_B_M_S = (place_M_S >= start_B) & (place_M_S < start_B + own_B)
        self._valid_B_M_S = (place_M_S < prefix_B) | in_own_B_M_S
        logits_B_V = self._model.logits(self._model(token_B, position_B, self._attend)).float()
        greedy_B = temperature_B == 0
        logits_B_V = logits_B_V / temperature_B.masked_fill(greedy_B, 1.0)[:, None]
        return invert(logits_B_V, torch.softmax(logits_B_V, -1), noise_B, greedy_B)

    def _attend(self, layer: int, q_B_H_K: Tensor, k_B_J_K: Tensor, v_B_J_K: Tensor) -> Tensor:
        cache, size = self._cache, len(q_B_H_K)
        cache.write(layer, self.inputs_B_X[:, 2], self.inputs_B_X[:, 3], k_B_J_K, v_B_J_K)
        stored = (cache.keys_L_C_J_K_S[layer], cache.values_L_C_J_S_K[layer])
        keys_B_M_J_K_S, values_B_M_J_S_K = (
            one.index_select(0, self._blocks).unflatten(0, (size, -1)).to(self._dtype) for one in stored
        )
        q_B_1_J_r_K = q_B_H_K.to(self._dtype).unflatten(1, (cache.num_kv_heads, -1))[:, None]
        scores_B_M_J_r_S = (q_B_1_J_r_K * cache.head_dim**-0.5) @ keys_B_M_J_K_S
        scores_B_M_J_r_S = scores_B_M_J_r_S.masked_fill(~self._valid_B_M_S[:, :, None, None], -math.inf)
        scores_B_J_r_MS = scores_B_M_J_r_S.permute(0, 2, 3, 1, 4).flatten(3)
        probs_B_J_r_MS = torch.softmax(scores_B_J_r_MS, -1, dtype=torch.float32).to(self._dtype)
        probs_B_M_J_r_S = probs_B_J_r_MS.unflatten(3, (-1, BLOCK_SIZE)).permute(0, 3, 1, 2, 4)
        out_B_J_r_K = (probs_B_M_J_r_S @ values_B_M_J_S_K).sum(1)
        return out_B_J_r_K.flatten(1, 2).to(q_B_H_K.dtype)


def _power(count: int) -> int:
    """The power of two that is not less."""
    return 1 << (count - 1).bit_length()
