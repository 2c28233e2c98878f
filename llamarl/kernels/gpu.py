"""Kernels of GPUs, where the part `cuda` has some that reproduce torch; elsewhere torch computes, and says why."""

from __future__ import annotations

import functools
from typing import Any

import torch

from llamarl.config.errors import ConfigError
from llamarl.config.ref import part

_CPU = torch.device("cpu")


def kernel(name: str, device: torch.device) -> Any:
    """The functions of `parts/cuda/<name>.py`, compiled and checked at the first call; None: torch does their work."""
    return None if device == _CPU else _found(name, device)[0]  # asked in each layer of each step


def reason(name: str, device: torch.device) -> str:
    """Why torch does their work; empty where it does not."""
    return _found(name, device)[1]


@functools.cache
def _found(name: str, device: torch.device) -> tuple[Any, str]:
    if device.type != "cuda":
        return None, f"{device.type} device"
    try:
        checked = part("cuda", "checked")
    except ConfigError as lacks:  # a GPU computes without, too
        return None, str(lacks)
    return checked(name, device)
