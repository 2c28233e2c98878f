"""The loss that keeps the experts of a mixture equally busy, in a warm start alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llamarl.config import SftConfig
from llamarl.config.roles import TrainerConfig
from llamarl.models.attention import causal_attend
from llamarl.models.folder import load_shape
from llamarl.models.transformer import Transformer
from llamarl.parts.sft.supervised import Loads, Supervised
from llamarl.parts.sft.warm_start import warm_start
from tests.generation.mixtures import mixture
from tests.nightly import nightly
from tests.parts.sft.supervised import make_documents

IDS = torch.arange(40) * 7 % 130


def forward(model: Transformer) -> torch.Tensor:
    return model(IDS, torch.arange(len(IDS)), causal_attend([len(IDS)]))


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_it_is_the_formula(name: str) -> None:
    """E * sum of f * P, by tokens, for each layer."""
    model, expected, moe = mixture(name).double(), 0.0, mixture(name).shape.moe
    loads, given = Loads(model), list[torch.Tensor]()
    for layer in moe.sparse_layers:
        router = model.model.layers[layer].mlp.gate
        router.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    forward(model)
    for layer, x_N_D in zip(moe.sparse_layers, [*given], strict=True):
        router = model.model.layers[layer].mlp.gate
        chosen, likely = torch.zeros(moe.num_experts), torch.zeros(moe.num_experts, dtype=torch.float64)
        for x_D in x_N_D:
            scores_E = router.weight @ x_D
            scores_E = scores_E.sigmoid() if moe.scoring == "sigmoid" else scores_E.softmax(0)
            likely += scores_E / scores_E.sum() / len(x_N_D)
            for expert in router(x_D[None])[0][0].tolist():
                chosen[expert] += 1 / len(x_N_D) / moe.experts_per_token
        expected += float(moe.num_experts * (chosen * likely).sum().detach())
    loads._found = loads._found[: len(moe.sparse_layers)]
    assert float(loads.taken().detach()) == pytest.approx(expected, rel=1e-6)
    assert expected > len(moe.sparse_layers), "1 for each layer would be even"


def test_it_makes_loads_even() -> None:
    """And nothing is left of one forward for the next."""
    model = mixture("qwen3_moe")
    loads, routers = Loads(model), [layer.mlp.gate.weight for layer in model.model.layers]
    for weight in routers:
        weight.data[0] += 1.0
    optimizer, seen = torch.optim.SGD(routers, 0.5), list[float]()
    for _ in range(40):
        forward(model)
        loss = loads.taken()
        seen.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert seen[0] > 8 and seen[-1] < 3.3 and not loads._found


def test_it_is_a_share_of_the_loss_of_a_warm_start_alone() -> None:
    documents, losses = make_documents([(5, 9), (3, 4)]), list[float]()
    for balance in (0.0, 0.01, 0.02):
        supervised = Supervised(mixture("qwen3_moe"), TrainerConfig(), balance=balance)
        result = supervised.step(documents)
        losses.append(result.metrics["loss"])
    once, twice = losses[1] - losses[0], losses[2] - losses[0]
    assert 0.03 < once < 0.06, "each of three layers is 1 at least"
    assert twice == pytest.approx(2 * once, rel=1e-3)


@nightly("trains a mixture; by day loads become even")
def test_a_mixture_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"name": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "family": experts}
    source = {"name": "running_total", "count": 200, "first": 100, "error_rate": 0.65}
    config = SftConfig.model_validate({"output": str(tmp_path / "base"), "source": source, "shape": sizes, "steps": 30,
                                       "rows": 4, "threads": 1})  # fmt: skip
    losses = list[float]()
    folder = warm_start(config, lambda _, metrics: losses.append(metrics["loss"]))
    assert losses[-1] < losses[0] - 2
    shape = load_shape(folder)
    assert shape.moe is not None and (shape.moe.num_experts, shape.moe.normalized) == (8, False)
    assert json.loads((folder / "config.json").read_text())["num_experts"] == 8
    monkeypatch.setattr("llamarl.parts.sft.warm_start.BALANCE", 0.0)
    free = list[float]()
    warm_start(
        config.model_copy(update={"output": str(tmp_path / "free")}), lambda _, metrics: free.append(metrics["loss"])
    )
    assert 0.015 < losses[0] - free[0] < 0.1, "of each of two layers, 1 at least"
