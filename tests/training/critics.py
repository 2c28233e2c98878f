"""One rank of a critic in some layout, and the same computed by one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from llamarl.algorithms.advantages.gae import Gae
from llamarl.config.schema import TrainerConfig
from llamarl.distributed.links import Rendezvous
from llamarl.distributed.mesh import ALONE, RankMesh
from llamarl.models.hf import new_model
from llamarl.models.scalar import ScalarModel
from llamarl.models.shape import ModelShape
from llamarl.models.tensors import SCORE
from llamarl.training.critic import Critic, ValueObjective
from llamarl.training.result import NonFiniteStep, StepResult
from llamarl.types import RolloutGroup
from tests.distributed.ranks import join
from tests.training.layouts import Found, keep_parts, load, parts, save


def valued(critic: Critic, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The same groups, with what the critic says."""
    values = critic.values([(group.prompt, group.rollouts) for group in groups])
    return [
        replace(
            group,
            rollouts=tuple(
                replace(r, columns=r.columns | {"values": v}) for r, v in zip(group.rollouts, of_group, strict=True)
            ),
        )
        for group, of_group in zip(groups, values, strict=True)
    ]  # fmt: skip


def make_critic(mesh: RankMesh, shape: Mapping[str, Any], config: dict[str, Any] | None = None) -> Critic:
    """The same weights in every layout, the head's among them."""
    settings = TrainerConfig(**{"learning_rate": 1e-3, "max_grad_norm": 0.05, "microbatch_tokens": 30} | (config or {}))
    sizes = ModelShape(**{key: value for key, value in shape.items() if key != "dtype"})
    weights = new_model(replace(sizes, tie_embeddings=True), seed=5, std=0.15).state_dict()
    model = ScalarModel(sizes)
    model.load_state_dict(weights | {SCORE: weights["model.embed_tokens.weight"][:1]})
    return Critic(model, settings, ValueObjective(clip=0.2, advantage=Gae()), mesh=mesh)


def step(critic: Critic, groups: list[RolloutGroup], is_first: Callable[[], bool]) -> StepResult:
    """With values of the first group in between, which stay the same bits until the first update of all, or nearly so
    in a mixture, where bits of a row depend on the rows beside it."""
    is_same = np.array_equal if critic.module.transformer.shape.moe is None else partial(np.allclose, rtol=1e-5)
    pieces, one = critic.learn(groups), groups[0]
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value
        (again,) = critic.values([(one.prompt, one.rollouts)])
        if is_first():
            for before, after in zip(one.rollouts, again, strict=True):
                assert is_same(before.values_T, after)


def learn(
    mesh: RankMesh,
    shape: Mapping[str, Any],
    batches: Sequence[list[RolloutGroup]],
    config: dict[str, Any] | None = None,
    checkpoints: Path | None = None,
) -> Found:
    """Values each batch, learns from it, and values the first group again after every microbatch.

    Args:
        checkpoints: to begin with the newest, and to save one after the last batch.
    """
    critic = make_critic(mesh, shape, config)
    if checkpoints is not None:
        load(critic, checkpoints)
    found, seen = Found(), dict[str, Tensor]()

    def keep(*_: object) -> None:
        for name, weight in critic.sharding.weights.items():
            seen.setdefault(name, weight.grad.clone())

    critic.optimizer.register_step_pre_hook(keep)
    for batch in batches:
        groups = valued(critic, batch)
        found.scores.append([one.values_T for group in groups for one in group.rollouts])
        try:
            result = step(critic, groups, lambda: not seen)
        except NonFiniteStep as error:
            found.error = str(error)
            break
        found.metrics.append(result.metrics)
        found.skipped.append(result.skipped)
    keep_parts(found, critic, seen)
    if checkpoints is not None:
        found.state = save(critic, checkpoints) if batches else parts(critic)
    return found


def critic_rank(where: Rendezvous, number: int, sizes: Mapping[str, int], *arguments: Any) -> Found:
    """`learn` in a process of its own."""
    mesh = join(where, number, sizes)
    try:
        return learn(mesh, *arguments)
    finally:
        mesh.close()


def critic_alone(*arguments: Any) -> Found:
    """The same by one process."""
    return learn(ALONE, *arguments)
