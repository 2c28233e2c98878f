"""Chooses the code that multiplies weights: every path of the processor is checked and timed, and the fastest serves.

A path is one arithmetic for all numbers of rows, with float32 results, in which a row's bits do not depend on other
rows. Torch's matmul does not have this property, so it serves only if no path does. The choice is made once per
processor, type and shape, at decode and prefill sizes, and is kept in the cache folder. So replicas, restarted replicas
and resumed runs compute alike.

Shape suffixes: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.kernels import build
from llamarl.kernels.build import Kernel

_P, _I = ctypes.c_void_p, ctypes.c_int64
KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}
ROWS = (32, 128, 512)
"""Rows of decode and prefill steps, at which paths are timed."""
_TIMED_ELEMENTS = 1 << 22
"""Largest number of timed elements of weights: more than the caches next to the core hold."""
_MARGIN = 1.2
"""The path with the widest instructions serves unless another is this many times as fast, so near ties have the same
winner everywhere."""
_DOT_MARGIN = 1.5
"""Dot products of bfloat16 serve if their peak is this many times the peak of float32 multiply-adds: 2 on Zen 4."""
_TOLERANCES = {"float32": 1e-5, "bfloat16": 4e-3, "int8": 1.2e-2}
"""Allowed error of a product, relative to float64. bfloat16 rounds x by 2^-9 at most. int8 rounds by half a step of a
127th of the row's largest value, 0.7 % of its norm if that is three times the root mean square. Sums in float32 add
1e-6."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """One way to multiply weights of one type."""

    name: str
    """Begins with the instructions, as in `LLAMARL_KERNELS`."""
    multiply: Any
    """C function of (x, w, int8: scales, bias or None, y, M, N, K, add to y)."""
    pack: Any = None
    """C function of (w, N, K, out) that writes the copy which `multiply` needs in place of w. None means that it reads
    w."""
    packed_bytes: Any = None
    """C function of (N, K) that returns the bytes of that copy."""
    peak: Any = None
    """C function that repeats a product with operands in L1, and returns the number of multiplications."""

    def packed(self, values_N_K: Tensor) -> Tensor:
        """Returns weights for `multiply`, in new memory if it packs."""
        if self.pack is None:
            return values_N_K
        out = torch.empty(self.packed_bytes(*values_N_K.shape), dtype=torch.uint8)
        self.pack(values_N_K.data_ptr(), *values_N_K.shape, out.data_ptr())
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Path that serves the weights of one shape, with the measurements."""

    path: str
    measured_us: dict[str, list[float]]
    """Microseconds of a product of `ROWS`, by path. Empty if there was one path."""
    peak_gflops: float = 0.0
    """GFLOP/s of the chosen path, with operands in L1."""

    def describe(self, kind: str, n: int, k: int) -> str:
        """Returns the shape and the path's measured speed, for the log."""
        shape = f"{n}x{k}"
        if not self.measured_us:
            return shape
        decode_us, _, prefill_us = self.measured_us[self.path]
        gflops, gb_s = 2e-3 * ROWS[-1] * n * k / prefill_us, 1e-3 * n * k * getattr(torch, kind).itemsize / decode_us
        return f"{shape} at {gflops:.0f} GFLOP/s = {gflops / self.peak_gflops:.0%} of its peak, {gb_s:.1f} GB/s"


@functools.cache
def offered(kind: str) -> tuple[Path, ...]:
    """Returns the paths for weights of one type that reproduce float64 here, the widest instructions first."""
    pin, here = build.pinned(), build.offered()
    paths = list[Path]()
    if pin != "avx2" and "avx512" in here:
        paths += packed_paths(build.load("packed"), kind)
    native = vector_path(kind)
    paths += native
    if native and native[0].name.startswith("avx512") and not pin:
        paths += vector_path(kind, "avx2")
    paths = [path for path in paths if error_of(path, kind) <= _TOLERANCES[kind]]
    tiles = [path for path in paths if path.name.startswith("amx") and pin != "avx512"]
    if pin == "amx" and kind != "float32" and not tiles:
        raise ConfigError(f"{build.VARIABLE}=amx: Linux or a check rejects its tiles; unset it, or use avx512")
    if tiles and (pin == "amx" or kind == "bfloat16"):
        return tuple(tiles)
    paths = [path for path in paths if path in tiles or not path.name.startswith("amx")]
    return tuple(_of_one_arithmetic(paths) if kind == "bfloat16" else paths)


