"""`llamarl train --restarts N`: the command in a process of its own, which is followed by another when it dies."""

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
"""Exit code that says so, of a command that somebody would start again."""
PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Before the next start: the executors of a dead controller end meanwhile. It doubles while starts are refused."""
_PR_SET_PDEATHSIG = 1


def run_with_restarts(arguments: Sequence[str], restarts: int, folder: Path) -> int:
    """Runs `llamarl train` with these arguments, and goes on with `--resume` after deaths and failures that another
    start can mend, so many times at most; the last exit code. Signals go to whoever runs.

    Args:
        folder: of the run.

    Raises:
        ConfigError: there is no such number.
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
        # A group of its own: Ctrl-C reaches it once, by way of this process.
        running = subprocess.Popen(command, process_group=0, preexec_fn=_end_with_parent)  # noqa: PLW1509, no threads
        code = running.wait()
        # What is refused after it has begun once is no mistake of the user's: a full disk, a folder that is gone.
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
    """Whether this process has taken the folder: what was there before is no longer."""
    with suppress(OSError):
        return (folder / ".lock").read_text(encoding="utf-8").split()[:1] == [str(pid)]
    return False
