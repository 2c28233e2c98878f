"""Slurm for real: its controller on the first of several hosts in namespaces, a daemon on each."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.hosts.namespaces import PATH, Namespaces

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
WAIT_S = 240.0

CONFIG = """
ClusterName=laboratory
SlurmctldHost=host-a
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
ReturnToService=2
SlurmdTimeout=10
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
TaskProlog={folder}/prolog
"""


def unavailable() -> str:
    """Why there is no Slurm here; empty where there is."""
    if os.geteuid() != 0:
        return "only root can start Slurm's daemons"
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    return f"programs are missing: {', '.join(missing)} (packages slurm-wlm, munge)" if missing else ""


class SlurmCluster:
    """A partition of all hosts. Ends with the hosts."""

    def __init__(self, hosts: Namespaces) -> None:
        self.hosts, self._folder = hosts, hosts.folder / "slurm"
        (self._folder / "state").mkdir(parents=True)
        config = self._folder / "slurm.conf"
        nodes = [
            f"NodeName={name} NodeAddr={address} CPUs=2 RealMemory=1000" for name, address in hosts.addresses.items()
        ]
        of = {"all": (hosts.names, "YES"), "first": (hosts.names[:1], "NO"), "others": (hosts.names[1:], "NO")}
        partitions = [
            f"PartitionName={name} Nodes={','.join(nodes_of)} Default={is_default} MaxTime=60 State=UP"
            for name, (nodes_of, is_default) in of.items()
        ]
        config.write_text("\n".join([CONFIG.format(folder=self._folder), *nodes, *partitions, ""]))
        self.env = {"SLURM_CONF": str(config), "PATH": PATH}
        prolog = self._folder / "prolog"
        prolog.write_text(f"#!/bin/sh\necho export TMPDIR={hosts.folder}/$SLURMD_NODENAME\n")
        prolog.chmod(0o755)
        key = self._folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = [f"--{kind}={self._folder}/munge.{kind}" for kind in ("socket", "pid-file", "log-file", "seed-file")]
        self._start("host-a", "munged", "--foreground", "--force", f"--key-file={key}", *files)
        self.until((self._folder / "munge.socket").exists)
        self._start("host-a", "slurmctld", "-D")
        for name in hosts.names:
            self._start(name, "slurmd", "-D", "-N", name)
        self.until_idle()

    def ask(self, *command: str, host: str = "host-a") -> str:
        """What one of Slurm's commands prints, without its last line's end; empty when it fails."""
        process = self.hosts.popen(host, command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return process.communicate(timeout=WAIT_S)[0].decode().strip()

    def until_idle(self) -> None:
        """All nodes are up, and no job is on them."""
        self.until(lambda: self.ask("sinfo", "--noheader", "--format=%T %D") == f"idle {len(self.hosts.names)}")

    def state(self, job: str) -> str:
        """`RUNNING`, `COMPLETED`, ..."""
        shown = self.ask("scontrol", "show", "job", "-o", job)
        return dict(part.split("=", 1) for part in shown.split() if "=" in part).get("JobState", "")

    def _start(self, host: str, *command: str) -> None:
        with (self._folder / f"{command[0]}-{host}.out").open("wb") as output:
            self.hosts.popen(host, command, env=self.env, stdout=output, stderr=output)

    def until(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Waits for a condition; what Slurm's daemons say is the message."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, self._logs()
            time.sleep(0.2)

    def _logs(self) -> str:
        paths: list[Path] = [*self._folder.glob("*.log"), *self._folder.glob("*.out")]
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in paths)
