"""Products of training on CPUs, in float32 each by the faster of torch's two libraries: MKL, which torch calls by
default, or oneDNN.

MKL uses AVX2 on every AMD processor. oneDNN uses AVX-512 there, but can be slower elsewhere, above all for sums over
tokens. So each product of a linear layer is timed for a class of shapes of weights, once it has reproduced float64, and
torch's default serves unless another is much faster. The choice is kept like that of `paths.py`, so ranks, restarted
processes, repeated steps and replays compute alike. One path has the same bits for the same shapes and number of
threads.

Products of bfloat16 are torch's where the processor has instructions for them, and else those of the same factors in
float32.

Shape suffixes: M tokens, O outputs and I inputs of a linear layer, K the summed dimension.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llamarl.kernels import build

OUTPUT, INPUT, WEIGHT = "output", "input", "weight"
PRODUCTS = (OUTPUT, INPUT, WEIGHT)
"""x W^T, and the gradients g W of x and g^T x of W."""
TORCH, ONEDNN, COPIED = "torch", "onednn", "onednn-copied"
"""oneDNN reads matrices as they are, or copies in which the summed dimension is contiguous."""
TOKENS, STEP = 512, 64
"""Tokens of one call of oneDNN, or a smaller multiple of `STEP`. It makes and keeps code for every size of its
operands: a millisecond and some hundred kilobytes each."""
EVEN = 128
"""A multiple of this number of tokens is one call, which saves copies. Microbatches have few such sizes."""
TIMED_TOKENS, LARGEST, SMALLEST = 512, 512, 8
"""Sizes of weights are rounded up to the next power of two within these bounds."""
_MARGIN = 1.25
"""Torch's default serves unless another path is this many times as fast, so near ties have the same winner
everywhere."""
_TOLERANCE = 1e-5
"""Relative to float64. Sums of 1024 numbers in float32 are off by 1e-6, factors rounded to bfloat16 by 2e-3."""
SWITCHES = (
    "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_ENABLE_INSTRUCTIONS", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA",
    "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE",
)  # fmt: skip
"""Environment variables of the libraries that multiply."""
_KEPT = 128
"""Products of bfloat16 that oneDNN keeps."""
_PRODUCT_US = 30e3
"""Microseconds of measuring a product, in 5 to 9 rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductPaths:
    """Paths that multiply for one class of shapes of weights."""

    paths: dict[str, str]
    """Path by product."""
    measured_us: dict[str, dict[str, float]]
    """Microseconds by product and path that reproduces float64. Empty if there was one path."""
    refused: list[str]
    """Sentences about paths that do not reproduce float64."""


OWN = ProductPaths(paths=dict.fromkeys(PRODUCTS, TORCH), measured_us={}, refused=[])


def linear(x_M_I: Tensor, weight_O_I: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Computes `F.linear`, forward and backward, by the chosen paths. Torch serves everything except float32 matrices
    on a CPU, and inside of `torch.compile`."""
    if (
        torch.compiler.is_compiling()
        or not _is_served(x_M_I, weight_O_I)
        or torch.is_autocast_enabled("cpu")
        or chosen(*weight_O_I.shape).paths == OWN.paths
    ):
        return F.linear(x_M_I, weight_O_I, bias_O)
    y_M_O = _LinearFunction.apply(x_M_I, weight_O_I)
    return y_M_O if bias_O is None else y_M_O + bias_O


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_M_I: Tensor, weight_O_I: Tensor) -> Tensor:
        needs = ctx.needs_input_grad  # frozen weights need no inputs, as with adapters
        ctx.save_for_backward(x_M_I if needs[1] else None, weight_O_I if needs[0] else None)
        return multiply(OUTPUT, x_M_I, weight_O_I)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None]:  # pyrefly: ignore[bad-override]
        (grad_M_O,), (x_M_I, weight_O_I), needs = grad_outputs, ctx.saved_tensors, ctx.needs_input_grad
        grad_M_I = multiply(INPUT, grad_M_O, weight_O_I) if needs[0] else None
        return grad_M_I, multiply(WEIGHT, grad_M_O, x_M_I) if needs[1] else None


def multiply(product: str, a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """Returns one of `PRODUCTS`, without a gradient, of (x, W), (g, W) or (g, x). Writes it into `out`, or adds it to
    `out`."""
    path = TORCH
    if _is_served(a, b):
        path = chosen(*((a.shape[1], b.shape[1]) if product == WEIGHT else b.shape)).paths[product]
    return _multiply(path, product, a, b, out, add)


def multiply_half(product: str, a: Tensor, b: Tensor) -> Tensor:
    """Returns one of `PRODUCTS` of bfloat16 factors on a CPU, as bfloat16. Sums are float32 on all processors."""
    if multiplies_half():
        left_M_K, right_K_N = (a.t() if product == WEIGHT else a), (b.t() if product == OUTPUT else b)
        return torch.mm(left_M_K, right_K_N)
    return multiply(product, a.float(), b.float()).to(torch.bfloat16)


@functools.cache
def multiplies_half() -> bool:
    """Returns whether this processor has instructions for products of bfloat16. Without them torch's products take 5
    times as long as those of the same factors in float32 (576 x 576, 512 tokens, AVX2: 79 instead of 15 ms)."""
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def chosen(num_outputs: int, num_inputs: int) -> ProductPaths:
    """Returns the choice for weights of these sizes."""
    return _chosen(_class(num_outputs), _class(num_inputs), torch.get_num_threads(), build.kept_in())


def even() -> int:
    """Returns the number of tokens of which a microbatch should be a multiple, by the choices made so far."""
    return EVEN if any(choice.paths != OWN.paths for choice in _choices.values()) else 1


def bound_caches() -> None:
    """Has oneDNN keep code and scratch memory for few sizes of bfloat16 products; without effect after the first one.

    Each microbatch has another number of tokens. By default oneDNN, and torch's layer above it, keep 1024 products
    each: gigabytes in a long run. The products of one microbatch fit into `_KEPT` many times, and code for a new size
    takes a few milliseconds.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(_KEPT))


