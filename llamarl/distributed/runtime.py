"""Process-wide torch settings of an executor."""

from __future__ import annotations

import os

import torch

from llamarl.config import ConfigError


def set_up_device(name: str, threads: int, option: str) -> torch.device:
    """The device to compute on, with the CPU thread count set for this process.

    Raises:
        ConfigError: `name` is no usable device; names `option`.
    """
    torch.set_num_threads(threads)
    if name == "cpu":
        return torch.device("cpu")
    if not name.startswith("cuda"):
        raise ConfigError(f"`{option} = {name!r}` is no device; use `cpu` or `cuda`")
    if not torch.cuda.is_available():
        raise ConfigError(f"`{option} = {name!r}`, but torch sees no GPU; use `cpu` or install a CUDA build of torch")
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # one of several ranks
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device(name)
