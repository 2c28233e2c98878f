"""Thousands of connections that say nothing, at every port of every process of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.strangers import ANSWER_S, TinyRun, measured
from tests.nightly import nightly


@pytest.mark.timeout(900)
@nightly("half a minute of silent connections")
def test_they_end_nothing_and_keep_nobody_waiting(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, files=1024)
    try:
        found = measured(run, connections=2000, seconds=20.0)
    finally:
        run.end()
    assert found["ports_closed"] == found["processes_ended"] == [], run.said()
    assert {port["kind"] for port in found["ports"]} >= {"challenge", "tls", "http", "none"}
    assert all(port["asked"] and port["longest_s"] < ANSWER_S for port in found["ports"] if port["kind"] != "none")
    assert found["steps_per_s"]["after"] > 0
    assert not [line for line in found["said"] if "is lost" in line or "started again" in line]