def describe() -> str:
    """Returns a line for the log: the paths in use in this process."""
    parts = list[str]()
    for (o, i), choice in sorted(_choices.items()):
        others = [
            f"{product} by {path} ({choice.measured_us[product][TORCH] / choice.measured_us[product][path]:.2f} times)"
            for product, path in choice.paths.items()
            if path != TORCH
        ]
        parts += [f"{o}x{i}: {', '.join(others) or TORCH}", *choice.refused]
    return f"float32 products of weights: {'; '.join(parts + _notes)}" if parts else ""


_choices: dict[tuple[int, int], ProductPaths] = {}
_notes: list[str] = []


def _is_served(a: Tensor, b: Tensor) -> bool:
    plain = all(
        type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu" and x.ndim == 2
        for x in (a, b)
    )
    return plain and a.numel() > 0 and b.numel() > 0


def _class(size: int) -> int:
    return min(max(1 << (size - 1).bit_length(), SMALLEST), LARGEST)


@functools.cache
def _chosen(o: int, i: int, threads: int, folder: Path | None) -> ProductPaths:
    choice = OWN
    if build.pinned() != TORCH and onednn() is not None:
        name, parts = f"products-{o}x{i}", (torch.__version__, str(threads), *_switches())
        others = folder and not build.is_kept(name, parts) and any(folder.glob(f"{name}-*.json"))
        if others and not _notes:
            _notes.append(
                "the run began on another processor, torch or number of threads, so its numbers now differ by rounding"
            )
        with torch.inference_mode():
            choice = ProductPaths(**build.remembered(name, parts, lambda: asdict(_measured(o, i))))
    _choices[o, i] = choice
    return choice


@functools.cache
def onednn() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Returns oneDNN's product of rows with rows of another matrix, or None if this torch has none by this name."""
    operation = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operation is None or not torch.backends.mkldnn.is_available():
        return None
    return lambda a_M_K, b_N_K: operation(a_M_K, b_N_K, None, "none", [], "")


def _multiply(path: str, product: str, a: Tensor, b: Tensor, out: Tensor | None, add: bool) -> Tensor:
    left_M_K = a.t() if product == WEIGHT else a
    right_K_N = b.t() if product == OUTPUT else b
    if path == TORCH:
        return out.addmm_(left_M_K, right_K_N) if add and out is not None else torch.mm(left_M_K, right_K_N, out=out)
    is_copied = path == COPIED
    if product == WEIGHT:
        parts = zip(left_M_K.split(TOKENS, 1), right_K_N.t().split(TOKENS, 1), strict=True)
        made = [_by_onednn(_filled(one, 1, is_copied), _filled(other, 1, is_copied)) for one, other in parts]
        y_M_N = functools.reduce(Tensor.add_, made)
        if out is None:
            return y_M_N
        return out.add_(y_M_N) if add else out.copy_(y_M_N)
    right_N_K = right_K_N.t().contiguous() if is_copied else right_K_N.t()
    if out is None and len(left_M_K) % EVEN == 0:
        return _by_onednn(_filled(left_M_K, 0, is_copied), right_N_K)
    y_M_N = left_M_K.new_empty(len(left_M_K), len(right_N_K)) if out is None else out
    for block_T_K, y_T_N in zip(left_M_K.split(TOKENS), y_M_N.split(TOKENS), strict=True):
        made_T_N = _by_onednn(_filled(block_T_K, 0, is_copied), right_N_K)[: len(block_T_K)]
        _ = y_T_N.add_(made_T_N) if add and out is not None else y_T_N.copy_(made_T_N)
    return y_M_N


