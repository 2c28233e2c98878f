"""One rank of supervised training in some layout, and the same computed by one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from llamarl.config.roles import TrainerConfig
from llamarl.distributed.links import Rendezvous
from llamarl.distributed.mesh import RankMesh
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape
from llamarl.parts.sft.supervised import Supervised
from llamarl.types import SampleGroup, TrainSample
from tests.distributed.ranks import join
from tests.training.layouts import QWEN3, Found, keep_parts


def make_documents(lengths: Sequence[tuple[int, int]]) -> list[SampleGroup]:
    """Of so many tokens of prompt and response."""
    rng, found = np.random.default_rng(0), list[SampleGroup]()
    for prompt, response in lengths:
        columns = {
            "token_ids": rng.integers(0, 41, response).astype(np.int32), "loss_mask": np.ones(response, bool)
        }  # fmt: skip
        prompt_T = rng.integers(0, 41, prompt).astype(np.int32)
        found.append(SampleGroup(prompt_token_ids_T=prompt_T, samples=(TrainSample(columns=columns),)))
    return found


def learn(mesh: RankMesh, documents: Sequence[SampleGroup]) -> Found:
    """Two supervised steps."""
    config = TrainerConfig(learning_rate=1e-3, max_grad_norm=0.05, microbatch_tokens=30)
    model = new_model(ModelShape(**{key: value for key, value in QWEN3.items() if key != "dtype"}), seed=5, std=0.15)
    supervised, found, seen = Supervised(model, config, mesh), Found(), dict[str, Tensor]()

    def keep(*_: object) -> None:
        for name, weight in supervised.sharding.weights.items():
            assert weight.grad is not None
            seen.setdefault(name, weight.grad.clone())

    supervised.optimizer.register_step_pre_hook(keep)
    for part in (documents, documents[1:]):
        result = supervised.step(part)
        found.metrics.append(result.metrics)
        found.skipped.append(result.skipped)
    keep_parts(found, supervised, seen)
    return found


def learn_rank(where: Rendezvous, number: int, sizes: Mapping[str, int], documents: Sequence[SampleGroup]) -> Found:
    """`learn` in a process of its own."""
    mesh = join(where, number, sizes)
    try:
        return learn(mesh, documents)
    finally:
        mesh.close()
