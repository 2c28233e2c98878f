"""First steps of an executor's process, before the engine and the executor are imported."""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import select
import signal
import sys
import threading
from pathlib import Path

from llamarl.cluster.launcher import ORDINARY

LIFELINE = "LLAMARL_LIFELINE"
"""Environment variable with the descriptor of a pipe whose other end this host's agent holds."""
launcher_pid = 0
"""Process that was started for this rank, which a fork server has forked. 0 means this process itself."""
_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
import json
sys.path[:] = json.loads(sys.argv[1])
from llamarl.cluster.start_up import main
main()
"""


def dependent(code: str) -> list[str]:
    """Returns a command that runs Python code. SIGTERM ends it when this process ends, however it ends."""
    end = f"ctypes.CDLL(None).prctl(1, {signal.SIGTERM:d})"  # PR_SET_PDEATHSIG
    ended = f"if os.getppid() != {os.getpid()}: sys.exit()"
    return [sys.executable, "-c", f"import ctypes, os, sys\n{end}\n{ended}\n{code}"]


def command(engine_module: str, code_paths: tuple[str, ...], log_file: Path | None) -> list[str]:
    """Returns arguments for the Python interpreter that run `engine_module` for a rank.

    The rank's `sys.path` is `code_paths` and this process's, so it can import the same modules.
    """
    paths = [*map(os.path.abspath, code_paths), *map(os.path.abspath, sys.path)]
    return ["-c", _PROGRAM, json.dumps(list(dict.fromkeys(paths))), engine_module, str(log_file or ""), os.getcwd()]


def die_with(until: int) -> None:
    """Has the kernel kill this process's group, even while it is stopped, when the other end of a pipe closes."""
    fcntl.fcntl(until, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(until, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(until, fcntl.F_SETFL, fcntl.fcntl(until, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(until, select.POLLIN)
    if poll.poll(0):  # it closed before
        os._exit(1)


def main() -> None:
    """Prepares the process and runs the engine. `sys.argv` comes from `command`."""
    # Ctrl-C goes to the foreground group of a terminal, but the controller stops the ranks. With its own group, the
    # controller can kill a rank together with the processes that it has started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    _, engine_module, log_file, folder = sys.argv[1:]
    if log_file:
        descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    if reason := os.environ.pop(ORDINARY, ""):
        sys.stderr.write(f"llamarl: this process imports its modules itself: {reason}\n")
    os.chdir(folder)  # relative paths of a run refer to the controller's folder, not to an agent's
    if descriptor := os.environ.get(LIFELINE):
        threading.Thread(target=_end_with_the_agent, args=(int(descriptor),), daemon=True).start()
    del sys.argv[1:]
    runpy.run_module(engine_module, run_name="__main__")


def _end_with_the_agent(lifeline: int) -> None:
    """Kills this process's group when the agent has ended: reading then returns, because no process ever writes
    there."""
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)
