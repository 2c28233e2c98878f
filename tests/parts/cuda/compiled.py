"""Compiles the Triton kernels for a GPU that is not there, as their callers launch them; prints what each takes.

    python -m tests.parts.cuda.compiled [--all]

Nothing runs. One JSON line per case and kernel: how often it was compiled, and the bytes of shared memory of a block.
With `--all` at the shapes of models of many sizes, also registers, and bytes that did not fit into them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from llamarl.kernels.delta_shape import DeltaShape
from llamarl.parts.cuda import decode as decoding
from llamarl.parts.cuda import delta as delta_nets
from llamarl.parts.cuda import fingerprint as fingerprinting
from llamarl.parts.cuda import logprobs as log_softmax
from llamarl.parts.cuda import ops
from llamarl.parts.cuda import products as fused
from llamarl.parts.cuda import sample as sampling
from llamarl.parts.cuda import train as training

ARCHITECTURE = 90
FP8 = torch.float8_e4m3fn


class OnGpu(Tensor):
    """Says so; nobody looks at its numbers."""

    is_cuda = True


def given(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


@dataclass(frozen=True)
class Shape:
    """Of one rank."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    norms: bool = False


SHAPES = {
    "1b": Shape(2048, 32, 8, 64, 8192),
    "8b": Shape(4096, 32, 8, 128, 14_336),
    "70b": Shape(8192, 64, 8, 128, 28_672),
    "70b tp 8": Shape(8192, 8, 1, 128, 3584),
    "405b tp 8": Shape(16_384, 16, 1, 128, 6656),
    "qwen3 0.6b": Shape(1024, 16, 8, 128, 3072, norms=True),
}
WIDE = Shape(4096, 4, 2, 256, 4096)


def decode(shape: Shape, q: torch.dtype, cached: torch.dtype, rows: int = 2, shift: int = 0) -> None:
    """`shift`: words by which the integers of a step are not where a vector could begin."""
    keys, values = given(2, 9, shape.kv_heads, 16, shape.head_dim, dtype=cached)
    integers = (given(size + shift, dtype=torch.int32)[shift:] for size in (8, 1, rows, rows))
    decoding.decode_attention(
        given(rows, shape.heads, shape.head_dim, dtype=q), keys.transpose(2, 3), values, *integers
    )


def rotate(shape: Shape, x: torch.dtype, cached: torch.dtype, shift: int = 0) -> None:
    q, kv = given(3, shape.heads, shape.head_dim, dtype=x), given(3, shape.kv_heads, shape.head_dim, dtype=x)
    angles, norm = given(3, shape.head_dim, dtype=torch.float32), given(shape.head_dim, dtype=x)
    keys, values = given(2, 9, shape.kv_heads, 16, shape.head_dim, dtype=cached)
    place, norms = given(3 + shift, dtype=torch.int32)[shift:], (norm, norm) if shape.norms else None
    ops.rotate_and_write(q, kv, kv, (angles, angles), norms, 1e-6, (keys.transpose(2, 3), values), (place, place))


def attend(shape: Shape, x: torch.dtype, cached: torch.dtype, num_rows: int = 64, shift: int = 0) -> None:
    """A decode step's attention in one launch."""
    q, kv = (
        given(num_rows, shape.heads, shape.head_dim, dtype=x),
        given(num_rows, shape.kv_heads, shape.head_dim, dtype=x),
    )
    angles, norm = given(num_rows, shape.head_dim, dtype=torch.float32), given(shape.head_dim, dtype=x)
    keys, values = given(2, 9, shape.kv_heads, 16, shape.head_dim, dtype=cached)
    integers = tuple(given(size + shift, dtype=torch.int32)[shift:] for size in (8, 1, num_rows, num_rows))
    norms = (norm, norm) if shape.norms else None
    decoding.attend_rotated(q, kv, kv, (angles, angles), norms, 1e-6, (keys.transpose(2, 3), values), integers)


def ends(shape: Shape, num_rows: int = 64, shift: int = 0) -> None:
    """Embeddings of a step, and its sampling."""
    tokens = given(num_rows + shift, dtype=torch.int32)[shift:]
    sampling.embed(tokens, tokens, given(128_256, shape.hidden, dtype=torch.bfloat16), fused.num_parts(shape.hidden))
    numbers = given(num_rows + shift, dtype=torch.float32)[shift:]
    sampling.draw(given(num_rows, 128_256, dtype=torch.float32), numbers, numbers, given(num_rows, dtype=torch.int32))


def few_rows(shape: Shape, num_rows: int) -> None:
    """The products of a layer with what is around them."""
    stream, norm = given(num_rows, shape.hidden, dtype=torch.float32), given(shape.hidden, dtype=torch.bfloat16)
    squares, query = given(fused.num_parts(shape.hidden), num_rows, dtype=torch.float32), shape.heads * shape.head_dim
    qkv = given(query + 2 * shape.kv_heads * shape.head_dim, shape.hidden, dtype=torch.bfloat16)
    fused.normed(stream, squares, norm, 1e-6, qkv, None)
    fused.gated(stream, squares, norm, 1e-6, given(2 * shape.inner, shape.hidden, dtype=torch.bfloat16))
    for width in (query, shape.inner):
        weight = given(shape.hidden, width, dtype=torch.bfloat16)
        fused.added(given(num_rows, width, dtype=torch.bfloat16), weight, stream, squares)


