"""Process-wide torch settings of an executor."""

from __future__ import annotations

import os

import torch

from llamarl.config import ConfigError
from llamarl.config.section import PLACED, named_devices


def set_up_device(name: str, threads: int, option: str) -> torch.device:
    """The device to compute on, with the CPU thread count set for this process.

    Raises:
        ConfigError: `name` is no usable device; names `option`.
    """
    torch.set_num_threads(threads)
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"`{option} = {name!r}`, but torch sees no GPU; use `cpu` or install a CUDA build of torch")
    named = () if PLACED in os.environ else named_devices(name)
    device = torch.device("cuda", named[0] if named else int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)  # else NCCL and whoever synchronizes make a context on the first one
    return device
