"""The joint of several hosts: `Machines` that connect, and the checks before a run."""

from llamarl.parts.hosts.hosting import imagined
from llamarl.parts.hosts.hosts import inspect
from llamarl.parts.hosts.machines import HostMachines, check

__all__ = ["HostMachines", "check", "imagined", "inspect"]
