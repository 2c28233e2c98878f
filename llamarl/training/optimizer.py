"""AdamW with decay on matrices only, and the learning rate: linear warm-up, then constant or falling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from llamarl.config.schema import TrainerConfig
from llamarl.training.adamw import AdamW
from llamarl.training.light import LightAdamW
from llamarl.weight_sync.layout import TensorSpec


def build_optimizer(
    weights: Iterable[Tensor], config: TrainerConfig, places: Sequence[TensorSpec] = ()
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101), which keeps weights and moments as `config` says. Norms and biases are not decayed:
    pulling them to 0 removes what they scale.

    Args:
        places: of `weights` in whole ones, in their order, with `config.weights` in bfloat16.
    """
    given = list(weights)
    matrices = [weight for weight in given if weight.ndim >= 2]
    vectors = [weight for weight in given if weight.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    coded, on_host, rounds = config.moments == "8bit", config.moments_on == "host", config.weights == "bfloat16"
    if not (coded or on_host or rounds):
        return AdamW(groups, lr=config.learning_rate, betas=betas, eps=1e-8, fused=True)
    placed = zip(given, places, strict=True) if rounds else ()
    places_of = {weight: place for weight, place in placed if weight.dtype == torch.bfloat16}  # routers never are
    return LightAdamW(
        groups, lr=config.learning_rate, betas=betas, eps=1e-8, coded=coded, on_host=on_host, places=places_of
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: TrainerConfig) -> float:
    """Brings an optimizer to the rate of the step with this number; that rate."""
    rate = learning_rate_at(step, config)
    for param_group in optimizer.param_groups:
        param_group["lr"] = rate * param_group.get("lr_scale", 1.0)
    return rate


def learning_rate_at(step: int, config: TrainerConfig) -> float:
    """Rate of the optimizer step with this number, counted from 0."""
    peak = config.learning_rate * min(1.0, (step + 1) / (config.warmup_steps + 1))
    if config.decay == "constant":
        return peak
    done = min(1.0, max(0, step - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    # Cosine: SGDR without restarts (arXiv 1608.03983, equation 5).
    left = 1 - done if config.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (config.decay_floor + (1 - config.decay_floor) * left)