def eight_bits(shape: Shape, dtype: torch.dtype, num_rows: int) -> None:
    """The products of a layer with quantized weights."""
    query, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    for outputs, inputs in (query + 2 * kv, hidden), (hidden, query), (2 * shape.inner, hidden), (hidden, shape.inner):
        scales, more = given(num_rows, 1, dtype=torch.float32), given(outputs, dtype=torch.float32)
        x, weight = given(num_rows, inputs, dtype=dtype), given(outputs, inputs, dtype=dtype)
        fused.scaled(x, scales, weight, more, None, torch.bfloat16)
        if dtype == torch.int8:
            ops.rescale(given(num_rows, outputs, dtype=torch.int32), scales, more, None, torch.bfloat16)


def rows(shape: Shape, takes: torch.dtype | None) -> None:
    x, weight = given(3, shape.hidden, dtype=torch.float32), given(shape.hidden, dtype=torch.bfloat16)
    delta = given(3, shape.hidden, dtype=torch.bfloat16)
    inner = given(3, shape.inner, dtype=torch.bfloat16)
    ops.rms_norm(x, weight, 1e-6, delta, takes)
    ops.silu_mul(inner, inner, takes)
    if takes:
        ops.quantize(delta, takes)


def train(shape: Shape) -> None:
    stream, weight = given(3, shape.hidden, dtype=torch.float32), given(shape.hidden, dtype=torch.float32)
    grad, inner = given(3, shape.hidden, dtype=torch.bfloat16), given(3, shape.inner, dtype=torch.bfloat16)
    training.rms_norm(stream, weight, 1e-6, torch.bfloat16)
    training.rms_norm_backward(grad, stream, weight, 1e-6)
    training.silu_mul(inner, inner)
    training.silu_mul_backward(inner, inner, inner)
    heads, angles = (
        given(3, shape.heads, shape.head_dim, dtype=torch.bfloat16),
        given(3, 1, shape.head_dim, dtype=torch.float32),
    )
    for back in (False, True):
        training.rotated(heads, angles, angles, back)


def logprobs() -> None:
    logits, numbers = given(3, 4096, dtype=torch.float32), given(3, 1, dtype=torch.float32)
    targets = given(3, dtype=torch.int64)
    log_softmax.add_tile(logits, targets, numbers, numbers, numbers)
    log_softmax.gradient(logits, targets, given(3, dtype=torch.float32), numbers, torch.bfloat16)


def fingerprint(columns: int = 2048) -> None:
    words = given(2 * columns, dtype=torch.int32)
    fingerprinting.share(words, 2, 0, 2 * columns, lambda: given(2048, dtype=torch.int64))


QWEN = DeltaShape(layers=(0,), num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
DELTAS = {
    "qwen3-next": QWEN,
    "qwen3-next tp 8": replace(QWEN, num_key_heads=2, num_value_heads=4),
    "demo": replace(QWEN, num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16),
    "wide": replace(QWEN, key_dim=256, value_dim=256),
    "odd": replace(QWEN, num_key_heads=3, num_value_heads=3, key_dim=7, value_dim=21, conv_width=3),
}


def delta(shape: DeltaShape, num_tokens: int = 3, shift: int = 0) -> None:
    """Prompts that follow each other, and rows of one token: two waves. Tensors begin `shift` words further."""

    def moved(*sizes: int) -> Tensor:
        return given(prod(sizes) + shift, dtype=torch.float32)[shift:].view(sizes)

    heads, slots = shape.num_value_heads, 4
    inputs = (moved(num_tokens, shape.mixed_size), moved(shape.mixed_size, shape.conv_width))
    kept = moved(slots, heads, shape.key_dim, shape.value_dim), moved(slots, shape.conv_width - 1, shape.mixed_size)
    runs_R_4 = np.array([(0, num_tokens - 2, 0, 1), (num_tokens - 2, 1, 1, 1), (num_tokens - 1, 1, 0, 2)])
    delta_nets.recur(runs_R_4, shape, (*inputs, moved(num_tokens, heads), moved(num_tokens, heads)), kept)


def cases(shape: Shape) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"rows {takes}": lambda takes=takes: rows(shape, takes) for takes in (None, torch.int8, FP8)
    }
    for cached in (torch.bfloat16, FP8):
        found[f"rotate {cached}"] = lambda cached=cached: rotate(shape, torch.bfloat16, cached)
        for batch in (1, 8, 64, 512):  # with each of these a row is cut into another number of parts
            found[f"decode {cached}, {batch} rows"] = lambda cached=cached, batch=batch: decode(
                shape, torch.bfloat16, cached, batch
            )
        found[f"attend {cached}"] = lambda cached=cached: attend(shape, torch.bfloat16, cached)
    for batch in (8, 64):
        found[f"few rows, {batch}"] = lambda batch=batch: few_rows(shape, batch)
        for dtype in (torch.int8, FP8):
            found[f"{dtype}, {batch} rows"] = lambda dtype=dtype, batch=batch: eight_bits(shape, dtype, batch)
    found["ends"] = lambda: ends(shape)
    found["train"] = lambda: train(shape)
    return found


