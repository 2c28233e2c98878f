"""What an agent keeps of a host's logs, without a registry."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from llamarl.cluster.agent import Agent
from llamarl.cluster.certificates import make_certificates
from llamarl.cluster.home import MAX_LINE_BYTES


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_certificates(tmp_path / "pki", {"b": ("b", "127.0.0.3")}, days=2)
    return Agent("127.0.0.2:1", tmp_path / "pki", "b", "127.0.0.3", once=False, tell=print)


def test_logs_go_on_where_the_registry_has_them_and_begin_anew_with_a_new_agent(one: Agent) -> None:
    one._welcomed("first", {"logs": {"host-b.log": 4}})
    log = one._logs / "host-b.log"
    log.write_text("a new agent's own")
    assert [piece["data"] for piece in one._new_logs()] == ["a new agent's own"]
    one._welcomed("first", {"logs": {"host-b.log": 10}})  # the rest was lost with the connection
    assert [piece["data"] for piece in one._new_logs()] == ["t's own"]
    one._welcomed("second", {"logs": {}})
    assert not log.exists()


def test_many_logs_at_once_fit_into_messages(one: Agent) -> None:
    for i in range(20):
        (one._logs / f"{i}.log").write_bytes("世".encode() * 40_000)
    num_bytes = 0
    while pieces := list(one._new_logs()):
        assert len(json.dumps({"logs": pieces})) < MAX_LINE_BYTES
        num_bytes += sum(len(piece["data"]) for piece in pieces)
    assert num_bytes == 20 * 3 * 40_000
