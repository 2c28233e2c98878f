"""A thread that ends machines whose processes together exceed memory or CPU time. No torch."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from llamarl.parts.episodes.machines._base import MachineLimits, made_once
from llamarl.parts.episodes.machines._connection import AgentMachine

BUSY_S, IDLE_S = 0.05, 0.5
"""Seconds between two looks at a machine that runs a command, and at one that may have processes in the background."""
_PAGE_BYTES, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


class _WatchedMachine(NamedTuple):
    machine: AgentMachine
    limits: MachineLimits
    proc: int
    """Descriptor of the machine's /proc."""


class MachineWatch:
    """Looks at all machines of this process. Its thread runs while there are machines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._machines = dict[AgentMachine, tuple[_WatchedMachine, float]]()
        self._is_running = False

    def add(self, machine: AgentMachine, limits: MachineLimits, proc: int) -> None:
        """Watches a machine until `drop`. Takes over the descriptor of its /proc."""
        with self._lock:
            self._machines[machine] = _WatchedMachine(machine, limits, proc), 0.0
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._loop, name="machines", daemon=True).start()

    def drop(self, machine: AgentMachine) -> None:
        """Forgets a machine that has ended."""
        with self._lock:
            watched, _ = self._machines.pop(machine, (None, 0.0))
            if watched is not None:
                os.close(watched.proc)

    def _loop(self) -> None:
        while True:
            exceeded = list[tuple[AgentMachine, str]]()
            with self._lock:
                if not self._machines:
                    self._is_running = False
                    return
                now_s = time.monotonic()
                for machine, (watched, last_s) in self._machines.items():
                    if now_s - last_s >= (BUSY_S if machine.busy_until_s else IDLE_S):
                        self._machines[machine] = watched, now_s
                        if reason := exceeds(watched.proc, watched.limits):
                            exceeded.append((machine, reason))
            for machine, reason in exceeded:
                machine.lost_because = reason
                machine.close()
            time.sleep(BUSY_S)


def exceeds(proc: int, limits: MachineLimits) -> str:
    """Returns which limit the processes in a /proc exceed together. Empty means none."""
    memory_bytes, ticks, pids = 0, 0, list[str]()
    with suppress(OSError):  # the machine has ended
        pids = [name for name in os.listdir(proc) if name.isdigit()]
    for pid in pids:
        fields = _read(proc, f"{pid}/stat").rpartition(")")[2].split()
        if len(fields) > 21:
            ticks += sum(map(int, fields[11:15]))  # its own, and its reaped children's
            memory_bytes += int(fields[21]) * _PAGE_BYTES
    if ticks > limits.cpu_s * _TICKS:
        return f"the machine used over {limits.cpu_s} s of CPU time (limits.cpu_s)"
    # Resident pages count once per process that shares them. A share of each is exact, and takes longer to find.
    if memory_bytes > limits.memory_bytes and sum(_share(proc, pid) for pid in pids) > limits.memory_bytes:
        return f"the machine used over {limits.memory_bytes} bytes of memory (limits.memory_bytes)"
    return ""


def _share(proc: int, pid: str) -> int:
    """Returns the bytes of a process, with its share of what it has in common with others."""
    for line in _read(proc, f"{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    fields = _read(proc, f"{pid}/statm").split()  # of a process that hides its maps
    return int(fields[1]) * _PAGE_BYTES if len(fields) > 1 else 0


def _read(proc: int, path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY, dir_fd=proc)
    except OSError:  # it has ended
        return ""
    try:
        return os.read(descriptor, 1 << 14).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


@made_once
def watch() -> MachineWatch:
    """Returns the watch of this process."""
    return MachineWatch()
