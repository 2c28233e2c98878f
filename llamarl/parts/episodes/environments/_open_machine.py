"""`OpenMachine`: the machine of an episode, started at its first command and ended with the episode."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache
from typing import TypeVar

from llamarl.config import ConfigError, Ref, build
from llamarl.parts.episodes.machines import Machine, MachineBackend, MachineLimits

FAMILY = "llamarl.parts.episodes.machines"
AT_ONCE = 64
"""Episodes of one process whose machines work at the same time. Threads wait for them; they compute little."""
_STACK_BYTES, _M_ARENA_MAX = 1 << 20, -8
T = TypeVar("T")


@cache
def _threads() -> ThreadPoolExecutor:
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)  # each of up to 8 arenas per core takes address space
    threading.stack_size(_STACK_BYTES)  # the limit of a worker's memory is one of address space, too
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="machine")


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Returns the result of a function that waits for a machine."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), work, *arguments)


@lru_cache(maxsize=8)
def _backend_of(ref: str) -> MachineBackend:
    found = build(Ref.model_validate_json(ref), FAMILY, "rollout.environment.backend")
    if not isinstance(found, MachineBackend):
        raise ConfigError(f"`rollout.environment.backend` is not a backend; derive it from {FAMILY}.MachineBackend")
    if problem := found.problem():
        raise ConfigError(f"`rollout.environment.backend`: machines cannot be started here: {problem}")
    return found


def backend_of(ref: Ref) -> MachineBackend:
    """Returns the backend that an environment names. Raises ConfigError if this host cannot start its machines."""
    return _backend_of(ref.model_dump_json())


class OpenMachine:
    """Starts a machine once. `close` may come from another thread while it starts or works."""

    def __init__(self, backend: MachineBackend, limits: MachineLimits) -> None:
        self._backend, self._limits = backend, limits
        self._lock = threading.Lock()
        self._machine: Machine | None = None
        self._is_closed = False

    def started(self, folder: str | None, tar: bytes) -> Machine:
        """Returns the machine. Raises OSError, ConfigError, MachineLost."""
        if self._machine is None:
            machine = self._backend.start(folder, self._limits)
            with self._lock:
                if not self._is_closed:
                    self._machine = machine
            if self._machine is None:
                machine.close()
                raise OSError("the episode has ended")
            machine.put(tar)
        return self._machine

    def close(self) -> None:
        """Ends the machine."""
        with self._lock:
            self._is_closed, machine = True, self._machine
        if machine is not None:
            machine.close()
