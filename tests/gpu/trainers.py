"""What training asks of a pretended GPU, beside the same on the CPU. Runs where `guard.begin` has been called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from llamarl.algorithms.advantages.gae import Gae
from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.roles import LoraConfig, TrainerConfig
from llamarl.models.hf import EMBEDDING, new_model
from llamarl.models.lora import add_adapters
from llamarl.models.scalar import ScalarModel
from llamarl.models.shape import ModelShape
from llamarl.models.tensors import SCORE
from llamarl.models.transformer import RMSNorm
from llamarl.training import policy
from llamarl.training.critic import Critic, ValueObjective
from llamarl.training.optimization import Optimization, finished
from llamarl.training.policy import target_logprobs
from llamarl.training.preflight import example_groups
from llamarl.training.trainer import Objective, Trainer
from tests.gpu.engines import MIXTURES, SIZES
from tests.gpu.pretend import GPU, Ledger, ledger, values_of


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
    shape = ModelShape(**SIZES, family=family, tie_embeddings=family == "llama", moe=MIXTURES.get(family))
    on = list[list[tuple[float, float]]]()
    for device in ("cpu", "cuda:0"):
        optimization = _optimization(what, shape, settings, torch.device(device))
        before = {name: values_of(weight.detach()).clone() for name, weight in optimization.sharding.weights.items()}
        updates = list[tuple[float, float]]()
        for _ in range(2):
            with ledger() as found.step:
                update = finished(optimization.update(example_groups(4, SIZES["vocab_size"]), 10))
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
        scalar.load_state_dict(weights | {SCORE: weights[EMBEDDING][:1]})
        return Critic(scalar, settings, ValueObjective(clip=0.2, advantage=Gae()), device=device)
    if settings.lora:
        add_adapters(model, settings.lora, 0, getattr(torch, settings.dtype))
    return Trainer(model, settings, Objective(loss=Aipo(), advantage=GroupMean(), temperature=0.8), device=device)


@dataclass
class Head:
    """Log-probs of targets, from bfloat16 factors."""

    apart: float = 0.0
    """Largest difference to float64 with the same factors, in nats."""
    gradient_apart: float = 0.0
    """Relative, of hidden states."""
    factors: set[str] = field(default_factory=set)
    """Types that a training step multiplies."""


def head() -> Head:
    generator = torch.Generator().manual_seed(0)
    hidden_R_D, head_V_D = (torch.randn(n, 64, generator=generator).bfloat16() for n in (40, 500))
    targets_R, results = torch.randint(500, (40,), generator=generator), list[tuple[Tensor, Tensor]]()
    for device, dtype in (("cpu", torch.float64), (GPU, torch.bfloat16)):
        inputs_R_D = hidden_R_D.to(device, dtype).requires_grad_()
        weights_V_D = head_V_D.to(device, dtype)
        logprobs_R = target_logprobs(inputs_R_D, weights_V_D, targets_R.to(device), 1.0)
        logprobs_R.sum().backward()
        assert inputs_R_D.grad is not None
        results.append((values_of(logprobs_R.detach()), values_of(inputs_R_D.grad)))
    (exact_R, exact_grad), (found_R, found_grad) = results
    found = Head(
        apart=float((found_R - exact_R).abs().max()),
        gradient_apart=float((found_grad - exact_grad).norm() / exact_grad.norm()),
    )

    def look(hidden_O_D: Tensor, head_V_D: Tensor, *arguments: Any, rounds: bool) -> Tensor:
        assert not rounds, "only CPUs round inside of the product"
        found.factors.add(f"{hidden_O_D.dtype} {head_V_D.dtype}")
        return target_logprobs(hidden_O_D, head_V_D, *arguments)

    shape = ModelShape(**SIZES, family="llama", tie_embeddings=True)
    trainer = _optimization("trainer", shape, TrainerConfig(dtype="bfloat16", microbatch_tokens=40), GPU)
    with patch.object(policy, "target_logprobs", look):
        finished(trainer.accumulate(example_groups(1, SIZES["vocab_size"]), 1))
    return found


def norm_of_heads() -> float:
    """Largest output of a norm whose weight bfloat16 would round to 1, of ones in bfloat16, less 1."""
    norm = RMSNorm(8, 1e-6)
    torch.nn.init.constant_(norm.weight, 1 + 2**-9)
    with torch.autocast("cuda", torch.bfloat16):
        return float(norm.to(GPU)(torch.ones(3, 8, dtype=torch.bfloat16, device=GPU)).max()) - 1
