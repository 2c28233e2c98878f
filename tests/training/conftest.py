"""Tiny models, trainers and random scored groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.schema import TrainerConfig
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup
from tests.distributed.ranks import Workers, num_ranks, rendezvous, results
from tests.training.layouts import rank

SHAPE: dict[str, Any] = {
    "family": "qwen3",
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "vocab_size": 41,
    "max_position_embeddings": 128,
    "tie_embeddings": True,
}
MakeModel = Callable[..., Transformer]
MakeTrainer = Callable[..., Trainer]
MakeGroups = Callable[..., list[RolloutGroup]]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    def make(dtype: torch.dtype = torch.float32, **shape: Any) -> Transformer:
        return new_model(ModelShape(**SHAPE | shape), seed=5, std=0.15).to(dtype)

    return make


@pytest.fixture(scope="session")
def make_trainer(make_model: MakeModel) -> MakeTrainer:
    def make(dtype: torch.dtype = torch.float32, shape: dict[str, Any] | None = None, **config: Any) -> Trainer:
        settings = TrainerConfig(**{"learning_rate": 1e-3, "max_grad_norm": 1e9} | config)
        return Trainer(
            make_model(dtype, **shape or {}), settings, Objective(loss=Aipo(), advantage=GroupMean(), temperature=0.7)
        )

    return make


@pytest.fixture(scope="session")
def make_groups() -> MakeGroups:
    def make(
        lengths: Sequence[Sequence[int]] = ((5, 1, 9), (3, 3), (1, 7, 2, 4)),
        seed: int = 0,
        outcome: Outcome = Outcome.SCORE,
        reward: Callable[[int], float] = lambda index: float(index**2),
        first_id: int = 0,
    ) -> list[RolloutGroup]:
        """Groups whose responses have `lengths` tokens, after prompts of 3, 4, ... tokens; no advantage is 0."""
        rng = np.random.default_rng(seed)
        groups = list[RolloutGroup]()
        for group_id, responses in enumerate(lengths, first_id):
            rollouts = tuple(
                Rollout(
                    group_id=group_id,
                    index=index,
                    columns={
                        "token_ids": rng.integers(0, SHAPE["vocab_size"], length).astype(np.int32),
                        "behavior_logprobs": (-rng.random(length) * 5).astype(np.float32),
                        "policy_versions": np.zeros(length, np.int32),
                    },
                    finish_reason=FinishReason.STOP,
                )
                for index, length in enumerate(responses)
            )
            prompt_ids = rng.integers(0, SHAPE["vocab_size"], 3 + group_id).astype(np.int32)
            groups.append(
                RolloutGroup(
                    group_id=group_id,
                    prompt=Prompt(prompt_id=f"p-{group_id}", text="", token_ids_T=prompt_ids, answer=""),
                    rollouts=rollouts,
                    results=tuple(RewardResult(outcome=outcome, value=reward(n)) for n in range(len(rollouts))),
                    responses=tuple("" for _ in rollouts),
                )
            )
        return groups

    return make


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture
def run(workers: Workers):
    def run(sizes: dict[str, int], *arguments: Any, function: Callable[..., Any] = rank) -> list[Any]:
        with rendezvous() as where, workers.take(num_ranks(sizes)) as ranks:
            for number, worker in enumerate(ranks):
                worker.start(function, where, number, sizes, *arguments)
            found = results(ranks)
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    return run
