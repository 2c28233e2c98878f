"""Executors for the conformance suite: no torch, so that a worker starts quickly."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from llamarl.cluster.api import Executor
from llamarl.config.errors import RanksLost
from llamarl.observability.spans import stage


class Patient(Executor):
    """Is there when a file is."""

    def __init__(self, *, file: str) -> None:
        with stage("waits for a file"):
            while not Path(file).exists():
                time.sleep(0.01)


class Echo(Executor):
    """Answers, remembers, sleeps, fails and dies on request."""

    SPANS: ClassVar[dict[str, str]] = {"sleep": "generate", "work": "train"}

    def __init__(self, *, closed_file: str = "", num_work: int = 0) -> None:
        self.seen: list[Any] = []
        self.closed_file = closed_file
        self.num_work = num_work
        self.work_left = num_work
        self.polls: list[Future[Any]] = []
        self.work_error: str | Exception = ""

    def work(self) -> bool:
        if self.work_error:
            raise RuntimeError(self.work_error) if isinstance(self.work_error, str) else self.work_error
        if self.work_left:
            self.work_left -= 1
            return True
        return False

    def close(self) -> None:
        if self.closed_file:
            Path(self.closed_file).write_text("closed")

    def echo(self, value: Any, *, twice: bool = False) -> Any:
        return [value, value] if twice else value

    def remember(self, value: int) -> None:
        self.seen.append(value)

    def remembered(self) -> list[int]:
        return self.seen

    def worked(self) -> int:
        return self.num_work - self.work_left

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def fail(self, message: str) -> None:
        raise LookupError(message)

    def fail_unpicklable(self) -> None:
        class Local(Exception):
            pass

        raise Local("cannot travel")

    def fail_in_work(self, message: str) -> None:
        self.work_error = message

    def fail_in_rank(self, rank: int, others_wait_s: float, in_work: bool) -> None:
        """One rank raises by itself, and the others as they have lost it; no such rank: they say so of each other."""
        own = int(os.environ["RANK"])
        time.sleep(others_wait_s if own != rank else 0.5 - others_wait_s)
        error = LookupError(f"no such row in rank {rank}") if own == rank else RanksLost(f"rank {rank} is gone")
        if not in_work:
            raise error
        self.work_error = error

    def zeros_of_rank(self, size: int) -> bytes:
        return bytes(3 * size * int(os.environ["RANK"]))

    def zeros(self, num_bytes: int) -> bytes:
        return bytes(num_bytes)

    def poll(self) -> Future[Any]:
        self.polls.append(Future())
        return self.polls[-1]

    def resolve(self, value: Any) -> list[bool]:
        """Answers every poll; which ones still had a caller."""
        polls, self.polls = self.polls, []
        taken = [future.set_running_or_notify_cancel() for future in polls]
        for future, alive in zip(polls, taken, strict=True):
            if alive:
                future.set_result(value)
        return taken

    def abandoned(self) -> list[bool]:
        """Which polls have been canceled."""
        return [future.cancelled() for future in self.polls]

    def pid(self) -> int:
        return os.getpid()

    def environ(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def loaded(self, module: str) -> bool:
        return module in sys.modules

    def interrupt_self(self) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return True

    def say(self, text: str) -> None:
        os.write(1, f"{text}\n".encode())
        sys.stderr.write(f"{text} on stderr\n")

    def touch(self, file: str) -> None:
        Path(file).touch()

    def exit(self, code: int) -> None:
        os._exit(code)

    def start_child(self) -> int:
        """Its process id; it sleeps for an hour."""
        return subprocess.Popen(["sleep", "3600"]).pid

    def surroundings(self) -> dict[str, Any]:
        """What the process has got from who started it."""
        status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
        umask = os.umask(0o077)
        os.umask(umask)
        return {
            "argv": sys.argv,
            "path": sys.path,
            "flags": tuple(sys.flags),
            "executable": sys.executable,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": umask,
            "limits": Path("/proc/self/limits").read_text(),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "cores": os.sched_getaffinity(0),
            "session": os.getsid(0),
            "leads": os.getpgid(0) == os.getpid(),
            "signals": {name: int(status[name], 16) & 0x7FFFFFFF for name in ("SigBlk", "SigIgn", "SigCgt")},
            "threads": status["Threads"],
            "descriptors": sorted(_kind(name) for name in os.listdir("/proc/self/fd")),
            "collects": gc.isenabled(),
            "main": list(vars(sys.modules["__main__"])),
            "folder of its own": tempfile.gettempdir(),
        }

    def thread_counts(self) -> dict[str, int]:
        """Threads of torch and numpy here, and those that the process has after both have worked."""
        import numpy
        import torch

        before = len(os.listdir("/proc/self/task"))
        for dtype in (torch.float32, torch.bfloat16):
            whole = torch.ones(512, 512, dtype=dtype)
            (whole @ whole).exp().sum()
        with_torch = len(os.listdir("/proc/self/task"))
        numpy.ones((512, 512)) @ numpy.ones((512, 512))
        return {
            "torch": torch.get_num_threads(),
            "between operations": torch.get_num_interop_threads(),
            "OpenMP": ctypes.CDLL("libgomp.so.1").omp_get_max_threads(),
            "of torch": with_torch - before,
            "of numpy": openblas_threads(),
        }


def openblas_threads() -> int:
    """Threads that numpy's library for products of matrices uses."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    (path,) = {line.split(None, 5)[-1] for line in lines if "openblas" in line}
    return ctypes.CDLL(path).scipy_openblas_get_num_threads64_()


def _kind(descriptor: str) -> str:
    """What a descriptor is of, without numbers."""
    try:
        return re.sub(r"[0-9]+", "N", os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:  # that of the listing
        return ""


class Sharing(Echo):
    """Its ranks put long arguments together through a folder."""

    SHARES_CALLS = True

    def __init__(self, *, folder: str) -> None:
        super().__init__()
        self.folder, self.num_shared, self.dealt = Path(folder), 0, list[int]()

    def whole(self, parts: Mapping[int, bytes], owners: Sequence[int], num_bytes: int) -> bytes:
        self.num_shared += 1
        self.dealt = sorted(parts)
        for place, part in parts.items():
            (self.folder / f"{self.num_shared}-{place}.part").write_bytes(part)
            (self.folder / f"{self.num_shared}-{place}.part").rename(self.folder / f"{self.num_shared}-{place}")
        files = [self.folder / f"{self.num_shared}-{place}" for place in range(len(owners))]
        deadline_s = time.monotonic() + 240.0
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline_s, "a part is missing"
            time.sleep(0.001)
        whole = b"".join(file.read_bytes() for file in files)
        assert len(whole) == num_bytes
        return whole

    def dealt_here(self) -> list[int]:
        """Places of the parts that this rank got of the last call that was shared."""
        return self.dealt


class Broken(Executor):
    """Its constructor raises."""

    def __init__(self) -> None:
        raise ValueError("no such checkpoint")


class Slow(Executor):
    """Its constructor takes long."""

    def __init__(self, *, duration_s: float) -> None:
        time.sleep(duration_s)


class BadClose(Executor):
    def close(self) -> None:
        raise OSError("disk full")
