"""Runs look for forgotten errors at their end, which is quick where only their own objects are looked at."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def leave_older_objects_alone() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
