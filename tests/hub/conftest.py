from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.server import HubServer


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub of this test alone, and a cache that is empty."""
    with HubServer() as server:
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name, value in server.environment(tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        yield server
        assert not server.errors, "\n".join(server.errors)
