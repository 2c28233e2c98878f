"""Machines for episodes: isolated file systems in which commands of the policy run. One file per backend."""

from llamarl.parts.episodes.machines._base import CommandResult, Limits, Machine, MachineBackend, MachineLost

__all__ = ["CommandResult", "Limits", "Machine", "MachineBackend", "MachineLost"]
