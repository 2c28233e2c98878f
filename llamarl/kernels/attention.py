"""Attention of packed tokens to a KV cache in blocks, in C++ on the CPU (`attention.cpp`).

The kernel serves once it has reproduced attention in float64. Otherwise `kernel().reason` says why not, and the caller
uses torch. A token's result has the same bits for any other tokens and tasks.

Shape suffixes: N packed tokens, H query heads, J kv heads, K head dim, C blocks, S tokens of one block.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.kernels.build import Kernel, load

BLOCK_SIZE = 16
"""Tokens per block. A rollout wastes half a block on average; smaller blocks cost more in bookkeeping than they
save."""
_P, _I = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """The tokens that each token of a step sees, in int64 arrays, the same for every layer.

    A token's runs of keys are merged in the order of their tasks.
    """

    table: np.ndarray
    """[tasks, 5]: first of `members`, their number, first of `blocks`, tokens of them that the first member sees, and
    how many more each next member sees (0, or 1 if members are consecutive in the run)."""
    members: np.ndarray
    """Packed tokens."""
    blocks: np.ndarray
    """Block ids."""
    slots_N: np.ndarray
    """Slot of each token's keys and values: block * BLOCK_SIZE + place in the block."""


def unusable(dtype: torch.dtype, device: torch.device, head_dim: int) -> str:
    """Returns why the kernel cannot serve a cache, or "" if it can."""
    if device.type != "cpu":
        return f"{device.type} device"
    if dtype not in _FUNCTIONS:
        return f"keys are {dtype}"
    return f"head_dim = {head_dim} is no multiple of 8" if head_dim % 8 else kernel().reason


@functools.cache
def kernel() -> Kernel:
    """Compiles the kernel, and checks it against torch, at the first call."""
    loaded = load("attention")
    library = loaded.library
    if library is None:
        return loaded
    library.instructions.restype = ctypes.c_char_p
    for name in _FUNCTIONS.values():
        function = getattr(library, name)
        function.argtypes, function.restype = (*[_P, _I] * 3, _P, *[_I] * 4, *[_P] * 4, _I, _P, _P), None
    for dtype in _FUNCTIONS:
        error = _error(library, dtype)
        if not error <= 1e-5:
            reason = f"attention.cpp is off by {error:.1g} with {dtype} keys ({instructions(library)})"
            return Kernel(library=None, reason=reason)
    return loaded


def instructions(library: ctypes.CDLL) -> str:
    """Returns the instructions that the kernel was compiled for: `avx2`, `avx512`, `neon` or `generic`."""
    return library.instructions().decode()


class PagedStep(ctypes.Structure):
    """Attention of one step's tokens in all layers, as `stack.cpp` reads it."""

    _fields_ = (
        ("attend", _P), ("slots", _P), ("tasks", _P), ("num_tasks", _I),
        *((name, _P) for name in ("members", "blocks", "keys", "values")), ("layer_bytes", _I),
    )  # fmt: skip


