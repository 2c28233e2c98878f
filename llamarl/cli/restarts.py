"""`llamarl train --restarts N`: runs the command in a child process, and starts it again when it dies."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from llamarl.cli.main import FAILURE, INTERRUPTED, USER_ERROR
from llamarl.config import ConfigError

WOULD_FAIL_AGAIN = 3
"""Exit code of a command that would fail again after a restart."""
PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Shortest and longest pause before a restart, in seconds, in which executors of the dead controller end. It doubles
while starts are refused."""
_PR_SET_PDEATHSIG = 1


def run_with_restarts(arguments: Sequence[str], restarts: int, folder: Path) -> int:
    """Runs `llamarl train` with these arguments, and restarts it with `--resume` after deaths and failures that a
    restart can fix. Returns the last exit code. Signals go to the child.

    Args:
        restarts: most restarts.
        folder: of the run.

    Raises:
        ConfigError: `restarts` is negative.
    """
    if restarts < 0:
        raise ConfigError(f"--restarts {restarts}: give 0 or more")
    first = [sys.executable, "-m", "llamarl", "train", *arguments, "--restarts", "0"]
    again = [one for one in first if one not in ("--resume", "--overwrite")] + ["--resume"]
    command, asked, code, pause_s = first, list[int](), 0, PAUSE_S
    running: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if running is not None:
            with suppress(ProcessLookupError):
                running.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    for number in range(restarts + 1):
        # In its own process group, the child gets Ctrl-C once, from this process.
        running = subprocess.Popen(command, process_group=0, preexec_fn=_end_with_parent)  # noqa: PLW1509, no threads
        code = running.wait()
        # After a successful start, a refusal is not a user's mistake: the disk is full, or a folder is gone.
        is_over = code in (0, INTERRUPTED, WOULD_FAIL_AGAIN) or (code == USER_ERROR and command is first)
        if asked or is_over or number == restarts:
            break
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}, see above"
        print(f"llamarl train: {cause}; restart {number + 1} of {restarts}", file=sys.stderr, flush=True)
        command = again if _has_begun(folder, running.pid) else command
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if code == USER_ERROR else PAUSE_S
        time.sleep(pause_s)
    if code < 0:
        return INTERRUPTED if asked else 128 - code
    return FAILURE if code == WOULD_FAIL_AGAIN else code


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _has_begun(folder: Path, pid: int) -> bool:
    """Returns whether a process has locked the folder, so that its old contents are gone."""
    with suppress(OSError):
        return (folder / ".lock").read_text(encoding="utf-8").split()[:1] == [str(pid)]
    return False
