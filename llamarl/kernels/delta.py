"""The recurrent form of delta nets for generators, and the gates of hybrid models: in C++ on CPUs (`delta.cpp`). Triton
computes the recurrent form on GPUs (`parts/cuda/delta.py`). Both must first reproduce torch, which else computes token
by token.

A value head keeps a state S [K, V]. A token with query q, key k, value v, log decay g and strength b does (arXiv
2412.06464)

    S := exp(g) S,   S := S + k b (v - k S)^T,   output := q S

A run is consecutive tokens of one sequence, whose state and last inputs of the convolution are read from one slot and
written to another. A decoded token is a run of one token. A token has the same bits in a run of any length, next to any
other runs, so what was decoded can be replayed as a prefill.

Shape suffixes: N packed tokens, C mixed channels, W conv width (D: without the newest token), H value heads, K key dim,
V value dim, S slots, R runs, B runs of one token, J key heads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.kernels import gpu
from llamarl.kernels.build import Kernel, load
from llamarl.kernels.delta_shape import DeltaShape

_LEAST_NORM = 1e-6
"""Added to the squared norm of queries and keys, as in the released models."""
_P, _I = ctypes.c_void_p, ctypes.c_int64
_LARGEST = 1e-4
"""Largest difference of a kernel to torch. Outputs are below 10."""
_CHECKED = DeltaShape(layers=(0,), num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=21, conv_width=4)


@functools.cache
def kernel() -> Kernel:
    """Compiles the kernel, and checks it against torch, at the first call."""
    loaded = load("delta")
    library = loaded.library
    if library is None:
        return loaded
    library.delta_runs.argtypes = (_P, _I, *[_P] * 7, *[_I] * 5)
    library.delta_gates.argtypes = (_P, _I, _P, _I, *[_P] * 4, _I, _I)
    library.sigmoid_mul.argtypes = (_P, _P, _I, _I, _P, _I, _I)
    for name in ("delta_runs", "delta_gates", "sigmoid_mul"):
        getattr(library, name).restype = None
    wrong = _wrong(library)
    return Kernel(library=None, reason=f"delta.cpp: {wrong} differs from torch on this processor") if wrong else loaded


def backend_name(device: torch.device) -> str:
    """Returns what computes the recurrent form in float32, for the log: `c++`, `triton`, or `torch` and the reason."""
    on_cpu = device.type == "cpu"
    reason = kernel().reason if on_cpu else gpu.reason("delta", device)
    return f"torch ({reason})" if reason else "c++" if on_cpu else "triton"


def gates(b_N_H: Tensor, a_N_H: Tensor, a_log_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log decays and strengths of each head, float32 [N, H]. On CPUs torch's bits would depend on the row's
    place."""
    if (library := _library(b_N_H)) is None:
        return log_decay(a_N_H, a_log_H, dt_bias_H), wide(b_N_H).sigmoid()
    assert b_N_H.stride(-1) == a_N_H.stride(-1) == 1
    decay_N_H, strength_N_H = torch.empty(b_N_H.shape), torch.empty(b_N_H.shape)
    library.delta_gates(
        b_N_H.data_ptr(), b_N_H.stride(0), a_N_H.data_ptr(), a_N_H.stride(0),
        *(x.data_ptr() for x in (a_log_H, dt_bias_H, decay_N_H, strength_N_H)), *b_N_H.shape,
    )  # fmt: skip
    return decay_N_H, strength_N_H


def sigmoid_mul(x_N_I: Tensor, gate: Tensor) -> Tensor:
    """Returns x * sigmoid(gate), with a gate for each channel or for each row, [N, I] or [N, 1]."""
    if (library := _library(x_N_I)) is None:
        return x_N_I * gate.sigmoid()
    assert x_N_I.is_contiguous()
    assert gate.stride(-1) == 1
    y_N_I = torch.empty_like(x_N_I)
    library.sigmoid_mul(
        x_N_I.data_ptr(), gate.data_ptr(), gate.stride(0), gate.shape[1], y_N_I.data_ptr(), *x_N_I.shape
    )
    return y_N_I


def _library(x: Tensor) -> ctypes.CDLL | None:
    return kernel().library if x.device.type == "cpu" and x.dtype == torch.float32 else None


