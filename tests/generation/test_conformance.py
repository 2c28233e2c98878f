"""The native engine keeps the contract of every backend."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.generation.conformance import CHECKS, Check
from tests.generation.native import serve
from tests.nightly import crossed


@pytest.mark.parametrize(("check", "kv_on_update"), crossed(CHECKS, ["keep", "recompute"]))
def test_native(check: Check, kv_on_update: Literal["keep", "recompute"]) -> None:
    check(serve(kv_on_update))
