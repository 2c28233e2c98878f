"""Trainer state to and from a checkpoint: weights, optimizer moments, random numbers, completed steps."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.sharding.box import Box
from llamarl.training.optimization import Optimization
from llamarl.training.optimizer import in_place, read_state


class StateMismatch(ValueError):
    """The saved state belongs to another model."""


def training_state(trainer: Optimization[Any]) -> dict[str, Any]:
    """Returns JSON that is saved next to `Optimization.shards`. Ranks are seeded alike, so one rank's random numbers
    are everyone's."""
    numbers = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    return {"policy_version": trainer.policy_version, "rng": numbers}


def load_training_state(
    trainer: Optimization[Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str, Box], Tensor],
    state: Mapping[str, Any],
) -> None:
    """Loads shards and state that ranks in any layout saved into `trainer`, bit for bit. All ranks call it.

    Args:
        shapes: shapes of whole tensors, by name: of all tensors, or of the tensors that this rank held.
        read: returns a part of a tensor.

    Raises:
        StateMismatch: the state belongs to another model. Nothing has changed.
    """
    weights, specs = trainer.sharding.held, trainer.sharding.specs
    needed, available = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    needed_here = {name: spec.global_shape for name, spec in specs.items()}
    saved_here = {name: shapes[name] for name in shapes if ":" not in name}
    for needed_by_rank, saved_by_rank in trainer.mesh.exchange((needed_here, saved_here)):
        needed |= needed_by_rank
        available |= saved_by_rank
    if needed != available:
        raise StateMismatch(
            "the checkpoint holds other weights than model.path with trainer.lora trains; use the model.path and the "
            "trainer.lora that it was made with"
        )
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(read(name, specs[name].box))
    optimizer, held = trainer.optimizer, defaultdict[str, list[str]](list)
    optimizer.state.clear()
    for key in shapes:
        name, is_moment, moment = key.partition(":")
        if is_moment and name in weights:
            held[name].append(moment)
    for name, moments in held.items():
        weight, of_weight = weights[name], partial(_read_moment, read, name)
        for moment, value in read_state(moments, specs[name], of_weight, optimizer).items():
            optimizer.state[weight][moment] = in_place(value, weight, moment, optimizer)
    torch.set_rng_state(torch.from_numpy(np.frombuffer(base64.b64decode(state["rng"]), np.uint8).copy()))
    trainer.policy_version = state["policy_version"]


def _read_moment(read: Callable[[str, Box], Tensor], name: str, moment: str, box: Box) -> Tensor:
    return read(f"{name}:{moment}", box)
