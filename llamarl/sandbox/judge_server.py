"""The fork server of a judge: a warm interpreter that has never seen a job, so its children find none in their memory.

    judge -> server  limits as JSON, with one end of a socket: the tester's
    judge -> server  anything: the job is over
    server -> judge  how candidate and tester ended: exit codes, -N for signal N

It ends, with what it forked, when its standard input does.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable

from llamarl.sandbox import seccomp
from llamarl.sandbox.judge_children import run_candidate, run_tester

READY = b"ready"
_WARM = """abc array ast base64 binascii bisect calendar cmath collections.abc contextlib copy csv dataclasses datetime
decimal difflib enum fractions functools graphlib hashlib heapq html inspect io itertools json keyword logging math
numbers operator os pathlib pprint queue random re secrets statistics string struct tempfile textwrap threading time
timeit traceback types typing unicodedata unittest uuid warnings weakref zlib _strptime _json encodings.ascii
encodings.latin_1 encodings.utf_8_sig encodings.utf_16 encodings.cp1252 encodings.idna"""
"""What programs may import: a confined process opens no file."""


def main() -> None:
    """Serves jobs, one after the other."""
    for name in _WARM.split():
        importlib.import_module(name)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)  # a limit per job of who started this does not count here
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


def _serve(judge: socket.socket, limits: dict[str, int], control: int) -> None:
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    with ours, theirs:
        candidate = _fork(run_candidate, [theirs.fileno()], limits, parent)
        tester = _fork(run_tester, [control, ours.fileno()], limits, parent)
    os.close(control)
    judge.recv(1)
    ends = []
    for pid in (candidate, tester):
        os.kill(pid, signal.SIGKILL)  # one that has ended is a zombie until it is waited for: never another process
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    judge.send(json.dumps(ends).encode())


def _fork(work: Callable[..., None], descriptors: list[int], limits: dict[str, int], parent: int) -> int:
    if pid := os.fork():
        return pid
    try:
        try:
            _keep_only(descriptors)
            seccomp.only_compute(parent=parent, **limits)
        except (OSError, ValueError):
            os.kill(os.getpid(), signal.SIGUSR1)  # which no confined process can send
        work(*range(3, 3 + len(descriptors)))
    finally:
        os._exit(0)
    return 0


def _keep_only(descriptors: list[int]) -> None:
    """The given ones become 3, 4, ...; 0 to 2 are /dev/null, and nothing else stays open."""
    quiet = os.open(os.devnull, os.O_RDWR)
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in [quiet] * 3 + descriptors]
    for place, descriptor in enumerate(kept):
        os.dup2(descriptor, place)
    os.closerange(len(kept), 4096)


if __name__ == "__main__":
    sys.exit(main())
