"""A run happens again whatever brings the weights to its generators, and whatever they are stored as there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llamarl.weight_sync.select import names
from tests.end_to_end.tiny import llamarl, llamarl_here
from tests.nightly import NIGHTLY, nightly
from tests.parts.replay.test_replay import OPTIONS, trained

DTYPES = ("float32", "bfloat16", "int8")
"""fp8 needs a GPU."""
CODECS = [(name, False) for name in ("shared_memory", "p2p", "file", "nixl")] + [("p2p", True), ("file", True)]
"""Transports; with or without sending only what changed."""
EQUAL = r"replayed 6 steps, 36 rollouts, [\d,]+ tokens, 36 rewards: all equal"


def test_all_transports_are_here() -> None:
    """Except the one of one device, which `tests/end_to_end/test_restarts.py` replays, and the one between GPUs."""
    assert {name for name, _ in CODECS} == set(names()) - {"in_place", "cuda_ipc"}


@nightly("replays in one process; by day settings are compared")
@pytest.mark.parametrize("dtype", DTYPES if NIGHTLY else ["bfloat16"])
def test_in_one_process(tmp_path: Path, toml: Path, dtype: str) -> None:
    done = llamarl_here("replay", trained(tmp_path, toml, "--generator.dtype", dtype))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(EQUAL, done.stdout.splitlines()[-1])


@nightly("processes")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("transport", "delta"), CODECS)
def test_between_processes(tmp_path: Path, toml: Path, transport: str, delta: bool, dtype: str) -> None:
    sync = ("--weight_sync.transport", transport, "--weight_sync.delta", str(delta).lower())
    done = llamarl("train", toml, "--output", tmp_path, *OPTIONS, *sync, "--generator.dtype", dtype)
    assert done.returncode == 0, done.stderr
    done = llamarl("replay", tmp_path / "tiny")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(EQUAL, done.stdout.splitlines()[-1])
