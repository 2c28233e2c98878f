"""Trainer state to and from a checkpoint: weights, optimizer moments, completed steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llamarl.distributed.box import Box
from llamarl.training.critic import Critic
from llamarl.training.trainer import Trainer


class StateMismatch(ValueError):
    """The saved state belongs to another model."""


def training_state(trainer: Trainer | Critic) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Whole tensors by file, and JSON state; several ranks call it together, and each gets all."""
    own = trainer.shards()
    if trainer.mesh.world.size > 1:
        own = {name: (spec, part.cpu()) for name, (spec, part) in own.items()}
    files: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for shards in trainer.mesh.exchange(own):
        for name, (spec, part) in shards.items():
            whole, file = Box.whole(spec.global_shape), files["optimizer" if ":" in name else "model"]
            if spec.box == whole:
                file[name] = part
            else:
                file.setdefault(name, part.new_empty(spec.global_shape))[spec.box.within(whole)] = part
    return files, {"policy_version": trainer.policy_version}


def load_training_state(
    trainer: Trainer | Critic, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> None:
    """Puts what `training_state` gave, in any layout, into `trainer`, bit for bit. Raises StateMismatch."""
    weights, specs, saved = trainer.sharding.weights, trainer.sharding.specs, tensors["model"]
    names = set[str]().union(*trainer.mesh.exchange(set(specs)))
    if saved.keys() != names or any(tuple(saved[name].shape) != spec.global_shape for name, spec in specs.items()):
        raise StateMismatch("the checkpoint holds another model than model.path; use the model it was made from")
    own = {name: spec.box.within(Box.whole(spec.global_shape)) for name, spec in specs.items()}
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[name][own[name]])
    trainer.optimizer.state.clear()
    for key, value in tensors["optimizer"].items():
        name, _, moment = key.rpartition(":")
        if name in weights:
            part = value[own[name]] if value.ndim else value
            # A copy, as a loaded tensor is a window into its file. Fused AdamW keeps its step count on the device, too.
            trainer.optimizer.state[weights[name]][moment] = part.to(weights[name].device, copy=True)
    trainer.policy_version = state["policy_version"]