class PagedAttention:
    """Attention of one step's tokens, called once per layer."""

    __slots__ = ("_arguments", "_cache_shapes", "_function", "_tasks")

    def __init__(self, library: ctypes.CDLL, tasks: Tasks, keys_C_J_K_S: Tensor, values_C_J_S_K: Tensor) -> None:
        """
        Args:
            keys_C_J_K_S, values_C_J_S_K: the cache of any layer, for type and shape.
        """
        self._tasks = tasks
        self._function = getattr(library, _FUNCTIONS[keys_C_J_K_S.dtype])
        self._cache_shapes = keys_C_J_K_S.shape, values_C_J_S_K.shape
        num_kv_heads, head_dim = keys_C_J_K_S.shape[1:3]
        assert head_dim % 8 == 0
        assert self._cache_shapes[0][1:] == (num_kv_heads, head_dim, BLOCK_SIZE)
        assert self._cache_shapes[1][1:] == (num_kv_heads, BLOCK_SIZE, head_dim)
        for array in (tasks.table, tasks.members, tasks.blocks, tasks.slots_N):
            assert array.dtype == np.int64
            assert array.flags.c_contiguous
        self._arguments = (
            tasks.slots_N.ctypes.data, tasks.table.ctypes.data, len(tasks.table), tasks.members.ctypes.data,
            tasks.blocks.ctypes.data,
        )  # fmt: skip

    def __call__(
        self, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor, keys_C_J_K_S: Tensor, values_C_J_S_K: Tensor
    ) -> Tensor:
        """Stores the tokens' keys and values, then attends, with scores scaled by K ** -0.5. Returns [N, H, K], in the
        type of q."""
        num_tokens, num_heads, head_dim = q_N_H_K.shape
        num_kv_heads = k_N_J_K.shape[1]
        assert len(self._tasks.slots_N) == num_tokens
        assert k_N_J_K.shape == v_N_J_K.shape == (num_tokens, num_kv_heads, head_dim)
        assert self._cache_shapes == (keys_C_J_K_S.shape, values_C_J_S_K.shape)
        assert num_heads % num_kv_heads == 0
        assert self._cache_shapes[0][1:3] == (num_kv_heads, head_dim)
        q, k, v = _rows(q_N_H_K), _rows(k_N_J_K), _rows(v_N_J_K)
        out_N_H_K = torch.empty(num_tokens, num_heads, head_dim)
        self._function(
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), out_N_H_K.data_ptr(),
            num_tokens, num_heads, num_kv_heads, head_dim, keys_C_J_K_S.data_ptr(), values_C_J_S_K.data_ptr(),
            *self._arguments,
        )  # fmt: skip
        return out_N_H_K if q_N_H_K.dtype == torch.float32 else out_N_H_K.to(q_N_H_K.dtype)

    def step(self, num_tokens: int, keys_L_C_J_K_S: Tensor, values_L_C_J_S_K: Tensor) -> PagedStep:
        """Returns pointers for C++, valid while this object and the cache of all layers exist."""
        assert len(self._tasks.slots_N) == num_tokens
        assert self._cache_shapes == (keys_L_C_J_K_S.shape[1:], values_L_C_J_S_K.shape[1:])
        cached = keys_L_C_J_K_S, values_L_C_J_S_K
        assert all(tensor.is_contiguous() for tensor in cached)
        pointers = (tensor.data_ptr() for tensor in cached)
        layer_bytes = keys_L_C_J_K_S.stride(0) * keys_L_C_J_K_S.element_size()
        return PagedStep(ctypes.cast(self._function, _P), *self._arguments, *pointers, layer_bytes)


def _rows(x_N_H_K: Tensor) -> Tensor:
    """Returns rows in float32. They may be apart, as in a joined projection, but the heads of a row must be
    contiguous."""
    x_N_H_K = x_N_H_K.float()
    return x_N_H_K if x_N_H_K.stride()[1:] == (x_N_H_K.shape[2], 1) else x_N_H_K.contiguous()


def _error(library: ctypes.CDLL, dtype: torch.dtype) -> float:
    """Returns the largest difference to float64, for a prefix of 300 tokens and a chunk of 21, of which the last 19 see
    the prefix."""
    num_heads, num_kv_heads, head_dim, before, count = 6, 2, 24, 300, 21
    total, num_blocks = before + count, 21
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(total, n, head_dim, generator=generator) for n in (num_heads, num_kv_heads, num_kv_heads))
    k, v = k.to(dtype).float(), v.to(dtype).float()
    keys = torch.full((num_blocks, num_kv_heads, head_dim, BLOCK_SIZE), torch.nan, dtype=dtype)
    values = torch.full((num_blocks, num_kv_heads, BLOCK_SIZE, head_dim), torch.nan, dtype=dtype)
    blocks = np.arange(num_blocks)[::-1].copy()
    places = np.append(np.arange(before), np.arange(count) + (num_blocks - 2) * BLOCK_SIZE)
    tasks = Tasks(
        table=np.array([[0, before, 0, 1, 1], [before + 2, count - 2, 0, before, 0], [before, count, 19, 1, 1]]),
        members=np.arange(total),
        blocks=blocks,
        slots_N=blocks[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE,
    )
    out = PagedAttention(library, tasks, keys, values)(q, k, v, keys, values)
    seen = torch.ones(total, total, dtype=torch.bool).tril()
    seen[before : before + 2, :before] = False
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return (out - exact.transpose(0, 1)).abs().max().item()
