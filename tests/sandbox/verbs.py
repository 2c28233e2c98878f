"""What workers of the tests' pools do. Only the standard library: each pool starts a process that imports this file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def act(job: list[Any]) -> Any:
    """Runs in a worker: (verb, argument) -> what the verb makes of the argument."""
    verb, argument = job
    return _VERBS[verb](argument)


def _spin(_: Any) -> None:
    while True:
        pass


def _wait(mark: str) -> int:
    """Writes its pid under `mark`, then waits to be killed or released."""
    path = Path(mark)
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    while not path.with_suffix(".go").exists():
        time.sleep(0.005)
    return os.getpid()


def _sockets() -> list[int]:
    return [int(fd) for fd in os.listdir("/proc/self/fd") if _link(fd).startswith("socket:")]


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the directory's own
        return ""


def _raise(message: str) -> None:
    raise ValueError(message)


def _start_others(mark: str) -> None:
    """A child, and one that has left its session and lost its parent; then waits for its end."""
    begets = "import subprocess; child = subprocess.Popen(['sleep', '99'], start_new_session=True)"
    beget = f"{begets}; print(child.pid, file=open({mark!r}, 'a'))"
    subprocess.run([sys.executable, "-c", beget], check=True)
    child = subprocess.Popen(["sleep", "99"])
    with Path(mark).open("a") as file:
        file.write(f"{child.pid}\n")
    if mark.endswith("hang"):
        time.sleep(60)
    os._exit(3)


_VERBS: dict[str, Callable[[Any], Any]] = {
    "echo": lambda value: value,
    "pid": lambda _: os.getpid(),
    "spin": _spin,
    "wait": _wait,
    "sleep": time.sleep,
    "raise": _raise,
    "memory": lambda num_bytes: len(bytearray(num_bytes)),
    "exit": os._exit,
    "parricide": lambda _: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(60),
    "babble": lambda _: [os.write(fd, b"[}\n") for fd in _sockets()] and time.sleep(60),
    "start others": _start_others,
    "closed": lambda _: os.closerange(3, 256) or _spin(0),
    "environment": lambda _: dict(os.environ),
    "input": lambda _: _link("0"),
}


def burn(cpu_s: float) -> int:
    end_s = time.process_time() + cpu_s
    while time.process_time() < end_s:
        pass
    return os.getpid()
