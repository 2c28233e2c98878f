"""Trainer state to and from a checkpoint: weights, optimizer moments, completed steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llamarl.training.critic import Critic
from llamarl.training.trainer import Trainer


class StateMismatch(ValueError):
    """The saved state belongs to another model."""


def training_state(trainer: Trainer | Critic) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors by file, and JSON state."""
    weights = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    moments = dict[str, Tensor]()
    for name, weight in trainer.model.named_parameters():
        for key, value in trainer.optimizer.state.get(weight, {}).items():
            moments[f"{name}:{key}"] = value
    return {"model": weights, "optimizer": moments}, {"policy_version": trainer.policy_version}


def load_training_state(
    trainer: Trainer | Critic, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> None:
    """Puts what `training_state` gave into `trainer`, bit for bit. Raises StateMismatch."""
    weights = dict(trainer.model.named_parameters())
    saved = tensors["model"]
    if saved.keys() != weights.keys() or any(saved[name].shape != weights[name].shape for name in weights):
        raise StateMismatch("the checkpoint holds another model than model.path; use the model it was made from")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[name])
    trainer.optimizer.state.clear()
    for key, value in tensors["optimizer"].items():
        name, _, moment = key.rpartition(":")
        weight = weights[name]
        # A copy, as a loaded tensor is a window into its file. Fused AdamW keeps its step count on the device, too.
        trainer.optimizer.state[weight][moment] = value.to(weight.device, copy=True)
    trainer.policy_version = state["policy_version"]
