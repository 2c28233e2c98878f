"""The fork server of a judge: a warm interpreter that never receives a job, so its children inherit none.

    judge -> server  limits as JSON, with one end of a socket: the tester's
    judge -> server  anything: the job is over
    server -> judge  exit codes of candidate and tester (-N for signal N), and whether both were idle

It exits, with its children, when its standard input closes.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

from llamarl.parts.episodes.sandbox import seccomp
from llamarl.parts.episodes.sandbox.judge_children import run_candidate, run_tester

READY = b"ready"
_WARM = """abc array ast base64 binascii bisect calendar cmath collections.abc contextlib copy csv dataclasses datetime
decimal difflib enum fractions functools graphlib hashlib heapq html inspect io itertools json keyword logging math
numbers operator os pathlib pprint queue random re secrets statistics string struct tempfile textwrap threading time
timeit traceback types typing unicodedata unittest uuid warnings weakref zlib _strptime _json encodings.ascii
argparse bz2 contextvars fnmatch gzip html.parser ipaddress lzma pickle platform shlex shutil urllib.parse
encodings.latin_1 encodings.utf_8_sig encodings.utf_16 encodings.cp1252 encodings.idna"""
"""Modules that programs may import, loaded in advance because a confined process cannot open files."""
_LOOK_S, _IDLE_LOOKS = 0.5, 6
"""Seconds between two checks of a job's CPU time, and the number of consecutive checks without progress after which it
is over. A process that competes for CPU time still makes progress."""


def main() -> None:
    """Serves jobs one after the other."""
    for name in _WARM.split():
        importlib.import_module(name)
    time.sleep = _sleep  # type: ignore[assignment]
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)  # replaces the soft limit inherited from the parent
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    seccomp.program()
    gc.collect()
    gc.freeze()
    judge = socket.socket(fileno=os.dup(0))
    judge.send(READY)
    while True:
        limits, descriptors, _, _ = socket.recv_fds(judge, 1 << 16, 1)
        if not limits:
            return
        _serve(judge, json.loads(limits), descriptors[0])


def _sleep(seconds: float) -> None:
    """Returns at once, because no other process changes anything here."""


def _serve(judge: socket.socket, limits: dict[str, int], control: int) -> None:
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    with ours, theirs:
        candidate = _fork(run_candidate, [theirs.fileno()], limits, parent)
        tester = _fork(run_tester, [control, ours.fileno()], limits, parent)
    os.close(control)
    used_s, idle = -1.0, 0
    while idle < _IDLE_LOOKS and not select.select([judge], [], [], _LOOK_S)[0]:
        before_s, used_s = used_s, sum(time.clock_gettime(~pid << 3 | 2) for pid in (candidate, tester))  # CPU clocks
        idle = idle + 1 if used_s == before_s else 0
    ends = []
    for pid in (candidate, tester):
        os.kill(pid, signal.SIGKILL)  # an ended child is a zombie, so its id is not reused
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    judge.recv(1)  # returns at the latest when the tester exits
    judge.send(json.dumps([*ends, idle == _IDLE_LOOKS]).encode())


def _fork(work: Callable[..., None], descriptors: list[int], limits: dict[str, int], parent: int) -> int:
    if pid := os.fork():
        return pid
    try:
        try:
            _keep_only(descriptors)
            seccomp.only_compute(parent=parent, **limits)
        except (OSError, ValueError):
            os.kill(os.getpid(), signal.SIGUSR1)  # no confined process can send this signal
        work(*range(3, 3 + len(descriptors)))
    finally:
        os._exit(0)
    return 0


def _keep_only(descriptors: list[int]) -> None:
    """Moves the given descriptors to 3, 4, ...; 0 to 2 become /dev/null, and all others are closed."""
    quiet = os.open(os.devnull, os.O_RDWR)
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in [quiet] * 3 + descriptors]
    for place, descriptor in enumerate(kept):
        os.dup2(descriptor, place)
    os.closerange(len(kept), 4096)


if __name__ == "__main__":
    sys.exit(main())
