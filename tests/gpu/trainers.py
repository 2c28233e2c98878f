"""What training asks of a pretended GPU, beside the same on the CPU. Runs where `guard.begin` has been called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.algorithms.advantages.gae import Gae
from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.trainer import LoraConfig, TrainerConfig
from llamarl.models.hf import EMBEDDING, new_model
from llamarl.models.lora import add_adapters
from llamarl.models.scalar import HEAD, ScalarModel
from llamarl.models.shape import ModelShape
from llamarl.training.critic import Critic
from llamarl.training.optimization import Optimization, finished
from llamarl.training.trainer import Trainer
from llamarl.types import SampleGroup, TrainSample
from tests.gpu.engines import SIZES
from tests.gpu.pretend import Ledger, ledger, values_of


@dataclass
class Stepped:
    """Two steps on the CPU, and on the pretended GPU."""

    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    apart: float = 0.0
    """Norm of the difference of the weights' changes, over the norm of their change."""
    step: Ledger = field(default_factory=Ledger)
    """The second."""
    num_microbatches: int = 0


def train(what: str, family: str, config: dict[str, Any]) -> Stepped:
    """
    Args:
        what: `trainer` or `critic`.
    """
    changes = config | ({"lora": LoraConfig(rank=4)} if "lora" in config else {})
    settings = TrainerConfig(learning_rate=1e-3, microbatch_tokens=40, **changes)
    found, ends = Stepped(), list[dict[str, Tensor]]()
    shape = ModelShape(**SIZES, family=family, tie_embeddings=family == "llama")
    on = list[list[tuple[float, float]]]()
    for device in ("cpu", "cuda:0"):
        optimization = _optimization(what, shape, settings, torch.device(device))
        before = {name: values_of(weight.detach()).clone() for name, weight in optimization.sharding.weights.items()}
        updates = list[tuple[float, float]]()
        for _ in range(2):
            with ledger() as found.step:
                update = finished(optimization.update(_groups(4), 10))
            updates.append((update.loss, update.grad_norm))
        on.append(updates)
        ends.append({
            name: values_of(weight.detach()) - before[name] for name, weight in optimization.sharding.weights.items()
        })  # fmt: skip
    found.losses = [(cpu[0], gpu[0]) for cpu, gpu in zip(*on, strict=True)]
    found.norms = [(cpu[1], gpu[1]) for cpu, gpu in zip(*on, strict=True)]
    cpu, gpu = (torch.cat([change.flatten() for change in end.values()]) for end in ends)
    found.apart = float((cpu - gpu).norm() / cpu.norm())
    return found


def _optimization(what: str, shape: ModelShape, settings: TrainerConfig, device: torch.device) -> Optimization[Any]:
    model = new_model(shape, 3, 0.1)
    if what == "critic":
        scalar = ScalarModel(shape)
        weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
        scalar.load_state_dict(weights | {HEAD: weights[EMBEDDING][:1]})
        return Critic(scalar, settings, 0.2, Gae(), device=device)
    if settings.lora:
        add_adapters(model, settings.lora, 0, getattr(torch, settings.dtype))
    return Trainer(model, settings, Aipo(), GroupMean(), 0.8, device=device)


def _groups(num: int) -> list[SampleGroup]:
    rng = np.random.default_rng(2)

    def sample(length: int) -> TrainSample:
        return TrainSample(
            columns={
                "token_ids": rng.integers(0, SIZES["vocab_size"], length).astype(np.int32),
                "behavior_logprobs": (-rng.random(length)).astype(np.float32),
                "policy_versions": np.zeros(length, np.int32),
                "advantages": np.full(length, rng.normal(), np.float32),
                "loss_mask": np.ones(length, bool),
                "values": rng.normal(size=length).astype(np.float32),
            },
        )

    return [
        SampleGroup(
            prompt_token_ids_T=rng.integers(0, SIZES["vocab_size"], 5 + group).astype(np.int32),
            samples=tuple(sample(length) for length in (4, 9, 7)),
        )
        for group in range(num)
    ]
