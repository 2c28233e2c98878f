"""The preflight's comparison: one gradient that is not finite is enough."""

from __future__ import annotations

import pytest
import torch

from llamarl.config import ConfigError
from llamarl.distributed.mesh import ALONE
from llamarl.models.shape import ModelShape
from llamarl.training.preflight import check_layout
from llamarl.training.trainer import Trainer
from tests.training.conftest import SHAPE

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["", "model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"])
def test_a_gradient_that_is_nan_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Wherever it is in the order of comparison."""
    accumulate, trainers = Trainer.accumulate, list[Trainer]()

    def poisoned(trainer: Trainer, *arguments: object) -> object:
        logged = accumulate(trainer, *arguments)
        trainers.append(trainer)
        if name and len(trainers) == 2:
            trainer.sharding.weights[name].grad[0, 0] = torch.nan
        return logged

    monkeypatch.setattr(Trainer, "accumulate", poisoned)
    shape = ModelShape(**SHAPE)
    if not name:
        assert check_layout(shape, ALONE, CPU).startswith("preflight of fsdp 1")
        return
    with pytest.raises(ConfigError, match=f"{name} differs by nan"):
        check_layout(shape, ALONE, CPU)
