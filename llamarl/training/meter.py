"""Meters of this machine's speed and memory: what rates and limits are relative to."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping

import torch

from llamarl.config import ConfigError, RunConfig
from llamarl.config.schema import TrainerConfig
from llamarl.kernels.products import PRODUCTS, multiply
from llamarl.models.shape import ModelShape
from llamarl.observability.usage import available_bytes
from llamarl.training.cost import activation_bytes
from llamarl.training.logprobs import TILE_LOGITS
from llamarl.training.trainer import Trainer

REPEATS = 5


def device_seconds(device: torch.device) -> float:
    """A clock of work: processor time of this thread on CPUs, which others may use too, else wall time."""
    return time.thread_time() if device.type == "cpu" else time.monotonic()


def peak_flops(config: TrainerConfig, device: torch.device) -> float:
    """FLOPs per second of a device: the given one, or that of the fastest of a few large square products, by what
    multiplies in training."""
    if config.peak_tflops is not None:
        return config.peak_tflops * 1e12
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    size = 8192 if device.type == "cuda" else 512
    # Random numbers: with ones fewer bits change, and a GPU runs an eighth faster than on any real weights.
    matrix = torch.randn(size, size, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    best_s = float("inf")
    for _ in range(REPEATS):
        for product in PRODUCTS:
            start_s = device_seconds(device)
            multiply(product, matrix, matrix)[0, 0].item()  # waits for the device
            best_s = min(best_s, device_seconds(device) - start_s)
    return 2.0 * size**3 / best_s


def rates(metrics: Mapping[str, float], train_s: float, peak: float) -> dict[str, float]:
    """Rates of a step that took `train_s` seconds, where all devices reach `peak` FLOPs per second at best."""
    return {
        "train_tokens_per_s": metrics["num_input_tokens"] / train_s,
        "mfu": metrics["num_flops"] / train_s / peak,
        "peak_tflops": peak / 1e12,
    }


def peak_memory_bytes(device: torch.device) -> float:
    """Most memory that tensors on the device, or this process on a CPU, have held since the start."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def free_memory_bytes(device: torch.device) -> float:
    """Bytes that this process could still take."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    return available_bytes()


def check_memory(trainer: Trainer, shape: ModelShape, config: RunConfig) -> None:
    """Before the first step: whether the largest microbatch fits, with all responses of a group at their longest.

    Raises:
        ConfigError: by estimate it does not; says how much it takes, and there is.
    """
    settings, parallelism, rollout = config.trainer, config.trainer.parallelism, config.rollout
    prompt, responses = config.data.max_prompt_tokens, rollout.group_size * rollout.max_new_tokens
    num_tokens = min(settings.microbatch_tokens, rollout.prompts_per_step * (prompt + responses))
    keys_per_token = (prompt + rollout.group_size * (prompt + rollout.max_new_tokens)) / (prompt + responses)
    # A pipeline's first stage holds its part of the layers for as many microbatches as there are stages.
    num_sharing = parallelism.tp * parallelism.cp
    activations, thrifty = (
        activation_bytes(shape, recomputing, num_tokens, int(num_tokens * keys_per_token)) / num_sharing
        for recomputing in (settings, settings.model_copy(update={"activation_checkpointing": True}))
    )
    # Moments. On GPUs also the copy that autocast computes with, and two slots of weight sync; on CPUs gradients, whose
    # memory is taken when they are first written, and the copies that checkpoints write.
    bytes_per_weight = 8.0 + (2.0 + 4.0 if trainer.device.type != "cpu" else 4.0 + 12.0)
    moments = bytes_per_weight * sum(weight.numel() for weight in trainer.sharding.weights.values())
    logits = 3 * 4.0 * TILE_LOGITS + 4.0 * shape.vocab_size * shape.hidden_size / parallelism.tp
    free, gib = free_memory_bytes(trainer.device), 2.0**30
    if trainer.device.type == "cpu":
        free /= parallelism.num_ranks  # they share the machine's
    if activations + moments + logits > free:
        raise ConfigError(
            f"trainer.microbatch_tokens = {settings.microbatch_tokens} takes about {activations / gib:.1f} GiB, beside "
            f"{(moments + logits) / gib:.1f} GiB for optimizer, checkpoint and logits, and {free / gib:.1f} GiB are "
            f"free on {trainer.device}; lower it, set trainer.activation_checkpointing = true "
            f"({thrifty / gib:.1f} GiB), or share the model by trainer.parallelism"
        )
