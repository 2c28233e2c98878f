"""Machines for episodes: isolated file systems in which commands of the policy run. One file per backend."""

from llamarl.parts.episodes.machines._base import CommandResult, Machine, MachineBackend, MachineLimits, MachineLost

__all__ = ["CommandResult", "Machine", "MachineBackend", "MachineLimits", "MachineLost"]
