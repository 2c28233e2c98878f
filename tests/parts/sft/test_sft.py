"""The supervised objective: closed forms, and plain cross-entropy without packing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llamarl.config import ConfigError, RunConfig
from llamarl.config.roles import TrainerConfig
from llamarl.models.transformer import Transformer
from llamarl.parts.sft.run import load_documents
from llamarl.parts.sft.supervised import Supervised
from llamarl.training.result import NonFiniteStep
from tests.end_to_end.tiny import make_model as saved_model
from tests.parts.sft.supervised import make_documents
from tests.training.conftest import MakeModel
from tests.training.test_attention import plain_attend

DOCUMENTS = make_documents(((3, 4), (2, 9), (5, 1), (1, 2), (4, 8)))


def supervised(model: Transformer, **config: object) -> Supervised:
    settings = {"learning_rate": 1e-3, "max_grad_norm": 1e9, "microbatch_tokens": 15} | config
    return Supervised(model, TrainerConfig.model_validate(settings))


def test_a_model_without_an_opinion_loses_the_entropy_of_its_vocabulary(make_model: MakeModel) -> None:
    model = make_model(torch.float64)
    torch.nn.init.zeros_(model.model.embed_tokens.weight)
    metrics = supervised(model).step(DOCUMENTS).metrics
    assert metrics["loss"] == pytest.approx(math.log(41), rel=1e-14)
    assert metrics["num_loss_tokens"] == 4 + 9 + 1 + 2 + 8


def test_loss_and_gradient_are_those_of_plain_cross_entropy(make_model: MakeModel) -> None:
    """Document by document, on responses without the first two's masked tokens, over the global count."""
    model, documents = make_model(torch.float64), list(DOCUMENTS)
    for index in range(2):
        documents[index].samples[0].loss_mask_T[:3] = False
    losses, count = list[torch.Tensor](), 0
    for one in documents:
        sample, num_prompt = one.samples[0], len(one.prompt_token_ids_T)
        ids_T = torch.from_numpy(np.concatenate((one.prompt_token_ids_T, sample.token_ids_T))).long()
        logits_T_V = model.logits(model(ids_T, torch.arange(len(ids_T)), plain_attend))
        of_token_T = F.cross_entropy(logits_T_V[num_prompt - 1 : -1], ids_T[num_prompt:], reduction="none")
        losses.append(of_token_T[torch.from_numpy(sample.loss_mask_T)].sum())
        count += int(sample.loss_mask_T.sum())
    loss = torch.stack(losses).sum() / count
    names = [name for name, _ in model.named_parameters()]
    expected = torch.autograd.grad(loss, [*model.parameters()])

    trained, found = supervised(model), dict[str, torch.Tensor]()
    trained.optimizer.register_step_pre_hook(
        lambda *_: found.update({name: weight.grad.clone() for name, weight in trained.sharding.weights.items()})
    )
    metrics = trained.step(documents).metrics
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert metrics["num_loss_tokens"] == count == 24 - 6
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    norm = torch.stack([gradient.norm() for gradient in expected]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-9)


def test_a_step_that_is_not_finite_says_where(make_model: MakeModel) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.inf)
    with pytest.raises(NonFiniteStep, match=r"step 0: loss nan.* from microbatch 1 of \d: model.norm.weight holds inf"):
        supervised(model).step(DOCUMENTS)
    assert supervised(model, on_nonfinite="skip").step(DOCUMENTS).skipped


def test_what_the_trainer_of_a_run_refuses_is_refused_here(tmp_path: Path) -> None:
    model = {"path": str(saved_model(tmp_path / "model"))}
    for trainer, says in (
        ({"moments_on": "host"}, "has no effect"),
        ({"moments": "8bit", "parallelism": {"tp": 2}}, "share a scale"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_documents(
                RunConfig.model_validate({"model": model, "data": {"train": "d"}, "trainer": trainer}), print
            )