def heads(mixed_N_C: Tensor, delta: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """Returns normed queries over sqrt(K) and normed keys, [N, J, K], and values, [N, H, V], from the convolution's
    outputs. The number of heads follows from the channels, which tensor parallelism cuts."""
    ranks = delta.mixed_size // mixed_N_C.shape[-1]
    sizes = [delta.key_size // ranks, delta.key_size // ranks, delta.value_size // ranks]
    q, k, v = mixed_N_C.split_with_sizes(sizes, -1)
    q, k = (_normed(x.unflatten(-1, (-1, delta.key_dim))) for x in (q, k))
    return q * delta.key_dim**-0.5, k, v.unflatten(-1, (-1, delta.value_dim))


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LEAST_NORM)


def step(
    q_B_J_K: Tensor, k_B_J_K: Tensor, v_B_H_V: Tensor, decay_B_H: Tensor, strength_B_H: Tensor, state_B_H_K_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns outputs [B, H, V] of one token of each sequence, and the states after it."""
    each = v_B_H_V.shape[1] // k_B_J_K.shape[1]
    q_B_H_K, k_B_H_K = (x.repeat_interleave(each, 1) for x in (q_B_J_K, k_B_J_K))
    state_B_H_K_V = state_B_H_K_V * decay_B_H.exp()[..., None, None]
    # Sums, not products of matrices, whose bits depend on the number of rows.
    error_B_H_V = v_B_H_V - (k_B_H_K[..., None] * state_B_H_K_V).sum(-2)
    state_B_H_K_V = state_B_H_K_V + k_B_H_K[..., None] * (strength_B_H[..., None] * error_B_H_V)[..., None, :]
    return (q_B_H_K[..., None] * state_B_H_K_V).sum(-2), state_B_H_K_V


def convolved(windows_N_W_C: Sequence[Tensor], conv_C_W: Tensor) -> Tensor:
    """Returns silu of the causal convolution of each channel, [N, C].

    Args:
        windows_N_W_C: the inputs that each token sees, the oldest first: for each of W places a tensor [N, C].
    """
    summed = windows_N_W_C[0] * conv_C_W[:, 0]
    for place, x_N_C in enumerate(windows_N_W_C[1:], 1):
        summed = summed + x_N_C * conv_C_W[:, place]
    return F.silu(summed)


def wide(x: Tensor) -> Tensor:
    """Returns x in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_decay(a_N_H: Tensor, a_log_H: Tensor, dt_bias_H: Tensor) -> Tensor:
    """Returns the log decays of each token, float32 at least."""
    return -wide(a_log_H).exp() * F.softplus(wide(a_N_H) + wide(dt_bias_H))


def recur(
    runs_R_4: np.ndarray, delta: DeltaShape, mixed_N_C: Tensor, conv_C_W: Tensor, decay_N_H: Tensor,
    strength_N_H: Tensor, states_S_H_K_V: Tensor, inputs_S_D_C: Tensor,
) -> Tensor:  # fmt: skip
    """Computes all runs in order, and changes their slots. Returns outputs [N, H, V]. All tensors are float32.

    Args:
        runs_R_4: first token, number of tokens, slot to read and slot to write of each run, int64. A run without tokens
            copies a slot. A run may read what an earlier run writes.
    """
    given = mixed_N_C, conv_C_W, decay_N_H, strength_N_H
    slots = states_S_H_K_V, inputs_S_D_C
    if library := _library(mixed_N_C):
        return _by_kernel(library, runs_R_4, delta, given, slots)
    if mixed_N_C.dtype == torch.float32 and (kernels := gpu.kernel("delta", mixed_N_C.device)):
        return kernels.recur(runs_R_4, delta, given, slots)
    return recur_by_torch(runs_R_4, delta, given, slots)


def _by_kernel(
    library: ctypes.CDLL, runs_R_4: np.ndarray, delta: DeltaShape, given: tuple[Tensor, ...], slots: tuple[Tensor, ...]
) -> Tensor:
    inputs = [x.contiguous() for x in given]
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (*inputs, *slots))
    out_N_H_V = torch.empty(len(inputs[0]), delta.num_value_heads, delta.value_dim)
    runs_R_4 = np.ascontiguousarray(runs_R_4, np.int64)
    library.delta_runs(
        runs_R_4.ctypes.data, len(runs_R_4), *(x.data_ptr() for x in (*inputs, *slots, out_N_H_V)),
        delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim, delta.conv_width,
    )  # fmt: skip
    return out_N_H_V


def recur_by_torch(
    runs_R_4: np.ndarray, delta: DeltaShape, given: tuple[Tensor, ...], slots: tuple[Tensor, ...]
) -> Tensor:
    """Computes `recur`."""
    out_N_H_V = given[0].new_empty(len(given[0]), delta.num_value_heads, delta.value_dim)
    waves_R = np.array(waves(runs_R_4.tolist()), np.int32)
    steps = list[np.ndarray]()
    for wave in range(waves_R.max(initial=-1) + 1):
        some_R_4 = runs_R_4[waves_R == wave]
        is_one_R = some_R_4[:, 1] == 1
        steps += [
            np.array([[start + token if count else -1, write if token else read, write]])
            for start, count, read, write in some_R_4[~is_one_R].tolist()
            for token in range(max(count, 1))
        ]
        steps.append(some_R_4[is_one_R][:, [0, 2, 3]])
    mixed_N_C, conv_C_W, decay_N_H, strength_N_H = given
    states, inputs = slots
    for tokens, reads, writes in (torch.from_numpy(one.T.copy()).to(mixed_N_C.device) for one in steps if len(one)):
        if tokens[0] < 0:
            for slots_S in (states, inputs):
                slots_S.index_copy_(0, writes, slots_S.index_select(0, reads))
            continue
        window_B_W_C = torch.cat((inputs.index_select(0, reads), mixed_N_C[tokens, None]), 1)
        q, k, v = heads(convolved(window_B_W_C.unbind(1), conv_C_W), delta)
        out, state = step(q, k, v, decay_N_H[tokens], strength_N_H[tokens], states.index_select(0, reads))
        states.index_copy_(0, writes, state)
        inputs.index_copy_(0, writes, window_B_W_C[:, 1:])
        out_N_H_V[tokens] = out
    return out_N_H_V


def waves(runs: Sequence[Sequence[int]]) -> list[int]:
    """Returns the wave of each run. Runs of one wave can be computed in parallel: none of them touches a slot that
    another one writes. Runs that share a slot which one of them writes are computed in their order."""
    written, touched = dict[int, int](), dict[int, int]()
    found = list[int]()
    for _, _, read, write in runs:
        wave = 1 + max(written.get(read, -1), touched.get(write, -1))
        written[write] = wave
        for slot in (read, write):
            touched[slot] = max(wave, touched.get(slot, -1))
        found.append(wave)
    return found


def _wrong(library: ctypes.CDLL) -> str:
    """Returns the kernel that differs from torch, or ""."""
    return "" if difference(functools.partial(_by_kernel, library), torch.device("cpu")) < _LARGEST else "delta_runs"


def difference(compute: Callable[..., Tensor], device: torch.device) -> float:
    """Returns the largest difference of outputs, states and inputs to torch in float64: for a run of 5 tokens from
    zeros, two that continue it, and two that fork from the last one."""
    generator, delta = torch.Generator().manual_seed(0), _CHECKED
    runs_R_4 = np.array([(0, 5, 0, 1), (5, 1, 1, 2), (6, 1, 1, 1), (7, 2, 1, 3), (9, 1, 1, 4)])
    mixed, conv = (torch.randn(*size, generator=generator) for size in ((10, delta.mixed_size), (delta.mixed_size, 4)))
    given = mixed, conv, -torch.rand(10, 4, generator=generator), torch.rand(10, 4, generator=generator)
    results = list[list[Tensor]]()
    for function, target, dtype in (
        (recur_by_torch, torch.device("cpu"), torch.float64), (compute, device, torch.float32)
    ):  # fmt: skip
        states = torch.zeros(5, delta.num_value_heads, delta.key_dim, delta.value_dim, dtype=dtype, device=target)
        inputs = torch.zeros(5, delta.conv_width - 1, delta.mixed_size, dtype=dtype, device=target)
        out = function(runs_R_4, delta, tuple(x.to(target, dtype) for x in given), (states, inputs))
        results.append([x.double().cpu() for x in (out, states, inputs)])
    return max((ours - exact).abs().nan_to_num(torch.inf).max().item() for exact, ours in zip(*results, strict=True))
