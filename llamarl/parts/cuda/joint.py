"""The joint of CUDA: checked kernels and captured decode steps. Imports torch only when a function is called."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from llamarl.config.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from llamarl.generation.attention import KVCache, StepGraphs
    from llamarl.generation.model import GeneratorModel


NIXL = ("nixl_cu12", "nixl_cu13")
"""Packages of NIXL, one per version of CUDA."""
NO_NIXL = "`weight_sync.transport = 'nixl'` needs a package: pip install 'llamarl[nixl]'"


def check_nixl() -> None:
    """Looks for NIXL without importing it, because it imports torch. Raises ConfigError if it is not installed."""
    if not any(map(find_spec, NIXL)):
        raise ConfigError(NO_NIXL)


def checked(name: str, device: torch.device) -> tuple[ModuleType | None, str]:
    """Returns the kernels of a file of this folder, or None and the reason why they are not used on this device."""
    from llamarl.parts.cuda.checks import checked

    return checked(name, device)


def decode_graphs(model: GeneratorModel, cache: KVCache, spare_block: int, max_running: int) -> StepGraphs:
    """Returns captured decode steps of an engine. See `DecodeGraphs`."""
    from llamarl.parts.cuda.graphs import DecodeGraphs

    return DecodeGraphs(model, cache, spare_block, max_running)
