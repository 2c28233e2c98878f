"""A run over three hosts, one of which is cut off in the middle and comes back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts.namespaces import Namespaces, available
from llamarl.parts.hosts.certificates import make_certificates
from llamarl.run.rollouts import rollout_rows
from tests.end_to_end.tiny import ROOT, make_model, rows, write_toml
from tests.nightly import nightly

REASON = available()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
RUN_S = 240.0
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


def train(hosts: Namespaces, folder: Path, *options: object) -> subprocess.Popen[str]:
    """The controller, in the first host."""
    toml, first = write_toml(folder, make_model(folder / "model")), hosts.addresses["host-a"]
    members = {name: (name, address) for name, address in hosts.addresses.items()}
    make_certificates(folder / "pki", members | {"controller": ("controller", first)}, days=2)
    return llamarl(
        hosts, "host-a", folder, "train", toml, "--cluster.kind", "hosts", "--cluster.listen", f"{first}:{PORT}",
        "--cluster.num_hosts", 3, "--screen.kind", "lines", "--cluster.on_failure.generator", "respawn", *options,
    )  # fmt: skip


def agent(hosts: Namespaces, folder: Path, host: str, *options: object) -> subprocess.Popen[str]:
    place = f"{hosts.addresses['host-a']}:{PORT}"
    return llamarl(hosts, host, folder, "host", place, "--name", host, "--address", hosts.addresses[host], *options)


@nightly("test_hosts.py loses simulated hosts")
def test_a_host_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    with Namespaces(3) as hosts:
        run = train(hosts, tmp_path, "--generator.replicas", 2, "--steps", STEPS)
        for host in hosts.names:
            agent(hosts, tmp_path, host)
        _until(lambda: len(steps(tmp_path)) >= 4 or run.poll() is not None)
        hosts.cut("host-c")
        _until(lambda: "is lost: it has been silent" in _told(tmp_path) or run.poll() is not None)
        hosts.restore("host-c")
        told = f"{_wait(run)}\n{_told(tmp_path)}"
    assert run.returncode == 0, told
    assert "generator-1 (rank 0): host host-c (10.77.0.3) is lost: it has been silent for 3 s" in told
    assert [row["step"] for row in steps(tmp_path)] == list(range(1, STEPS + 1))
    rollouts = Counter((row["group_id"], row["index"]) for row in rollout_rows(tmp_path / "runs/tiny"))
    assert set(rollouts.values()) == {1}, "none is trained twice"
    logs = tmp_path / "runs/tiny/logs"
    assert (logs / "host-host-c.log").exists()
    # Each host forks its ranks: Monarch says so of a rank that its server may outlive.
    assert all("PDEATHSIG disabled" in (logs / f"{name}.log").read_text() for name in ("trainer", "generator-0"))


@pytest.mark.timeout(900)
@nightly("hosts come and go")
def test_a_trainer_on_two_hosts_and_generators_that_come_and_go(tmp_path: Path) -> None:
    with Namespaces(4) as hosts:
        run = train(
            hosts, tmp_path, "--generator.replicas", "auto", "--generator.threads", 2, "--steps", 3000,
            "--trainer.parallelism.fsdp", 2, "--cluster.place.trainer", '["host-a", "host-b"]',
        )  # fmt: skip
        agents = {host: agent(hosts, tmp_path, host) for host in hosts.names[:3]}
        _until(lambda: len(steps(tmp_path)) >= 4 or run.poll() is not None)
        agents["host-d"] = agent(hosts, tmp_path, "host-d")
        _until(lambda: "host host-d: 10.77.0.4" in _told(tmp_path) or run.poll() is not None)
        _until(lambda: (tmp_path / "runs/tiny/logs/generator-1.log").exists() or run.poll() is not None)
        before = len(steps(tmp_path))
        _until(lambda: len(steps(tmp_path)) >= before + 20 or run.poll() is not None)
        assert agent(hosts, tmp_path, "host-c", "--drain").wait(RUN_S) == 0
        assert agents["host-c"].wait(RUN_S) == 0, "it has been let go"
        before = len(steps(tmp_path))
        _until(lambda: len(steps(tmp_path)) >= before + 10 or run.poll() is not None)
        assert run.poll() is None, _told(tmp_path)
        agents["host-b"].terminate()  # it has half of the trainer
        told = f"{_wait(run)}\n{_told(tmp_path)}"
    assert run.returncode == 130, told
    assert "has come; 1 generators start" in told
    assert "host host-c has left; generator-0 ran there" in told
    assert "ended, as host host-b leaves, which runs trainer: 2 hosts are left, and the run needs 3" in told
    assert "is lost" not in told
    done = [row["step"] for row in steps(tmp_path)]
    assert done == list(range(1, len(done) + 1))
    saved = sorted(path.name for path in (tmp_path / "runs/tiny/checkpoints").glob("step-*"))
    assert saved[-1].endswith(str(len(done))), "what was learnt is saved"


def _told(folder: Path) -> str:
    return (folder / "host-a-train.txt").read_text()


def _wait(run: subprocess.Popen[str]) -> int:
    return run.wait(RUN_S)


def _until(condition: Any) -> None:
    deadline_s = time.monotonic() + RUN_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
