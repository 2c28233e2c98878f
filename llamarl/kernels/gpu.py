"""GPU kernels of the part `cuda` that reproduce torch. Elsewhere torch computes, with a reason."""

from __future__ import annotations

import functools
from typing import Any

import torch

from llamarl.config.errors import ConfigError
from llamarl.config.ref import part

_CPU = torch.device("cpu")


def kernel(name: str, device: torch.device) -> Any:
    """Returns the functions of `parts/cuda/<name>.py`, compiled and checked at the first call, or None if torch
    replaces them."""
    return None if device == _CPU else _checked(name, device)[0]  # called in each layer of each step


def reason(name: str, device: torch.device) -> str:
    """Returns why torch replaces them, or "" if it does not."""
    return _checked(name, device)[1]


@functools.cache
def _checked(name: str, device: torch.device) -> tuple[Any, str]:
    if device.type != "cuda":
        return None, f"{device.type} device"
    try:
        checked = part("cuda", "checked")
    except ConfigError as error:  # a GPU computes without the part too
        return None, str(error)
    return checked(name, device)
