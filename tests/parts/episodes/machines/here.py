"""Whether this host can start machines, and short cuts to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.parts.episodes.machines import Machine, MachineLimits
from llamarl.parts.episodes.machines.bubblewrap import Bubblewrap
from tests.end_to_end.tiny import descendants

BACKEND = Bubblewrap()
PROBLEM = BACKEND.problem()
needs_machines = pytest.mark.skipif(bool(PROBLEM), reason=f"machines cannot be started here: {PROBLEM}")


def said(machine: Machine, command: str, s: float = 60.0) -> str:
    """Returns the output of a command that exits with 0 in time."""
    done = machine.run(command, s, 1 << 16)
    output = done.output.decode()
    assert done.code == 0 and not done.is_late, (command, done)
    return output


def started(folder: str | None = None, **limits: object) -> Machine:
    return BACKEND.start(folder, MachineLimits(**limits))


def below(pid: int, mark: bytes) -> list[int]:
    """Returns the processes below another one whose command lines have a mark."""
    found = list[int]()
    for one in descendants(pid):
        try:
            if mark in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(one)
        except OSError:
            continue
    return found
