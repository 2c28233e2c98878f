"""The process that starts machines. The kernel ends a machine when the thread that started it ends, so one process with
one thread starts all machines of its parent, and they end with it.

    parent -> starter  a `Order` as JSON, with the descriptors of the machine's stream, bwrap's arguments and filter
    starter -> parent  the process id, with a descriptor of the process

It exits when its standard input closes. Standard library and `llamarl.child` only.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llamarl.child import stream_to_parent

STAGE = "/tmp"
"""Where each machine's files are mounted, in a mount namespace that only this machine has."""
STREAM, ARGUMENTS, FILTER = 3, 4, 5
"""Descriptors of bwrap."""
MAX_ORDER_BYTES = 1 << 16
_LOOK_S = 1.0
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_PR_SET_DUMPABLE = 4
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Starts one machine per message."""
    parent = stream_to_parent()
    socket_to_parent = socket.socket(fileno=os.dup(parent.fileno()))
    while True:
        while not select.select([parent], [], [], _LOOK_S)[0]:
            _reap()
        message, descriptors, _, _ = socket.recv_fds(socket_to_parent, MAX_ORDER_BYTES, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            _become_machine(json.loads(message), descriptors)
        handle = os.pidfd_open(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        socket.send_fds(socket_to_parent, [str(pid).encode()], [handle])
        os.close(handle)
        _reap()


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become_machine(order: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Prepares the machine's files, gives up all rights, and replaces this process by bwrap. Sends why not as a message
    of the machine."""
    kept = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 64) for one in descriptors]
    try:
        with open("/proc/self/oom_score_adj", "w") as score:  # where memory is short, a machine ends first
            score.write("1000")
        is_root = os.getuid() == 0  # before it is root of an own namespace
        _mount(order, is_root)
        if is_root:
            os.setgroups([])
            os.setresgid(order["uid"], order["uid"], order["uid"])
            os.setresuid(order["uid"], order["uid"], order["uid"])
        quiet = os.open(os.devnull, os.O_RDWR)
        for place, descriptor in enumerate([quiet, quiet, quiet, *kept]):
            os.dup2(descriptor, place)
        os.closerange(6, 64)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execv(order["program"], [order["program"], "--args", str(ARGUMENTS), *order["command"]])
    except (OSError, ValueError) as error:
        fault = json.dumps({"fault": f"{type(error).__name__}: {error}", "bytes": 0})
        os.write(kept[0], fault.encode() + b"\n")
    finally:
        os._exit(1)


def _mount(order: dict[str, Any], is_root: bool) -> None:
    """Mounts a file system of bounded size at `STAGE` with everything that the machine writes, and what it reads from
    the host."""
    own_uid, own_gid = os.getuid(), os.getgid()
    if is_root:
        _call("unshare", _CLONE_NEWNS)
    else:
        _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise /proc/self belongs to root
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {own_uid} 1"), ("gid_map", f"0 {own_gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    # The stage hides everything below its mount point, so these folders are opened before.
    base = os.open(order["base"], os.O_PATH) if order["base"] else None
    shown = [os.open(path, os.O_PATH) for path in order["shows"]]
    options = f"size={order['disk_bytes']},nr_inodes={order['files']},mode=755"
    _call("mount", b"tmpfs", STAGE.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode())
    for name in ("work", "tmp", "shm", "shell", "etc", "upper", "scratch", "shown"):
        os.mkdir(f"{STAGE}/{name}")
        os.chown(f"{STAGE}/{name}", order["uid"] if is_root else 0, -1)
    for name in ("tmp", "shm"):
        os.chmod(f"{STAGE}/{name}", 0o1777)
    for name, text in order["texts"].items():
        with open(f"{STAGE}/etc/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    if base is not None:
        layers = f"lowerdir=/proc/self/fd/{base},upperdir={STAGE}/upper,workdir={STAGE}/scratch"
        options = layers + (",userxattr" if not is_root else "")
        _call("mount", b"overlay", f"{STAGE}/work".encode(), b"overlay", _MS_NOSUID | _MS_NODEV, options.encode())
    for number, descriptor in enumerate(shown):
        os.mkdir(target := f"{STAGE}/shown/{number}")
        source = f"/proc/self/fd/{descriptor}".encode()
        _call("mount", source, target.encode(), None, _MS_BIND | _MS_REC, None)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name} {arguments[1].decode() if name == 'mount' else ''}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
