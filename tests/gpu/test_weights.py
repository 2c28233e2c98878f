"""Publishing from and adopting on a pretended GPU: what arrives, and what crosses to the host and back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import weights
from tests.gpu.conftest import Run
from tests.nightly import also, nightly


@nightly("weight_sync/test_transports.py sends versions by day")
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("int8", {}),
        ("bfloat16", {"transport": "file", "delta": True}),
        ("fp8", {"lora": True}),
        *also(("bfloat16", {}), ("fp8", {}), ("bfloat16", {"lora": True})),
    ],
)
def test_a_version_crosses_once(on_gpu: Run, precision: str, options: dict[str, Any]) -> None:
    found = on_gpu(weights.sync, precision, options)
    assert found.apart == [0.0] * 3
    assert sum(found.published.downloads.values()) == found.num_tensors
    assert found.published.down_bytes == found.num_bytes, "in the types in which it is served"
    assert sum(found.published.syncs.values()) <= 2 * found.num_tensors
    assert (sum(found.adopted.uploads.values()), found.adopted.up_bytes) == (found.num_tensors, found.num_bytes)
    assert not found.used.syncs and not found.used.uploads, "swapping is a matter of addresses"
