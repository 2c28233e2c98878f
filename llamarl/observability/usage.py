"""Memory, files and threads that a process takes of its machine."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

GROUPS = "/sys/fs/cgroup"
"""Folder where version 2 of control groups is mounted."""


MIN_FILES = 512
"""Fewest files that a process must be allowed to open at once, beside connections to other ranks and hosts."""
MAX_IN_METRICS = 16
"""Executors whose memory is in the metrics of every step; the summary has all."""


class Usage(NamedTuple):
    """Memory, descriptors and threads of one process, now."""

    rss_bytes: int
    """Resident memory."""
    descriptors: int
    """Open files and sockets; 0 where the system does not tell."""
    threads: int
    """0 where the system does not tell."""


NOTHING = Usage(0, 0, 0)


def usage() -> Usage:
    """Usage of this process. Never fails: whether a process is well is asked with it."""
    try:
        with open("/proc/self/statm") as file:
            rss_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Usage(rss_bytes, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
    except OSError:  # no descriptor is left, or this is macOS, with no cheap way to the current size; it is the peak
        unit = 1024 if sys.platform == "linux" else 1
        return Usage(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, 0, 0)


def by_kind(executors: Mapping[str, Usage], limit: int | None) -> dict[str, float]:
    """`rss_bytes.NAME` and so on, of this process, the controller, and the first executors."""
    found = {"controller": usage(), **dict(list(executors.items())[:limit])}
    return {f"{kind}.{name}": value for name, one in found.items() for kind, value in one._asdict().items() if value}


def available_bytes() -> float:
    """Memory that this machine still has for this process, within the limits of its control groups."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found = 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()[-1].rpartition("::")[2]
    except (OSError, StopIteration, IndexError):
        return math.inf
    for folder in (own := Path(GROUPS, group.strip("/")), *own.parents):
        with suppress(OSError, ValueError):  # no limit, or the root
            limit = int((folder / "memory.max").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            found = min(found, float(limit - used))
    return found
