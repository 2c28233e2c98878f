"""What a process starts does not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from llamarl.cluster import start_up

WAIT_S = 240.0


def test_a_dependent_ends_with_the_process_that_started_it() -> None:
    """Killed, so that nothing of it can see to that. The pipe ends with the last one that holds it."""
    code = (
        "import subprocess\nfrom llamarl.cluster.start_up import dependent\n"
        "subprocess.run(dependent('import time; print(1, flush=True); time.sleep(600)'))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"1\n"
        parent.kill()
        said, _ = parent.communicate(timeout=WAIT_S)
    assert said == b"" and parent.returncode == -signal.SIGKILL


def test_a_dependent_that_comes_too_late_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent died before the system was asked to tell."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    command = start_up.dependent("print('works')")
    monkeypatch.undo()
    assert subprocess.run(command, capture_output=True, timeout=WAIT_S).stdout == b""
