"""Trainer state to and from a checkpoint: weights, optimizer moments, completed steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llamarl.checkpoint.store import Checkpoint, CheckpointError
from llamarl.training.trainer import Trainer


def training_state(trainer: Trainer) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors by file, and JSON state."""
    weights = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    moments = dict[str, Tensor]()
    for name, weight in trainer.model.named_parameters():
        for key, value in trainer.optimizer.state.get(weight, {}).items():
            moments[f"{name}:{key}"] = value
    return {"model": weights, "optimizer": moments}, {"policy_version": trainer.policy_version}


def load_training_state(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's tensors into `trainer`, bit for bit. Raises CheckpointError on another model's checkpoint."""
    weights = dict(trainer.model.named_parameters())
    saved = checkpoint.tensors["model"]
    if saved.keys() != weights.keys() or any(saved[name].shape != weights[name].shape for name in weights):
        raise CheckpointError(f"{checkpoint.folder} holds another model than model.path; use the model it was made from")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[name])
    for key, value in checkpoint.tensors["optimizer"].items():
        name, _, moment = key.rpartition(":")
        trainer.optimizer.state[weights[name]][moment] = value.to(weights[name].device) if value.ndim else value
    trainer.policy_version = checkpoint.state["policy_version"]