def _of_one_arithmetic(paths: list[Path]) -> list[Path]:
    """Returns paths for bfloat16 weights that round activations in the same way, so that ranks with other shapes
    compute alike.

    The dot products of AVX-512 round activations to bfloat16, and serve if they are clearly faster. Panels do not
    round.
    """
    dots, panels = ([path for path in paths if path.name.endswith("-bf16") is rounds] for rounds in (True, False))
    if not (dots and panels):
        return paths
    parts = (*map(build.source_text, ("packed", "panels")), *(path.name for path in paths))
    peaks = build.remembered("bfloat16-peaks", parts, lambda: {path.name: peak_gflops(path) for path in paths})
    return dots if peaks[dots[0].name] > _DOT_MARGIN * peaks[panels[0].name] else panels


def _file(kind: str) -> str:
    return "linear" if kind == "int8" else "panels"


def fault(kind: str) -> str:
    """Returns why no path is offered for a type."""
    for path in vector_path(kind):
        return f"{_file(kind)}.cpp is off by {error_of(path, kind):.1g} in {kind} on this processor"
    return build.load(_file(kind)).reason


@functools.cache
def chosen(kind: str, n: int, k: int) -> Path | None:
    """Returns the path for weights of a shape, or None for torch, for the reason in `linear.kernels().reason`."""
    paths = {path.name: path for path in offered(kind)}
    if len(paths) < 2:
        _choices[f"{kind} {n}x{k}"] = Choice(path=next(iter(paths), "torch"), measured_us={})
        return next(iter(paths.values()), None)

    def measure() -> dict[str, Any]:
        measured_us = _measured_us(list(paths.values()), kind, n, k)
        name = _fastest(measured_us)
        return asdict(Choice(path=name, measured_us=measured_us, peak_gflops=peak_gflops(paths[name])))

    sources = map(build.source_text, ("packed", "panels", "linear"))
    kept = build.remembered(f"{kind}-{n}x{k}", (*sources, *paths), measure)
    choice = _choices[f"{kind} {n}x{k}"] = Choice(**kept)
    return paths[choice.path]


_choices: dict[str, Choice] = {}


def record() -> dict[str, Choice]:
    """Returns the choice for each `<type> <N>x<K>` in this process."""
    return dict(_choices)


def vector_path(kind: str, instructions: str = "") -> list[Path]:
    """Returns the path of `panels.cpp`, or for int8 of `linear.cpp`, in a list, which is empty if that is missing.

    Args:
        instructions: as in `build.load`.
    """
    library = build.load(_file(kind), instructions).library
    if library is None:
        return []
    library.instructions.restype, suffix = ctypes.c_char_p, b""
    if kind == "int8":
        library.suffix_int8.restype = ctypes.c_char_p
        suffix = library.suffix_int8()
    return [Path(name=(library.instructions() + suffix).decode(), **_functions(library, f"linear_{kind}", kind))]


def packed_paths(loaded: Kernel, kind: str) -> list[Path]:
    """Returns the paths of `packed.cpp` that were compiled and that Linux allows."""
    library = loaded.library
    if library is None or not hasattr(library, f"pack_{kind}"):
        return []
    has_tiles = hasattr(library, "amx_enable") and library.amx_enable() == 0
    names = {f"amx_{kind}": "amx-bf16" if kind == "bfloat16" else "amx-int8"} if has_tiles else {}
    if hasattr(library, f"avx512_{kind}"):
        names[f"avx512_{kind}"] = "avx512-bf16" if kind == "bfloat16" else "avx512-vnni"
    return [Path(name=name, **_functions(library, symbol, kind)) for symbol, name in names.items()]


def error_of(path: Path, kind: str) -> float:
    """Returns the error relative to float64, on odd sizes that span two blocks of K."""
    m, n, k = 7, 21, 1700
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(size, generator=generator) for size in ((m, k), (n, k), (n,)))
    scales = torch.full((n,), 1 / 32)
    values = (w * 32).round().clamp(-127, 127).to(torch.int8) if kind == "int8" else w.to(getattr(torch, kind))
    exact = x.double() @ (values.double() / (32 if kind == "int8" else 1)).T + bias + 1
    y, packed = torch.ones(m, n), path.packed(values)
    vectors = [scales, bias] if kind == "int8" else [bias]
    path.multiply(*(tensor.data_ptr() for tensor in (x, packed, *vectors, y)), m, n, k, 1)
    error = ((y - exact).norm() / exact.norm()).item()
    return float("inf") if math.isnan(error) else error


