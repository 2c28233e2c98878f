"""A real pretrained model from the package index, made once per machine; skipped where it cannot be had."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

from tests.nightly import NIGHTLY


@pytest.fixture(scope="session", autouse=True)
def _memory() -> None:
    """Lifts the limit that other tests have: the weights of a real model in 16 slots are mapped at once."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct. LLAMARL_REAL_MODEL names a folder that holds it already."""
    if not NIGHTLY:
        pytest.skip("`make test-real` does it: a real model takes minutes")
    if given := os.environ.get("LLAMARL_REAL_MODEL"):
        return Path(given)
    from examples.real.make_model import PACKAGE, make

    folder = Path(__file__).parents[2] / "runs/base/smollm2"
    try:
        make(folder)
    except subprocess.CalledProcessError:
        pytest.skip(f"the package {PACKAGE} cannot be had")
    return folder
