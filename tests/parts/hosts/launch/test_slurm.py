"""What `llamarl launch slurm` submits, run by Slurm itself on three nodes of one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.hosts.namespaces import Namespaces, available
from tests.end_to_end.tiny import LLAMARL, make_model, rows, write_toml
from tests.nightly import nightly
from tests.parts.hosts.launch.slurm_cluster import SlurmCluster, unavailable

REASON = available() or unavailable()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    nightly("runs on three nodes"),
    pytest.mark.timeout(900),
]
RUN_S = 240.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with Namespaces(3) as hosts:
        yield SlurmCluster(hosts)


class Job:
    """A tiny run that was submitted."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *overrides: object) -> None:
        self.slurm, self.folder = slurm, folder / "the runs"
        self.run, self.launched = self.folder / "tiny", self.folder / "tiny.launch"
        toml = write_toml(folder, make_model(folder / "model"))
        options = ("--output", self.folder, "--cluster.num_hosts", 3, "--generator.replicas", 2, *overrides)
        told = slurm.ask(*LLAMARL, "launch", "slurm", str(toml), *map(str, options))
        self.number = told.rpartition(" ")[2]
        assert told == f"Submitted batch job {self.number}"

    @property
    def log(self) -> str:
        path = self.launched / f"slurm-{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def steps(self) -> list[int]:
        """That were done, in order."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return (
            [row["step"] for row in rows(path) if row["kind"] == "step"] if lines and lines[-1].endswith("\n") else []
        )

    def until_step(self, step: int) -> None:
        self.slurm.until(lambda: max(self.steps, default=0) >= step or self._has_ended(), RUN_S)
        assert not self._has_ended(), self.log

    def ends(self, *states: str) -> None:
        self.slurm.until(self._has_ended, RUN_S)
        assert self.slurm.state(self.number) in states, self.log

    def _has_ended(self) -> bool:
        return self.slurm.state(self.number) not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


def test_a_lost_node_does_not_end_the_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "--steps", 12, "--cluster.on_failure.generator", "drop")
    try:
        job.until_step(3)
        slurm.hosts.cut("host-c")
        job.ends("COMPLETED")
    finally:
        slurm.hosts.restore("host-c")
    assert job.steps == list(range(1, 13))
    assert "host host-c (10.77.0.3) is lost" in job.log
    assert not list(job.launched.glob("pki-*"))  # the certificates went with the job
    slurm.until_idle()


NEAR_THE_TIME_LIMIT = ("scancel", "--batch", f"--signal={signal.SIGUSR1.name}")
"""As Slurm does, 120 s before."""
PREEMPTED = ("scontrol", "requeue")


@pytest.mark.parametrize("end", [NEAR_THE_TIME_LIMIT, PREEMPTED], ids=["near the time limit", "preempted"])
def test_a_job_is_queued_again_and_goes_on(slurm: SlurmCluster, tmp_path: Path, end: tuple[str, ...]) -> None:
    job = Job(slurm, tmp_path, "--steps", 300, "--checkpoint.every_steps", 20)
    job.until_step(30)
    slurm.ask(*end, job.number)
    job.ends("COMPLETED")
    if end is NEAR_THE_TIME_LIMIT:
        assert "continue with --resume" in job.log
    assert job.steps == list(range(1, 301))
    slurm.until_idle()


def test_an_agent_that_dies_starts_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The site's own lines are in the environment of each agent."""
    setup = ("--launch.slurm.setup", "['export OF_THE_SITE=yes', 'echo lines of the site']")
    job = Job(slurm, tmp_path, "--steps", 60, *setup)
    job.until_step(3)
    (agent,) = agents(str(job.launched), "host-c")
    assert b"OF_THE_SITE=yes" in Path(f"/proc/{agent}/environ").read_bytes()
    os.kill(agent, signal.SIGKILL)
    slurm.until(lambda: agents(str(job.launched), "host-c") not in ([], [agent]), RUN_S)
    job.ends("COMPLETED")
    assert job.steps == list(range(1, 61))
    assert job.log.count("host-c at ") == 2, "it serves again"
    assert "lines of the site\n" in job.log
    slurm.until_idle()


def agents(folder: str, name: str) -> list[int]:
    """Processes of `llamarl host` with certificates in a folder, for a host."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_text().split("\0")
            if words[1:4] == ["-m", "llamarl", "host"] and name in words and any(folder in word for word in words):
                found.append(int(entry.name))
    return found


def test_trainer_and_generators_have_nodes_of_their_own(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two components of a job, of different partitions; it is queued again near the time limit, and goes on."""
    kinds = ("--launch.slurm.partition=first", "--launch.slurm.generators.partition=others")
    job = Job(slurm, tmp_path, "--steps", 200, "--launch.slurm.generators.nodes=2", *kinds)
    job.until_step(10)
    slurm.ask(*NEAR_THE_TIME_LIMIT, job.number)
    job.ends("COMPLETED")
    assert "continue with --resume" in job.log and job.steps == list(range(1, 201))
    config = tomllib.loads((job.run / "config.toml").read_text())
    places = {role: hosts for role, hosts in config["cluster"]["place"].items() if hosts}
    assert places == {"trainer": ["host-a"], "generator": ["host-b", "host-c"]}
    assert config["cluster"]["num_hosts"] == 3
    slurm.until_idle()


def test_a_canceled_job_leaves_nothing(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "--steps", 100_000)
    job.until_step(2)
    slurm.ask("scancel", job.number)
    job.ends("CANCELLED")
    slurm.until_idle()
    found = subprocess.run(["pgrep", "--full", str(job.folder)], capture_output=True, text=True, timeout=240).stdout
    assert not found
