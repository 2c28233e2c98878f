"""The recurrent form of delta nets on GPUs: what `kernels/delta.py: recur` computes, in two launches for many runs.

The first launch computes the convolution of each token and head, its activation, and the norms of queries and keys. All
tokens are computed in parallel, because a token's inputs are known before the step. The second launch computes the
delta rule: a program keeps a few columns of the state of one value head in registers, and loops over the tokens of one
run. At its end it writes its columns, and the last inputs of its channels.

A run may read a slot that an earlier run of the call writes. `kernels/delta.py: waves` orders such runs, and each
wave has its own two launches. Most calls have one to three waves.

Every program computes the same operations in the same order, whatever the lengths and number of runs, and states pass
between runs in float32. So the bits of a token do not depend on the cut into runs. Sizes are compiled in. Where tensors
begin is not, because another alignment could change the order of a sum. Without a GPU, Triton's interpreter runs the
kernels (`TRITON_INTERPRET=1`).

Shape suffixes: N packed tokens, C mixed channels, W conv width (D: without the newest token), J key heads, H value
heads, K key dim, V value dim, S slots, R runs; in the kernels C channels of a head, K, D as powers of two, and V
columns of a program.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from llamarl.kernels.delta import waves
from llamarl.kernels.delta_shape import DeltaShape

_COLUMNS = 8
"""Most columns of a state in one program. 128 rows of 8 columns are 32 registers of each thread of a warp."""
_LEAST_NORM = tl.constexpr(1e-6)
"""Added to the squared norm of queries and keys, as in `kernels/delta.py`."""


def recur(runs_R_4: np.ndarray, delta: DeltaShape, given: tuple[Tensor, ...], slots: tuple[Tensor, Tensor]) -> Tensor:
    """Computes all runs and changes their slots. Returns outputs [N, H, V].

    Args:
        runs_R_4: first token, number of tokens, slot to read and slot to write of each run.
        given: mixed [N, C], conv [C, W], log decays [N, H] and strengths [N, H], float32.
        slots: states [S, H, K, V] and last inputs [S, D, C], float32.
    """
    mixed_N_C, conv_C_W, decay_N_H, strength_N_H = (x.contiguous() for x in given)
    states, inputs = slots
    assert all(x.dtype == torch.float32 for x in (*given, *slots))
    assert all(x.is_contiguous() for x in slots)
    assert mixed_N_C.shape[1] == delta.mixed_size
    heads_N_C = torch.empty_like(mixed_N_C)
    out_N_H_V = mixed_N_C.new_empty(len(mixed_N_C), delta.num_value_heads, delta.value_dim)
    sizes = {
        "KEY_HEADS": delta.num_key_heads, "VALUE_HEADS": delta.num_value_heads, "KEY_DIM": delta.key_dim,
        "VALUE_DIM": delta.value_dim, "WIDTH": delta.conv_width, "num_warps": 1,
    }  # fmt: skip
    key_block, value_block = triton.next_power_of_2(delta.key_dim), triton.next_power_of_2(delta.value_dim)
    columns = min(_COLUMNS, value_block)
    num_heads, num_blocks = 2 * delta.num_key_heads + delta.num_value_heads, -(-delta.value_dim // columns)
    with torch.cuda.device_of(mixed_N_C):
        for tokens_N_3, some_R_4 in _uploaded(runs_R_4, mixed_N_C.device):
            if len(tokens_N_3):
                mix: Any = _mix_head[len(tokens_N_3), num_heads]
                mix(
                    tokens_N_3, mixed_N_C, conv_C_W, inputs, heads_N_C, **sizes, SCALE=delta.key_dim**-0.5,
                    C=max(key_block, value_block),
                )  # fmt: skip
            run: Any = _recur_run[len(some_R_4), delta.num_value_heads, num_blocks]
            run(
                some_R_4, heads_N_C, mixed_N_C, decay_N_H, strength_N_H, states, inputs, out_N_H_V, **sizes,
                K=key_block, V=columns, D=triton.next_power_of_2(max(delta.conv_width - 1, 1)),
            )  # fmt: skip
    return out_N_H_V


def _uploaded(runs_R_4: np.ndarray, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Returns for each wave its tokens (token, first token of its run, slot to read) and its runs, int32 on the device.
    The layers of a step share them."""
    # A stream may not read what another stream still copies.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _upload(np.ascontiguousarray(runs_R_4, np.int32).tobytes(), device, stream)


@functools.lru_cache(maxsize=2)
def _upload(content: bytes, device: torch.device, stream: int) -> list[tuple[Tensor, Tensor]]:
    del stream
    runs_R_4 = np.frombuffer(content, np.int32).reshape(-1, 4)
    waves_R = np.array(waves(runs_R_4.tolist()), np.int32)
    parts = list[np.ndarray]()
    for wave in range(waves_R.max(initial=-1) + 1):
        some_R_4 = runs_R_4[waves_R == wave]
        counts_R = some_R_4[:, 1]
        first_N, slot_N = (np.repeat(some_R_4[:, column], counts_R) for column in (0, 2))
        within_N = np.arange(len(first_N)) - np.repeat(counts_R.cumsum() - counts_R, counts_R)
        parts += [np.column_stack((first_N + within_N, first_N, slot_N)), some_R_4]
    if not parts:
        return []
    packed = np.concatenate([part.ravel() for part in parts]).astype(np.int32)
    pieces = torch.from_numpy(packed).to(device, non_blocking=True).split([part.size for part in parts])
    tensors = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
    return list(zip(tensors[::2], tensors[1::2], strict=True))


