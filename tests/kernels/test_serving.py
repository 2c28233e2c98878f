"""Where there is a compiler all kernels serve: one that its check at load refuses would skip its own tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llamarl.kernels import attention, build, copy, experts, linear, ops, paths, stack, train_attention, train_delta
from llamarl.kernels.build import Kernel

KERNELS = {
    "attention": attention.kernel,
    "copy": copy.kernel,
    "experts": experts.kernels,
    "linear": linear.kernels,
    "ops": ops.kernels,
    "stack": stack.kernel,
    "train_attention": train_attention.kernels,
    "train_delta": train_delta.kernels,
}


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")) or os.environ.get(build.VARIABLE) == "torch",
    reason="nothing is compiled",
)
class TestServing:
    @pytest.mark.parametrize("name", KERNELS)
    def test_it_is_there(self, name: str) -> None:
        kernel: Callable[[], Kernel] = KERNELS[name]
        assert (kernel().reason, kernel().library is not None) == ("", True)

    @pytest.mark.parametrize("kind", paths.KINDS.values())
    def test_each_type_of_weights_has_the_path_of_every_processor(self, kind: str) -> None:
        """It may be pinned away, or come behind those of wider instructions."""
        (path,) = paths.vector_path(kind)
        assert paths.error_of(path, kind) < 1e-2


def test_no_file_is_left_out() -> None:
    """`packed.cpp` and `panels.cpp` are paths of `linear`. `delta.cpp` has its test in test_delta.py."""
    files = {path.stem for path in Path(build.__file__).parent.glob("*.cpp")}
    assert files == KERNELS.keys() | {"packed", "panels", "delta"}
