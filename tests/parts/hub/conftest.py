from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.child import Child
from llamarl.parts.hub import process
from tests.parts.hub.server import HubServer, only_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub of this test alone, and a cache that is empty."""
    with only_hub(tmp_path / "hf", monkeypatch) as server:
        yield server
        assert not server.errors, "\n".join(server.errors)


@pytest.fixture
def own_process(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's client runs in a process of its own, as in every command."""
    monkeypatch.setattr(process, "Child", Child)
