"""Processes for functions: one with a pretended GPU, and one for layouts of many ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from tests.gpu import guard

Run = Callable[..., Any]
"""run(function, *arguments): its result, computed in that process."""
LACKS = re.compile(r"Could not run 'aten::\w+' with arguments from the 'CPU' backend|Cannot query cuDNN version")
"""What a CUDA build says of operations that its CPU half does not have."""


@pytest.fixture(scope="session")
def on_gpu() -> Iterator[Run]:
    """Where torch has a GPU that is pretended; beside a real one `tests/cuda` says more."""
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU")
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=guard.begin) as pool:

        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return pool.submit(function, *arguments).result()
            except Exception as error:
                lacks = LACKS.search(f"{error}\n{error.__cause__}")
                if torch.version.cuda is None or lacks is None:
                    raise
                pytest.skip(f"torch {torch.__version__} has this for real GPUs only: {lacks[0]}")

        yield run


@pytest.fixture(scope="session")
def elsewhere() -> Iterator[Run]:
    """Where process groups may be made."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()
