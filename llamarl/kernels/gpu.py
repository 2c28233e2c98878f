"""The Triton kernels, on GPUs where they reproduce torch; elsewhere torch computes, and `reason` says why."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

from llamarl.kernels import build
from llamarl.kernels.attention import BLOCK_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """What there is for one device."""

    decode: ModuleType | None = None
    """`triton_decode`; None: torch does its work."""
    reason: str = ""
    """Why not."""


@functools.cache
def fused(device: torch.device) -> Fused:
    """Compiled, and checked against torch, at the first call."""
    if device.type != "cuda":
        return Fused(reason=f"{device.type} device")
    if build.pinned() == "torch":
        return Fused(reason=f"{build.VARIABLE}=torch")
    if not torch.backends.cuda.is_built():
        return Fused(reason="this torch has no CUDA")
    try:
        decode = importlib.import_module("llamarl.kernels.triton_decode")
    except ImportError as error:
        return Fused(reason=str(error))
    from triton.errors import TritonError

    try:
        error = decode_error(decode, device)
    except (RuntimeError, TritonError) as failed:
        return Fused(reason=f"{type(failed).__name__}: {failed}")
    return Fused(decode=decode) if error < 1e-2 else Fused(reason=f"triton_decode.py is off by {error:.1g} here")


def decode_error(decode: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """Largest difference to float64: 2 rows over a shared prefix, 6 heads over 2, and a table with wider rows."""
    num_heads, num_kv_heads, head_dim, prefix, width = 6, 2, 64, 300, 30
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 40, num_kv_heads, BLOCK_SIZE, head_dim, generator=generator).to(dtype)
    q = torch.randn(2, num_heads, head_dim, generator=generator).to(dtype)
    table, own_B = torch.randperm(40, generator=generator)[:width].repeat(2, 1).int(), torch.tensor([1, 170])
    integers = (table.flatten(), torch.tensor([width]), torch.tensor([prefix] * 2), own_B)
    arguments = (x.to(device) for x in (q, keys.transpose(2, 3), values, *(x.int() for x in integers)))
    out = decode.decode_attention(*arguments).double().cpu()
    exact = torch.empty(out.shape, dtype=torch.float64)
    for row, own in enumerate(own_B.tolist()):
        start = -(-prefix // BLOCK_SIZE) * BLOCK_SIZE
        seen = [*range(prefix), *range(start, start + own)]
        key_J_N_K, value_J_N_K = (x[table[row]].transpose(0, 1).flatten(1, 2)[:, seen].double() for x in (keys, values))
        q_J_r_K = q[row].double().unflatten(0, (num_kv_heads, -1))
        weights_J_r_N = torch.softmax(q_J_r_K @ key_J_N_K.transpose(1, 2) * head_dim**-0.5, -1)
        exact[row] = (weights_J_r_N @ value_J_N_K).flatten(0, 1)
    return (out - exact).abs().max().item()
