"""Triton's compiler takes the kernels, for a GPU that need not be there: the interpreter runs what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")
SHARED_BYTES = 99 << 10
"""Of a program's memory on the smallest GPUs with float8 (compute capability 8.9); an H100 has 227 KB."""


def test_all_kernels_compile_and_fit(tmp_path: Path) -> None:
    """As their callers launch them on bfloat16, float32, int8 and float8."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled"], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = {case["case"]: case["shared_bytes"] for case in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 9 and all(found.values())
    kernels = {name for case in found.values() for name in case}
    assert len(kernels) == 7, kernels
    for case, shared in found.items():
        assert max(shared.values()) <= SHARED_BYTES, case
