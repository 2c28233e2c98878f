"""The joint of CUDA devices: kernels that have been checked, and steps as graphs. Without torch until one is called."""

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
"""Packages with NIXL, each for one version of CUDA."""
NO_NIXL = "`weight_sync.transport = 'nixl'` needs a package: pip install 'llamarl[nixl]'"


def check_nixl() -> None:
    """Looks for NIXL, which loads torch, without loading it. Raises ConfigError: this machine has none."""
    if not any(map(find_spec, NIXL)):
        raise ConfigError(NO_NIXL)


def checked(name: str, device: torch.device) -> tuple[ModuleType | None, str]:
    """The kernels of a file of this folder, or why they do not serve on this device."""
    from llamarl.parts.cuda.checks import checked

    return checked(name, device)


def decode_graphs(model: GeneratorModel, cache: KVCache, spare_block: int, max_running: int) -> StepGraphs:
    """Decode steps of an engine, captured; see `DecodeGraphs`."""
    from llamarl.parts.cuda.graphs import DecodeGraphs

    return DecodeGraphs(model, cache, spare_block, max_running)
