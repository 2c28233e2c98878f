"""One thread per process, bounded memory, no network; no process and no shared memory outlives the tests."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from llamarl.cluster.engine_files import MEMORY
from tests.groups import make_group  # noqa: F401, a fixture for all folders

settings.register_profile("untimed", deadline=None)  # how long an example takes says more about the machine's load
settings.load_profile("untimed")

MARK = f"LLAMARL_TESTS={uuid.uuid4().hex}"
"""In the environment of every process that a test starts, however it is detached."""
GRACE_S = 10.0
"""For processes that end by themselves once their parent has asked them to."""
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Part of the standard library; they end with the tests' own process."""

MAX_PROCESS_BYTES = 8 * 2**30
"""A test that allocates without end gets a MemoryError; without this the machine's other processes pay for it."""

os.environ |= dict([MARK.split("=")])
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores it, and so would every command that a test starts and then interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Before torch is imported: two cores, shared with every process that a test starts.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels run on the CPU
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}

if not Path("/dev/nvidia0").exists():  # with a GPU its driver's memory counts too
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_PROCESS_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _processes() -> dict[int, str]:
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


def _segments() -> set[str]:
    """Named shared memory of this package, without what goes with this process."""
    own = Path(os.environ.get(MEMORY, "")).name
    return {path.name for path in Path("/dev/shm").glob("llamarl-*")} - {own}


LONG = ("end_to_end", "gpu", "executors", "controller", "training", "weight_sync")
"""Folders whose files take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They come first: what is left for the end is short, so that no process waits long for the other."""
    items.sort(key=lambda item: LONG.index(name) if (name := item.path.parent.name) in LONG else len(LONG))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the session, and cleans up, when a process or a segment is left at its end."""
    segments_before = _segments()
    yield
    deadline_s = time.monotonic() + GRACE_S
    while (_processes() or _segments() - segments_before) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    processes, segments = _processes(), sorted(_segments() - segments_before)
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    for segment in segments:
        left = Path("/dev/shm") / segment
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    if processes or segments:
        pytest.fail(f"left behind by the tests: processes {processes}, shared memory {segments}", pytrace=False)