@triton.jit(do_not_specialize_on_alignment=["tokens", "mixed", "conv", "inputs", "heads"])
def _mix_head(
    tokens, mixed, conv, inputs, heads, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Computes one head of one token: normed queries over sqrt(K), normed keys, or values."""
    place, head, c_C = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, C)
    token = tl.load(tokens + place * 3).to(tl.int64)
    first, slot = tl.load(tokens + place * 3 + 1), tl.load(tokens + place * 3 + 2).to(tl.int64)
    channels = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    is_value = head >= 2 * KEY_HEADS
    inside_C = c_C < tl.where(is_value, VALUE_DIM, KEY_DIM)
    values = 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM
    channel_C = tl.where(is_value, values, head * KEY_DIM) + c_C
    sum_C = tl.zeros((C,), tl.float32)
    for w in tl.static_range(WIDTH):
        seen = token - (WIDTH - 1 - w)
        is_new = seen >= first
        x_C = tl.load(mixed + seen * channels + channel_C, mask=inside_C & is_new, other=0.0)
        if w < WIDTH - 1:
            before = slot * (WIDTH - 1) + (WIDTH - 1) + seen - first
            old_C = tl.load(inputs + before * channels + channel_C, mask=inside_C & (seen < first), other=0.0)
            x_C = tl.where(is_new, x_C, old_C)
        sum_C += x_C * tl.load(conv + channel_C * WIDTH + w, mask=inside_C, other=0.0)
    y_C = sum_C / (1.0 + tl.exp(-sum_C))
    factor = tl.rsqrt(tl.sum(y_C * y_C, 0) + _LEAST_NORM)
    factor = tl.where(is_value, 1.0, tl.where(head < KEY_HEADS, factor * SCALE, factor))
    tl.store(heads + token * channels + channel_C, y_C * factor, mask=inside_C)


@triton.jit
def _keep_inputs(
    mixed, inputs, start, count, read, write, channel_C, inside_C, channels: tl.constexpr, BEHIND: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Writes the last inputs of some channels behind a run. A run of few tokens keeps some of the inputs before it."""
    d_D = tl.arange(0, D)
    seen_D = count + d_D - BEHIND
    inside_D_C = (d_D < BEHIND)[:, None] & inside_C[None, :]
    is_new_D_C = (seen_D >= 0)[:, None]
    new = mixed + (start + seen_D)[:, None] * channels + channel_C[None, :]
    new_D_C = tl.load(new, mask=inside_D_C & is_new_D_C, other=0.0)
    old = inputs + (read * BEHIND + BEHIND + seen_D)[:, None] * channels + channel_C[None, :]
    old_D_C = tl.load(old, mask=inside_D_C & (seen_D < 0)[:, None], other=0.0)
    tl.debug_barrier()  # the slot that is read may be the slot that is written
    at = inputs + (write * BEHIND + d_D)[:, None] * channels + channel_C[None, :]
    tl.store(at, tl.where(is_new_D_C, new_D_C, old_D_C), mask=inside_D_C)


@triton.jit(do_not_specialize_on_alignment=["runs", "heads", "mixed", "decays", "strengths", "states", "inputs", "out"])
def _recur_run(
    runs, heads, mixed, decays, strengths, states, inputs, out, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Computes some columns of one value head for one run."""
    run, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start, count = tl.load(runs + run * 4).to(tl.int64), tl.load(runs + run * 4 + 1)
    read, write = tl.load(runs + run * 4 + 2).to(tl.int64), tl.load(runs + run * 4 + 3).to(tl.int64)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    each: tl.constexpr = VALUE_HEADS // KEY_HEADS
    row_K, column_V = tl.arange(0, K), block * V + tl.arange(0, V)
    is_row_K, is_column_V = row_K < KEY_DIM, column_V < VALUE_DIM
    inside_K_V = is_row_K[:, None] & is_column_V[None, :]
    at_K_V = head * KEY_DIM * VALUE_DIM + row_K[:, None] * VALUE_DIM + column_V[None, :]
    of_slot: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    state_K_V = tl.load(states + read * of_slot + at_K_V, mask=inside_K_V, other=0.0)
    query_K = head // each * KEY_DIM + row_K
    key_K, value_V = KEY_HEADS * KEY_DIM + query_K, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column_V
    for place in range(count):
        token = start + place
        row = heads + token * channels
        q_K = tl.load(row + query_K, mask=is_row_K, other=0.0)
        k_K = tl.load(row + key_K, mask=is_row_K, other=0.0)
        v_V = tl.load(row + value_V, mask=is_column_V, other=0.0)
        strength = tl.load(strengths + token * VALUE_HEADS + head)
        state_K_V *= tl.exp(tl.load(decays + token * VALUE_HEADS + head))
        error_V = strength * (v_V - tl.sum(k_K[:, None] * state_K_V, 0))
        state_K_V += k_K[:, None] * error_V[None, :]
        made_V = tl.sum(q_K[:, None] * state_K_V, 0)
        tl.store(out + (token * VALUE_HEADS + head) * VALUE_DIM + column_V, made_V, mask=is_column_V)
    tl.debug_barrier()  # the slot that is read may be the slot that is written
    tl.store(states + write * of_slot + at_K_V, state_K_V, mask=inside_K_V)
    if WIDTH > 1:
        _keep_inputs(mixed, inputs, start, count, read, write, value_V, is_column_V, channels, WIDTH - 1, D)
        if (block == 0) & (head % each == 0):  # value heads share a key head, whose channels have one writer
            _keep_inputs(mixed, inputs, start, count, read, write, query_K, is_row_K, channels, WIDTH - 1, D)
            _keep_inputs(mixed, inputs, start, count, read, write, key_K, is_row_K, channels, WIDTH - 1, D)