def aligned_anyhow() -> None:
    """Steps of different sizes, whose integers begin at every place of a vector; rows of 1, 6 and 16 programs."""
    for shift in range(4):
        decode(SHAPES["8b"], torch.bfloat16, torch.bfloat16, shift=shift)
        rotate(SHAPES["8b"], torch.bfloat16, torch.bfloat16, shift=shift)
        ends(SHAPES["8b"], shift=shift)
        delta(DELTAS["odd"], 3 + 16 * shift, shift)
    for blocks in (1, 41, 127):
        fingerprint(2048 * blocks)


SMALL: dict[str, Any] = {
    "decode bfloat16": lambda: decode(SHAPES["8b"], torch.bfloat16, torch.bfloat16),
    "decode float8": lambda: decode(SHAPES["8b"], torch.bfloat16, FP8),
    "decode float32, wide heads": lambda: decode(WIDE, torch.float32, torch.float32),
    "decode bfloat16, wide heads": lambda: decode(WIDE, torch.bfloat16, torch.bfloat16),
    "decode float8, wide heads": lambda: decode(WIDE, torch.bfloat16, FP8),
    "attend bfloat16": lambda: attend(replace(SHAPES["8b"], norms=True), torch.bfloat16, torch.bfloat16),
    "attend float8": lambda: attend(SHAPES["8b"], torch.bfloat16, FP8),
    "few rows": lambda: few_rows(SHAPES["8b"], 64),
    "few rows int8": lambda: eight_bits(SHAPES["8b"], torch.int8, 64),
    "few rows float8": lambda: eight_bits(SHAPES["8b"], FP8, 64),
    "ends": lambda: ends(SHAPES["8b"]),
    "train": lambda: train(SHAPES["8b"]),
    "log-probs": logprobs,
    "rotate bfloat16": lambda: rotate(replace(SHAPES["8b"], norms=True), torch.bfloat16, torch.bfloat16),
    "rotate float8": lambda: rotate(replace(SHAPES["8b"], norms=True), torch.bfloat16, FP8),
    "rows": lambda: rows(SHAPES["8b"], None),
    "rows int8": lambda: rows(SHAPES["8b"], torch.int8),
    "rows float8": lambda: rows(SHAPES["8b"], FP8),
    "fingerprint": fingerprint,
    "delta nets": lambda: delta(QWEN),
    "aligned anyhow": aligned_anyhow,
}
ALL = {f"{name}: {case}": launch for name, shape in SHAPES.items() for case, launch in cases(shape).items()}
ALL |= {f"hybrids: delta nets of {name}": lambda shape=shape: delta(shape) for name, shape in DELTAS.items()}
ALL |= {"every model: log-probs": logprobs, "every model: fingerprint": fingerprint}


def resources(ptx: str) -> dict[str, int]:
    """Registers, and bytes that are spilled, as the assembler of Triton's wheel says."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        target = re.search(r"\.target (\w+)", ptx)
        assert target is not None
        said = subprocess.run(
            [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1]}", source, "-o", Path(folder, "out")],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers, spilled = re.search(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes (?:spill|stack)", said)
    assert registers is not None and spilled, said
    return {"registers": int(registers[1]), "spilled_bytes": sum(map(int, spilled))}


def main() -> None:
    target = GPUTarget("cuda", ARCHITECTURE, 32)
    triton.runtime.driver.set_active(  # pyrefly: ignore
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    run, everything = triton.JITFunction.run, "--all" in sys.argv
    made = dict[str, dict[int, Any]]()

    def compiled(function: Any, *arguments: Any, **options: Any) -> Any:
        kernel = run(function, *arguments, **options | {"warmup": True})
        assert kernel.asm["cubin"]
        made.setdefault(function.fn.__name__, {})[id(kernel)] = kernel
        return kernel

    triton.JITFunction.run = compiled  # pyrefly: ignore
    for case, launch in (ALL if everything else SMALL).items():
        made.clear()
        launch()
        for name, kernels in made.items():
            taken = [{"shared_bytes": one.metadata.shared} for one in kernels.values()]
            if everything:
                taken = [t | resources(k.asm["ptx"]) for t, k in zip(taken, kernels.values(), strict=True)]
            most = {key: max(one[key] for one in taken) for key in taken[0]}
            sys.stdout.write(json.dumps({"case": case, "kernel": name, "count": len(kernels), **most}) + "\n")


if __name__ == "__main__":
    main()
