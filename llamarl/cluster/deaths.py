"""Deaths of processes: how they ended."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct

_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3
"""Request and flag of linux/pidfd.h."""


def cause_of(report: str) -> str:
    """Cause of a process's death, in one line, from Monarch's report of its loss."""
    if killed := re.search(r"Killed(?:\(sig=| \{ signal: )(\d+)", report):
        return killed_by(int(killed[1]))
    if ended := re.search(r"(?:exit_code[=:] ?|exited with non-zero code )(\d+)", report):
        return f"ended with exit code {ended[1]}"
    if "process exited cleanly" in report:
        return "ended with exit code 0"
    return f"cannot be reached: {' '.join(report.split())[-300:]}"


def rank_of(report: str) -> int:
    """Rank within its mesh that Monarch's report of a loss names, by its place in each dimension; 0: it names none."""
    rank = 0
    for place, size in re.findall(r"'\w+': (\d+)/(\d+)", report.partition("}")[0]):
        rank = rank * int(size) + int(place)
    return rank


def cause_of_reaped(descriptor: int) -> str | None:
    """Cause of death of a process that somebody else has waited for; None on Linux before 6.15, which does not tell."""
    info = bytearray(64)  # struct pidfd_info: a mask first, the wait status last
    struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    if not struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
        return None
    code = os.waitstatus_to_exitcode(struct.unpack_from("i", info, 60)[0])
    return killed_by(-code) if code < 0 else f"ended with exit code {code}"


def killed_by(number: int) -> str:
    return f"was killed by {signal.Signals(number).name}"