def _by_onednn(left_M_K: Tensor, right_N_K: Tensor) -> Tensor:
    operation = onednn()
    assert operation is not None, "oneDNN was chosen"
    return operation(left_M_K, right_N_K)


def _filled(x: Tensor, dim: int, is_copied: bool) -> Tensor:
    """Returns x with zeros behind its tokens, up to the next multiple of `STEP`; contiguous if `is_copied`."""
    num_more = -x.shape[dim] % STEP
    if not num_more:
        return x.contiguous() if is_copied else x
    return F.pad(x, (0, num_more) if dim else (0, 0, 0, num_more))


def _operands(product: str, m: int, o: int, i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, g, w = (torch.randn(size, generator=generator) for size in ((m, i), (m, o), (o, i)))
    return {OUTPUT: (x, w), INPUT: (g, w), WEIGHT: (g, x)}[product]


def error_of(path: str, product: str, m: int, o: int, i: int) -> float:
    """Returns the error relative to float64, or infinity if the path fails."""
    a, b = _operands(product, m, o, i)
    exact = _multiply(TORCH, product, a.double(), b.double(), None, False)
    try:
        error = ((_multiply(path, product, a, b, None, False) - exact).norm() / exact.norm()).item()
    except RuntimeError:
        return float("inf")
    return float("inf") if math.isnan(error) else error


def _measured(o: int, i: int) -> ProductPaths:
    paths, measured_us, refused = dict(OWN.paths), dict[str, dict[str, float]](), list[str]()
    for product in PRODUCTS:
        usable = [TORCH]
        for path in (ONEDNN, COPIED)[: 1 if product == OUTPUT else 2]:
            # Sizes that do not fill registers are included.
            error = max(error_of(path, product, m, *sizes) for m, sizes in ((128, (o, i)), (61, (o - 1, i - 1))))
            if error <= _TOLERANCE:
                usable.append(path)
            else:
                refused.append(f"{path} is off by {error:.1g} in {product} {o}x{i} and is not used")
        times_us = _times_us(usable, product, o, i)
        measured_us[product] = {path: round(statistics.median(times), 1) for path, times in times_us.items()}
        paths[product] = _fastest(times_us)
    return ProductPaths(paths=paths, measured_us=measured_us, refused=refused)


def _switches() -> list[str]:
    """Returns variables that make the libraries use other instructions. A measurement holds for one set of them."""
    return [f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ]


def _fastest(times_us: dict[str, list[float]]) -> str:
    """Returns the path with the largest median gain over torch's default in a round, if the least times agree: other
    processes use this core."""
    torch_us, gains = times_us[TORCH], {TORCH: _MARGIN}
    for path, times in times_us.items():
        gain = statistics.median(a / b for a, b in zip(torch_us, times, strict=True))
        gains.setdefault(path, min(gain, min(torch_us) / min(times)))
    return max(gains, key=gains.__getitem__)


def _times_us(paths: list[str], product: str, o: int, i: int) -> dict[str, list[float]]:
    """Returns CPU time of this thread in each round, in which paths take turns."""
    a, b = _operands(product, TIMED_TOKENS, o, i)

    def time_us(path: str) -> float:
        start = time.thread_time()
        _multiply(path, product, a, b, None, False)
        return max(round((time.thread_time() - start) * 1e6, 1), 0.1)

    for path in paths:
        time_us(path)  # makes oneDNN's code
    once_us = sum(map(time_us, paths))
    rounds = int(min(max(_PRODUCT_US / once_us, 5), 9))
    turns = [[time_us(path) for path in paths] for _ in range(rounds)]
    return dict(zip(paths, map(list, zip(*turns, strict=True)), strict=True))
