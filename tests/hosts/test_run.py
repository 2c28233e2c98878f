"""A run over three hosts, one of which is cut off in the middle and comes back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts.namespaces import Namespaces, available
from llamarl.cluster.certificates import make_certificates
from tests.end_to_end.tiny import ROOT, make_model, rows, write_toml

REASON = available()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
RUN_S = 100.0
STEPS = 24
PORT = 6700


def llamarl(hosts: Namespaces, host: str, folder: Path, *words: object) -> subprocess.Popen[str]:
    with (folder / f"{host}-{words[0]}.txt").open("w") as output:
        return hosts.popen(
            host, [sys.executable, "-m", "llamarl", *map(str, words)], env={"PYTHONPATH": str(ROOT)}, cwd=folder,
            text=True, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def steps(folder: Path) -> list[dict[str, Any]]:
    path = folder / "runs/tiny/metrics.jsonl"
    return [row for row in rows(path) if row["kind"] == "step"] if path.exists() else []


def test_a_host_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))
    with Namespaces(3) as hosts:
        first = hosts.addresses["host-a"]
        members = {name: (name, address) for name, address in hosts.addresses.items()}
        make_certificates(tmp_path / "pki", members | {"controller": ("controller", first)}, days=2)
        run = llamarl(
            hosts, "host-a", tmp_path, "train", toml, "--cluster.kind", "hosts", "--cluster.listen", f"{first}:{PORT}",
            "--cluster.num_hosts", 3, "--generator.replicas", 2, "--steps", STEPS, "--screen.kind", "lines",
            "--cluster.on_generator_failure", "respawn",
        )  # fmt: skip
        for host in hosts.names:
            address = hosts.addresses[host]
            llamarl(hosts, host, tmp_path, "host", f"{first}:{PORT}", "--name", host, "--address", address)
        _until(lambda: len(steps(tmp_path)) >= 4 or run.poll() is not None)
        hosts.cut("host-c")
        _until(lambda: "is lost: it has been silent" in _told(tmp_path) or run.poll() is not None)
        hosts.restore("host-c")
        told = f"{_wait(run)}\n{_told(tmp_path)}"
    assert run.returncode == 0, told
    assert "generator-1 (rank 0): host host-c (10.77.0.3) is lost: it has been silent for 3 s" in told
    assert [row["step"] for row in steps(tmp_path)] == list(range(1, STEPS + 1))
    lines = (tmp_path / "runs/tiny/rollouts.jsonl").read_text().splitlines()
    rollouts = Counter((row["group_id"], row["index"]) for row in map(json.loads, lines))
    assert set(rollouts.values()) == {1}, "none is trained twice"
    assert (tmp_path / "runs/tiny/logs/host-host-c.log").exists()


def _told(folder: Path) -> str:
    return (folder / "host-a-train.txt").read_text()


def _wait(run: subprocess.Popen[str]) -> int:
    return run.wait(RUN_S)


def _until(condition: Any) -> None:
    deadline_s = time.monotonic() + RUN_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
