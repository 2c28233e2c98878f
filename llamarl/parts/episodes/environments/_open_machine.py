"""`OpenMachine`: the machine of an episode, started at its first command and ended with the episode."""

from __future__ import annotations

import threading
from functools import lru_cache

from llamarl.config import ConfigError, Ref, build
from llamarl.parts.episodes.machines import Machine, MachineBackend, MachineLimits

FAMILY = "llamarl.parts.episodes.machines"


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
