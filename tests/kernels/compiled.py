"""Compiles the Triton kernels for a GPU that is not there, as their callers launch them; prints what each takes.

    python -m tests.kernels.compiled

Nothing runs. One JSON line per case: the kernels, and the bytes of shared memory of a block.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from llamarl.kernels import triton_decode, triton_fingerprint, triton_ops

ARCHITECTURE = 90
FP8 = torch.float8_e4m3fn


class OnGpu(Tensor):
    """Says so; nobody looks at its numbers."""

    is_cuda = True


def given(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


def decode(q: torch.dtype, cached: torch.dtype, head_dim: int) -> None:
    keys, values = given(2, 9, 2, 16, head_dim, dtype=cached)
    integers = (given(size, dtype=torch.int32) for size in (8, 1, 2, 2))
    triton_decode.decode_attention(given(2, 8, head_dim, dtype=q), keys.transpose(2, 3), values, *integers)


def rotate(x: torch.dtype, cached: torch.dtype) -> None:
    heads, angles = given(3, 8, 128, dtype=x), given(3, 128, dtype=torch.float32)
    keys, values = given(2, 9, 8, 16, 128, dtype=cached)
    norm, place = given(128, dtype=x), given(3, dtype=torch.int32)
    triton_ops.rotate_and_write(
        heads, heads, heads, (angles, angles), (norm, norm), 1e-6, (keys.transpose(2, 3), values), (place, place)
    )


def rows(takes: torch.dtype | None) -> None:
    x, weight = given(3, 4096, dtype=torch.bfloat16), given(4096, dtype=torch.bfloat16)
    triton_ops.rms_norm(x, weight, 1e-6, x, takes)
    triton_ops.silu_mul(x, x, takes)
    if takes:
        triton_ops.quantize(x, takes)


def fingerprint() -> None:
    triton_fingerprint.share(given(4096, dtype=torch.int32), 2, 0, 4096, lambda: given(2048, dtype=torch.int64))


CASES: dict[str, Any] = {
    "decode bfloat16": lambda: decode(torch.bfloat16, torch.bfloat16, 128),
    "decode float8": lambda: decode(torch.bfloat16, FP8, 128),
    "decode float32, wide heads": lambda: decode(torch.float32, torch.float32, 256),
    "rotate bfloat16": lambda: rotate(torch.bfloat16, torch.bfloat16),
    "rotate float8": lambda: rotate(torch.bfloat16, FP8),
    "rows": lambda: rows(None),
    "rows int8": lambda: rows(torch.int8),
    "rows float8": lambda: rows(FP8),
    "fingerprint": fingerprint,
}


def main() -> None:
    target = GPUTarget("cuda", ARCHITECTURE, 32)
    triton.runtime.driver.set_active(  # pyrefly: ignore
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    run = triton.JITFunction.run
    made = dict[str, int]()

    def compiled(function: Any, *arguments: Any, **options: Any) -> Any:
        kernel = run(function, *arguments, **options | {"warmup": True})
        assert kernel.asm["cubin"]
        made[function.fn.__name__] = kernel.metadata.shared
        return kernel

    triton.JITFunction.run = compiled  # pyrefly: ignore
    for case, launch in CASES.items():
        made.clear()
        launch()
        sys.stdout.write(json.dumps({"case": case, "shared_bytes": made}) + "\n")


if __name__ == "__main__":
    main()
