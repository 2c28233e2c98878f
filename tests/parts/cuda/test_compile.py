"""Triton's compiler takes the kernels, for a GPU that need not be there: the interpreter runs what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamarl.kernels.build import cache_folder
from tests.nightly import nightly

pytest.importorskip("triton.backends.nvidia")
from triton import knobs

SHARED_BYTES = 99 << 10
"""Of a program's memory on the smallest GPUs with float8 (compute capability 8.9); an H100 has 227 KB."""


def compiled(folder: Path, *options: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.parts.cuda.compiled", *options], cwd=Path(__file__).parents[3], timeout=600,
        capture_output=True, text=True, env=os.environ | {"TRITON_CACHE_DIR": str(folder)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@nightly("on a GPU each is compiled at its first use; by day Triton's interpreter runs them")
def test_all_kernels_compile_and_fit() -> None:
    """As their callers launch them on bfloat16, float32, int8 and float8; once, wherever a step's integers begin.

    Triton keeps what it has compiled, by source and compiler.
    """
    found = compiled(cache_folder() / "triton")
    assert len({one["case"] for one in found}) == 21
    assert len({one["kernel"] for one in found}) == 20, found
    for one in found:
        assert one["shared_bytes"] <= SHARED_BYTES, one
    again = {one["kernel"]: one["count"] for one in found if one["case"] == "aligned anyhow"}
    names = (
        "_attend_to_part", "_rotate_head", "_add_up", "_embed_row", "_weigh_chunk", "_pick", "_mix_head", "_recur_run",
    )  # fmt: skip
    assert again == dict.fromkeys(names, 1)


@nightly("it compiles some 130 kernels")
@pytest.mark.timeout(700)
def test_nothing_is_spilled_at_the_shapes_of_models(tmp_path: Path) -> None:
    """1B, 8B, 70B, 405B, Qwen3 and delta nets, whole and cut over 8 ranks. The assembler reports registers, spills and
    stack."""
    if not Path(knobs.nvidia.ptxas.path).exists():
        pytest.skip("Triton's ptxas, which reports registers and spills, is not installed")
    found = compiled(tmp_path, "--all")
    assert len(found) > 100 and len({one["case"].partition(":")[0] for one in found}) == 8
    assert len({one["kernel"] for one in found}) == 20, "every kernel"
    for one in found:
        assert one["spilled_bytes"] == 0 and 0 < one["registers"] <= 255, one