def seconds_of(path: Path, kind: str, m: int, n: int, k: int, repeats: int) -> float:
    """Returns the least CPU time of a product on this thread."""
    w = torch.ones(n, k, dtype=getattr(torch, kind))
    x, y, packed = torch.ones(m, k), torch.empty(m, n), path.packed(w)
    vectors = [torch.ones(n).data_ptr(), None] if kind == "int8" else [None]
    least = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        path.multiply(x.data_ptr(), packed.data_ptr(), *vectors, y.data_ptr(), m, n, k, 0)
        least = min(least, time.thread_time() - start)
    return least


def reached(kind: str) -> str:
    """Returns text: the path for weights of a type that exceed all caches, its speed, and the limits of this thread."""
    n, k, numbers = 4096, 4096, torch.ones(1 << 25)
    path = chosen(kind, n, k)
    if path is None:
        return "torch"
    many_s, one_s = seconds_of(path, kind, 128, n, k, 4), seconds_of(path, kind, 1, n, k, 4)
    start = time.thread_time()
    torch.dot(numbers, numbers)
    memory, peak = 1e-9 * numbers.nbytes / (time.thread_time() - start), peak_gflops(path)
    gflops, gb_s = 2e-9 * 128 * n * k / many_s, 1e-9 * n * k * getattr(torch, kind).itemsize / one_s
    return (
        f"{path.name}, {gflops:.0f} GFLOP/s of 128 rows ({gflops / peak:.0%} of {peak:.0f} in cache), "
        f"{gb_s:.1f} GB/s of one ({gb_s / memory:.0%} of {memory:.1f} in memory)"
    )


def peak_gflops(path: Path) -> float:
    """Returns GFLOP/s of a path on this thread, with operands in L1."""
    fastest = 0.0
    for _ in range(5):
        start = time.thread_time()
        done = path.peak(200)
        fastest = max(fastest, 2e-9 * done / (time.thread_time() - start))
    return fastest


def _measured_us(paths: list[Path], kind: str, n: int, k: int) -> dict[str, list[float]]:
    # Several such matrices below each other, or a part of a large one: as in a model, weights come from memory.
    wide = max(32, min(4 * n, _TIMED_ELEMENTS // k))

    def times_us(path: Path, repeats: int) -> list[float]:
        return [round(seconds_of(path, kind, m, wide, k, repeats) * 1e6 * n / wide, 1) for m in ROWS]

    times = {path.name: times_us(path, 2) for path in paths}
    near = [path for path in paths if _cost(times[path.name], times) < 1.5 ** len(ROWS)]
    return times | {path.name: times_us(path, 6) for path in near if len(near) > 1}


def _cost(times: list[float], of_all: dict[str, list[float]]) -> float:
    """Returns the product of the factors to the fastest path at each size."""
    cost = 1.0
    for index, time_us in enumerate(times):
        cost *= time_us / max(min(others[index] for others in of_all.values()), 1e-3)
    return cost


def _fastest(measured_us: dict[str, list[float]]) -> str:
    costs = {name: _cost(times, measured_us) for name, times in measured_us.items()}
    return next(name for name, cost in costs.items() if cost <= min(costs.values()) * _MARGIN ** len(ROWS))


def _functions(library: ctypes.CDLL, symbol: str, kind: str) -> dict[str, Any]:
    multiply, peak = getattr(library, symbol), getattr(library, f"{symbol}_peak")
    multiply.argtypes = (*[_P] * (5 if kind == "int8" else 4), _I, _I, _I, ctypes.c_int)
    multiply.restype = None
    peak.argtypes, peak.restype = (_I,), _I
    if not hasattr(library, f"pack_{kind}"):
        return {"multiply": multiply, "peak": peak}
    pack, packed_bytes = (getattr(library, f"{name}_{kind}") for name in ("pack", "packed_bytes"))
    pack.argtypes, pack.restype = (_P, _I, _I, _P), None
    packed_bytes.argtypes, packed_bytes.restype = (_I, _I), _I
    return {"multiply": multiply, "peak": peak, "pack": pack, "packed_bytes": packed_bytes}
