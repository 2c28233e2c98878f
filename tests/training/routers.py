"""One rank of a trainer of a mixture that reads a folder, and what its routers compute with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.roles import TrainerConfig
from llamarl.distributed.links import Rendezvous
from llamarl.distributed.mesh import ALONE, CPU
from llamarl.models.experts import Router
from llamarl.models.hf import open_model
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import RolloutGroup
from tests.distributed.ranks import join
from tests.training.layouts import SEQUENCES, parts


@dataclass
class Routed:
    """What a rank has before and after a step, and what its routers saw."""

    before: dict[str, Any]
    """Whole shape, box and part by name."""
    after: dict[str, Any]
    seen: set[tuple[torch.dtype, torch.dtype]]
    """Types of weight and input."""
    scores: list[np.ndarray]
    """Before it."""
    load: dict[str, float]
    """Metrics of it."""
    rows: list[np.ndarray]
    """Times that each expert was chosen in it, by layer, int64 [E]."""
    grad_norm: float


def routed(
    where: Rendezvous | None,
    number: int,
    sizes: Mapping[str, int],
    folder: Path,
    batch: list[RolloutGroup],
    config: TrainerConfig,
) -> Routed:
    """A step, in bfloat16 where `config` says so."""
    mesh = ALONE if where is None else join(where, number, sizes)
    with nullcontext() if where is None else closing(mesh):
        model, weights = open_model(folder)
        trainer, seen = (
            Trainer(
                model,
                config,
                Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0),
                mesh,
                CPU,
                read=weights.read,
            ),
            set(),
        )

        def see(router: Router, given: tuple[Tensor, ...]) -> None:
            seen.add((router.weight.dtype, torch.promote_types(given[0].dtype, torch.float32)))

        for router in (one for one in trainer.model.modules() if isinstance(one, Router)):
            router.register_forward_pre_hook(see)
        before, scores = parts(trainer), trainer.score(SEQUENCES, half=True)
        gates = [one for one in trainer.model.modules() if isinstance(one, Router)]
        rows = [np.zeros(one.moe.num_experts, np.int64) for one in gates]

        def count(router: Router, _: object, answer: tuple[Tensor, ...]) -> None:
            np.add.at(rows[gates.index(router)], answer[0].flatten().numpy(), 1)

        for router in gates:
            router.register_forward_hook(count)
        found = trainer.step(batch)
        load = {name: value for name, value in found.metrics.items() if "expert" in name}
        return Routed(before, parts(trainer), seen, scores, load, rows, found.update.grad_norm)
