"""Settings that name a device, and what tells a process where it is."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

PLACED = "LLAMARL_PLACED"
"""Environment variable of an executor that sees its own devices alone."""
ALONE = "LLAMARL_ALONE"
"""Environment variable of an executor on whose GPUs no other one computes."""
ADDRESS = "LLAMARL_ADDRESS"
"""Environment variable with an address of this host that the run's other hosts can reach."""
WEIGHTS_ADDRESS = "LLAMARL_WEIGHTS_ADDRESS"
"""Environment variable with the address at which weights are sent and received, where they have a network of their
own."""


def named_devices(text: str) -> tuple[int, ...]:
    """The numbers in `cuda:0,2-3`; none in `cuda` and `cpu`."""
    parts = (part.split("-") for part in text.partition(":")[2].split(",") if part)
    return tuple(number for part in parts for number in range(int(part[0]), int(part[-1]) + 1))


def _checked(text: str) -> str:
    fits = re.fullmatch(r"cpu|cuda(:\d+(-\d+)?(,\d+(-\d+)?)*)?", text, re.ASCII)
    devices = named_devices(text) if fits else ()
    if not fits or len(set(devices)) < len(devices) or (":" in text and not devices):
        raise ValueError(f"{text!r} is not a device; use 'cpu', 'cuda', or 'cuda:0,2-3' to name some, each once")
    return text


Device = Annotated[str, AfterValidator(_checked)]
"""`cpu`; `cuda`: as many GPUs as there are ranks, the next that are free; `cuda:0,2-3`: these."""
