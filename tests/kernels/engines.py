"""The ways to multiply that can be tested here: each that the processor offers, and those it lacks as plain loops."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llamarl.kernels import (
    attention,
    build,
    copy,
    delta,
    experts,
    linear,
    ops,
    paths,
    stack,
    train_attention,
    train_delta,
)
from tests.nightly import also

EMULATED = ("emulated-amx", "emulated-avx512")
ENGINES = (*build.offered(), *also(*EMULATED))
"""What `LLAMARL_KERNELS` can be here; at night also `packed.cpp` with loops in place of instructions."""
_FEATURES = ("AVX512VNNI", "AVX512BF16", "AMX_TILE", "AMX_BF16", "AMX_INT8")
_CACHES = (
    build.load, build.processor, attention.kernel, copy.kernel, delta.kernel, linear.kernels, ops.kernels,
    experts.kernels, stack.kernel, train_attention.kernels, train_delta.kernels, paths.offered, paths.chosen,
)  # fmt: skip
_FLAGS = (
    *(("-march=x86-64", "-Wno-psabi") if platform.machine() == "x86_64" else ()), "-O2", "-DLLAMARL_EMULATED",
    *(f"-D__{name}__" for name in _FEATURES), "-I", str(Path(__file__).parent),
)  # fmt: skip


def forget() -> None:
    """Kernels are loaded, checked and chosen anew at the next use."""
    for cached in _CACHES:
        cached.cache_clear()


def has_tiles() -> bool:
    """Whether Linux lets this process use what the processor's flags say."""
    return any(path.name.startswith("amx") for path in paths.packed_paths(build.load("packed"), "int8"))


@contextmanager
def engine(name: str) -> Iterator[None]:
    """What multiplies: one of `ENGINES`."""
    with pytest.MonkeyPatch.context() as patch:
        if name in EMULATED:
            found = {kind: emulated(name, kind) for kind in paths.KINDS.values()}
            real = paths.offered
            patch.setattr(paths, "offered", lambda kind: found.get(kind) or real(kind))
        elif name == "amx" and not has_tiles():
            pytest.skip("Linux refuses tiles to this process")
        else:
            patch.setenv(build.VARIABLE, name)
        forget_all = forget if name not in EMULATED else paths.chosen.cache_clear
        forget_all()
        yield
        forget_all()
    forget()


def emulated(name: str, kind: str) -> tuple[paths.Path, ...]:
    """The path of `amx` or `avx512` for one type."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(build.VARIABLE, raising=False)
        patch.setitem(build._LIMITS, "emulated", _FLAGS)
        loaded = build.load("packed", "emulated")
    if loaded.library is None:
        assert "compiler" in loaded.reason, loaded.reason
        pytest.skip(loaded.reason)
    return tuple(path for path in paths.packed_paths(loaded, kind) if path.name.startswith(name.split("-")[1]))


def steps(path: str, x_M_K: Tensor) -> Tensor:
    """[M, 1]: the distance of the numbers to which a path rounds a row of int8's activations; 0: it does not."""
    limits = {"int8": 127, "vnni": 127, "int16": min(32767, (2**31 - 1) // (128 * (x_M_K.shape[1] + 1)))}
    limit = limits.get(path.rsplit("-", maxsplit=1)[-1], math.inf)
    return x_M_K.abs().amax(1, keepdim=True).double() / limit


def rounded(path: str, x_M_K: Tensor) -> Tensor:
    """What a path multiplies instead of the activations, float64."""
    if path.endswith("-bf16"):
        return x_M_K.bfloat16().double()
    step_M_1 = steps(path, x_M_K)
    return torch.where(step_M_1 > 0, (x_M_K.double() / step_M_1).round() * step_M_1, x_M_K.double())
