"""Speed and memory of this machine, which rates and limits are relative to."""

from __future__ import annotations

import functools
import os
import resource
import time
from collections.abc import Mapping

import torch

from llamarl.config import ConfigError, RunConfig
from llamarl.config.schema import TrainerConfig
from llamarl.config.section import ALONE
from llamarl.kernels.products import PRODUCTS, multiply
from llamarl.models import fit, memory
from llamarl.models.shape import ModelShape
from llamarl.observability.spans import available_bytes

REPEATS = 5


def device_seconds(device: torch.device) -> float:
    """Returns a clock of work in seconds: processor time of this thread on CPUs, which others may share, else wall
    time."""
    return time.thread_time() if device.type == "cpu" else time.monotonic()


def peak_flops(config: TrainerConfig, device: torch.device) -> float:
    """Returns the FLOPs per second of a device: those of the fastest of a few large square products of training."""
    return _measured_peak_flops(
        torch.bfloat16 if config.dtype == "bfloat16" else torch.float32, device, torch.get_num_threads()
    )


@functools.cache
def _measured_peak_flops(dtype: torch.dtype, device: torch.device, _num_threads: int) -> float:
    size = 8192 if device.type == "cuda" else 512
    # Random numbers: with ones fewer bits change, and a GPU runs an eighth faster than with real weights.
    matrix = torch.randn(size, size, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    best_s = float("inf")
    for _ in range(REPEATS):
        for product in PRODUCTS:
            start_s = device_seconds(device)
            multiply(product, matrix, matrix)[0, 0].item()  # waits for the device
            best_s = min(best_s, device_seconds(device) - start_s)
    return 2.0 * size**3 / best_s


def rates(metrics: Mapping[str, float], train_s: float, peak: float) -> dict[str, float]:
    """Returns the rates of a step.

    Args:
        train_s: seconds of the step.
        peak: FLOPs per second that all devices reach at best.
    """
    return {
        "train_tokens_per_s": metrics["num_input_tokens"] / train_s,
        "mfu": metrics["num_flops"] / train_s / peak,
        "peak_tflops": peak / 1e12,
    }


def peak_memory_bytes(device: torch.device) -> float:
    """Returns the most memory that tensors on the device, or this process on a CPU, have held since the start."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def free_memory_bytes(device: torch.device) -> float:
    """Returns the bytes that this process could still allocate."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    return available_bytes()


def check_memory(shape: ModelShape, config: RunConfig, device: torch.device) -> None:
    """Checks before the first step, when weights and gradients are on the device, that everything the trainer needs
    fits.

    Raises:
        ConfigError: it does not fit. Names the memory needed, the memory available, and the cheapest setting that fits.
    """
    parts, free, on_cpu = _taken(config, shape), free_memory_bytes(device), device.type == "cpu"
    # Memory of gradients on a CPU is allocated when they are first written.
    allocated = float(parts["weights"] + (0 if on_cpu else parts["gradients"]))

    def available(other: RunConfig) -> float:  # ranks on CPUs share the memory of the machine
        return allocated + free / (other.trainer.parallelism.num_ranks if on_cpu else 1)

    def lacking(other: RunConfig) -> float:
        return float(memory.total(_taken(other, shape))) - available(other)

    if lacking(config) <= 0:
        return
    raise ConfigError(
        f"the trainer needs {fit.taken(parts)} of {device}, but {fit.taken({'': available(config)})} are available; "
        f"{fit.way_out(config, shape, lacking)}"
    )


def slots_fit(shape: ModelShape, config: RunConfig, device: torch.device) -> bool:
    """Returns whether the versions that generators fetch fit on the device of a trainer that works there alone, next to
    everything else that it needs."""
    if device.type != "cuda" or fit.slots_on_device(config):
        return True
    if not os.environ.get(ALONE):  # others take memory later
        return False
    parts, free = _taken(config, shape), free_memory_bytes(device)
    needed = float(memory.total(parts) - parts["weights"] - parts["gradients"]) + fit.slot_bytes(config, shape)
    return needed <= free


def _taken(config: RunConfig, shape: ModelShape) -> memory.Parts:
    """Returns bytes by kind of one rank of the trainer, which is the first of all executors."""
    return next(fit.holdings(config, shape, {})).parts
