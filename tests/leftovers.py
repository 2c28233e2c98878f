"""What tests may leave behind: processes, shared memory, sockets that listen, folders."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import tempfile
import time
import uuid
from contextlib import suppress
from multiprocessing import resource_sharer
from multiprocessing.util import Finalize
from pathlib import Path

MARK = f"LLAMARL_TESTS={uuid.uuid4().hex}"
"""In the environment of every process that a test starts, however it is detached."""
GRACE_S = 60.0
"""For processes that end by themselves once their parent has asked them to."""
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Part of the standard library; they end with the tests' own process."""


def own_folders() -> Path:
    """A folder of this session for the temporary ones of all its processes: other sessions' are not in it. pytest's
    stay where they were, to be looked at."""
    os.environ |= dict([MARK.split("=")])
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="lt-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # After the standard library's own finalizers, which look for what they put there.
    Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)
    return Path(folder)


def processes() -> dict[int, str]:
    """Running processes of this test session beside itself: pid -> command line."""
    found = dict[int, str]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = MARK.encode() in (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended meanwhile, or belongs to someone else
            continue
        if marked and int(folder.name) != os.getpid() and not any(helper in command for helper in HELPERS):
            found[int(folder.name)] = command
    return found


def shared_memory() -> list[str]:
    """Weights' memory that this process still has open, or mapped."""
    gc.collect()
    opened = [_target(descriptor) for descriptor in Path("/proc/self/fd").iterdir()]
    mapped = [line.split(None, 5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return sorted(name for name in opened + mapped if name.startswith("/memfd:llamarl"))


def listening() -> list[str]:
    """Sockets of this process that wait for connections, and that Python opened: gloo, UCX and Monarch keep some of
    their own until the process ends."""
    inodes = set[str]()
    for kind, listens, inode in (("tcp", "0A", 9), ("tcp6", "0A", 9), ("unix", "00010000", 6)):
        for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]:
            if (words := line.split())[3] == listens:
                inodes.add(f"socket:[{words[inode]}]")
    opened = [one.fileno() for one in gc.get_objects() if type(one) is socket.socket]
    return [name for name in (_target(Path(f"/proc/self/fd/{one}")) for one in opened) if name in inodes]


def folders(own: Path) -> list[str]:
    """Returns the package's temporary folders, except those that the next start removes, and this process's own.

    A rank that is killed while it starts may leave a folder of Monarch's (`.tmp` and six letters) beside them. It is
    removed with the session's own folder.
    """
    from llamarl.cluster.engine_files import sweep

    current, tempfile.tempdir = tempfile.gettempdir(), str(own)
    try:
        sweep()
    finally:
        tempfile.tempdir = current
    return sorted(path.name for path in own.glob("llamarl-*") if str(path) != current)


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # the one that lists them
        return ""


def left_behind(own: Path, grace_s: float = GRACE_S) -> list[str]:
    """What is still there after a while; processes and folders go now."""
    resource_sharer.stop(grace_s)  # the standard library's: it hands out descriptors of tensors until the process ends
    deadline_s = time.monotonic() + grace_s
    while True:
        running = processes()
        found = [f"process {pid}: {command}" for pid, command in running.items()]
        found += [*shared_memory(), *(f"listening {name}" for name in listening())]
        found += [f"{own}/{name}" for name in folders(own)]
        if not found or time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    for pid in running:
        with suppress(ProcessLookupError):  # it has ended by itself meanwhile
            os.kill(pid, signal.SIGKILL)
    for name in folders(own):
        shutil.rmtree(own / name, ignore_errors=True)
    return found
