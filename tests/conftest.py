"""One thread per process, bounded memory, no network; no process and no shared memory outlives the tests."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.devices import has_gpu
from tests.durations import Durations
from tests.groups import make_group  # noqa: F401, a fixture for all folders
from tests.leftovers import left_behind, own_folders
from tests.nightly import NIGHTLY, examples

# How long an example takes says more about the machine's load; `make test` takes the same ones each time, and
# `make test-all` looks for others.
settings.register_profile("here", deadline=None, derandomize=not NIGHTLY, max_examples=examples(100))
settings.load_profile("here")

MAX_PROCESS_BYTES = 8 * 2**30
"""A test that allocates without end gets a MemoryError; without this the machine's other processes pay for it."""

OWN_FOLDERS = own_folders()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores it, and so would every command that a test starts and then interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` ignores it
# Of about 600 files of tests and of the package, each process would compile what it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before torch is imported: two cores, shared with every process that a test starts.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
HAS_GPU = has_gpu()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels run on the CPU
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}

if not HAS_GPU:  # with a GPU its driver's memory counts too
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_PROCESS_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected stays: looking for garbage among 600 modules takes seconds, now and in each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Function) -> None:
    """What a test was given is held by pytest for longer than the session's end, which then finds it."""
    item.funcargs.clear()


@pytest.fixture(autouse=True, scope="module")
def leave_older_objects_alone() -> None:
    """Looking for garbage, as runs of the controller do at their end, is quick among the objects of one file of tests,
    and takes a second among those of all files before it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def ends_its_commands() -> Iterator[None]:
    """A command that a test has started, and not ended since it failed, would slow down all that come after it."""
    started = getattr(sys.modules.get("tests.end_to_end.tiny"), "STARTED", [])
    before = len(started)
    yield
    for process in started[before:]:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(autouse=True)
def keeps_its_priority() -> Iterator[None]:
    """A test that lowers it would slow down all those after it, and every process that they start."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.fixture(autouse=True)
def chooses_its_own_interface() -> Iterator[None]:
    """A rank with a GPU says in its environment which one it meets others by; what a test starts later may be
    elsewhere."""
    yield
    os.environ.pop("NCCL_SOCKET_IFNAME", None)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the session, and cleans up, when a process, a segment, a socket or a folder is left at its end."""
    yield
    if found := left_behind(OWN_FOLDERS):
        pytest.fail("left behind by the tests: " + "; ".join(found), pytrace=False)
