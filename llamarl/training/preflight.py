"""Checks before a run that a tiny model in the configured layout has the same gradients as in one process.

A wrong layout seldom fails. It trains with an exact loss and wrong gradients.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from llamarl.algorithms.advantages.gae import Gae
from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config import ConfigError
from llamarl.config.roles import LoraConfig, TrainerConfig
from llamarl.distributed.mesh import RankMesh
from llamarl.models.hf import EMBEDDING, new_model
from llamarl.models.lora import add_adapters
from llamarl.models.scalar import ScalarModel
from llamarl.models.shape import ModelShape
from llamarl.models.tensors import SCORE
from llamarl.sharding.box import Box
from llamarl.training.critic import Critic, ValueObjective
from llamarl.training.optimization import finished
from llamarl.training.parallel import Sharding
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import SampleGroup, TrainSample

TOLERANCE = 1e-3
"""Relative. float32 gives 1e-6, a wrong layout 0.5."""
SEED = 17
CONFIG = TrainerConfig(microbatch_tokens=24)


def check_layout(shape: ModelShape, mesh: RankMesh, device: torch.device, lora: LoraConfig | None = None) -> str:
    """Returns a sentence about the difference between gradients in this layout and in one process. All ranks call it
    together.

    Args:
        shape: shape of the model to train. The tiny model is of its family.
        lora: its adapters, which the tiny model gets too.

    Raises:
        ConfigError: the gradient of a weight differs.
    """
    start_s, tiny = time.monotonic(), _tiny(shape, mesh)
    model = new_model(tiny, SEED, 0.2).to(device)
    if lora:
        add_adapters(model, lora, SEED)
        model.initialize(SEED, 0.2)  # otherwise the gradients of A are 0
    trainers = [
        Trainer(copy.deepcopy(model), CONFIG, Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0)),
        Trainer(model, CONFIG, Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0), mesh, device),
    ]
    groups = example_groups(mesh.fsdp.size + 1, tiny.vocab_size)
    losses = [finished(trainer.accumulate(groups, 1))[0]["loss"] for trainer in trainers]
    return _compared("trainer", losses, [trainer.sharding for trainer in trainers], mesh, start_s)


def check_critic_layout(shape: ModelShape, mesh: RankMesh, device: torch.device) -> str:
    """Does the same for a value model."""
    start_s, tiny = time.monotonic(), _tiny(shape, mesh)
    weights = new_model(replace(tiny, tie_embeddings=True), SEED, 0.2).state_dict()
    with torch.device("meta"):
        model = ScalarModel(tiny)
    model.load_state_dict(weights | {SCORE: weights[EMBEDDING][:1]}, assign=True)
    critics = [
        Critic(copy.deepcopy(model).to(device), CONFIG, ValueObjective(clip=1.0, advantage=Gae())),
        Critic(model, CONFIG, ValueObjective(clip=1.0, advantage=Gae()), mesh=mesh, device=device),
    ]
    groups = example_groups(mesh.fsdp.size + 1, tiny.vocab_size)
    losses = [finished(critic.accumulate(groups, 1))[0]["loss"] for critic in critics]
    return _compared("critic", losses, [critic.sharding for critic in critics], mesh, start_s)


def _tiny(shape: ModelShape, mesh: RankMesh) -> ModelShape:
    tp, moe, num_layers, size = mesh.tp.size, shape.moe, max(2, mesh.pp.size), 8
    if moe is not None:
        sparse = [layer for layer in range(num_layers) if shape.is_sparse(layer)] or [num_layers - 1]
        shared = 8 * tp if moe.shared_size else 0
        size *= 1 if mesh.expert_shards is None else mesh.expert_shards.size()
        moe = replace(moe, expert_size=size * tp, shared_size=shared, sparse_layers=tuple(sparse))
    delta = shape.delta
    if delta is not None:
        with_delta = tuple(range(0, num_layers, 2))  # every second layer has attention
        delta = replace(delta, layers=with_delta, num_key_heads=tp, num_value_heads=2 * tp, key_dim=4, value_dim=6)
    return replace(
        shape, hidden_size=2 * size, num_layers=num_layers, num_heads=2 * tp, num_kv_heads=tp, head_dim=8, moe=moe,
        delta=delta,
        intermediate_size=8 * tp, vocab_size=16 * tp, max_position_embeddings=64, rope_scaling=None,
        unused_ids=(),
    )  # fmt: skip


def _compared(
    executor: str, losses: Sequence[float], shardings: Sequence[Sharding], mesh: RankMesh, start_s: float
) -> str:
    """Returns text about the difference of loss and gradients from those of one process. Raises ConfigError: it is too
    large."""
    worst, where = abs(losses[1] - losses[0]) / abs(losses[0]), "the loss"
    expected, actual = (sharding.weights for sharding in shardings)
    for name in actual:
        spec = shardings[1].specs[name]
        whole, part = expected[name].grad, actual[name].grad
        assert whole is not None, name
        assert part is not None, name
        difference = (part - whole[spec.box.within(Box.whole(spec.global_shape))]).norm() / whole.norm()
        if not float(difference) <= worst and not math.isnan(worst):
            worst, where = float(difference), name
    worst, where = max(mesh.exchange((worst, where)), key=lambda pair: (pair[0] != pair[0], pair[0]))
    axes = ("fsdp", "tp", "pp", "cp", *(["ep"] if mesh.ep.size > 1 else []))
    layout = ", ".join(f"{axis} {getattr(mesh, axis).size}" for axis in axes)
    if not worst <= TOLERANCE:
        raise ConfigError(
            f"{executor}.parallelism ({layout}) computes another result here than one process: {where} differs by "
            f"{worst:.1%}; use another layout, or another version of torch than {torch.__version__}"
        )
    took_s = time.monotonic() - start_s
    return f"preflight of {layout}: {where} differs from one process by {worst:.1g}, checked in {took_s:.1f} s"


def example_groups(num: int, vocab_size: int) -> list[SampleGroup]:
    """Returns groups of uneven sizes, with tokens from the whole vocabulary."""
    rng = np.random.default_rng(SEED)

    def sample(length: int) -> TrainSample:
        return TrainSample(
            columns={
                "token_ids": rng.integers(0, vocab_size, length).astype(np.int32),
                "behavior_logprobs": (-rng.random(length)).astype(np.float32),
                "policy_versions": np.zeros(length, np.int32),
                "advantages": np.full(length, rng.normal(), np.float32),
                "loss_mask": np.ones(length, bool),
                "values": rng.normal(size=length).astype(np.float32),
            },
        )

    return [
        SampleGroup(
            prompt_token_ids_T=rng.integers(0, vocab_size, 3 + index % 4).astype(np.int32),
            samples=tuple(sample(length) for length in (1, 5, 9 + index % 3)),
        )
        for index in range(num)
    ]
