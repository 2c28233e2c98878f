"""Packed groups with a shared prompt against every sequence on its own: log-probs and gradients of all weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.kernels import train_attention
from llamarl.models.transformer import Transformer
from llamarl.training.packing import pack, to_sample_group
from llamarl.training.trainer import Trainer
from llamarl.types import RolloutGroup
from tests.nightly import NIGHTLY

LAYOUTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "one": ((4,),),
    "one token": ((1,),),
    "all single tokens": ((1, 1, 1), (1,)),
    "single tokens among others": ((5, 1, 9), (3, 3), (1, 7, 2, 4)),
    "single token last": ((6, 1), (2, 1)),
    "single token first": ((1, 6), (1, 2)),
    "equal": ((4, 4, 4), (4, 4)),
    "very unequal": ((30, 2, 1, 2),),
}


def random_layouts(count: int) -> list[tuple[tuple[int, ...], ...]]:
    rng = np.random.default_rng(11)
    return [
        tuple(tuple(rng.integers(1, 12, rng.integers(1, 6)).tolist()) for _ in range(rng.integers(1, 5)))
        for _ in range(count)
    ]


def plain_attend(_layer: int, q_T_H_K: Tensor, k_T_J_K: Tensor, v_T_J_K: Tensor) -> Tensor:
    """Of one document, by torch alone."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_T_H_K, k_T_J_K, v_T_J_K))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def naive_logprobs(model: Transformer, groups: Sequence[RolloutGroup], temperature: float) -> Tensor:
    """One full forward per rollout, all logits, log_softmax."""
    found = list[Tensor]()
    for group in groups:
        for rollout in group.rollouts:
            tokens_T = torch.from_numpy(np.concatenate((group.prompt.token_ids_T, rollout.token_ids_T))).long()
            hidden_T_D = model(tokens_T, torch.arange(len(tokens_T)), plain_attend)
            logprobs_T_V = (model.logits(hidden_T_D) / temperature).log_softmax(-1)
            begin = len(group.prompt.token_ids_T)
            rows = torch.arange(begin - 1, len(tokens_T) - 1)
            found.append(logprobs_T_V[rows, tokens_T[begin:]])
    return torch.cat(found)


def packed_logprobs(trainer: Trainer, groups: Sequence[RolloutGroup], microbatch_tokens: int) -> Tensor:
    samples = [to_sample_group(group, np.zeros(len(group.rollouts))) for group in groups]
    return torch.cat([trainer.logprobs(batch) for batch in pack(samples, microbatch_tokens)])


def gradients(logprobs_R: Tensor, model: Transformer) -> dict[str, Tensor]:
    weights_R = torch.randn(len(logprobs_R), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(logprobs_R @ weights_R.to(logprobs_R.dtype), parameters)
    return dict(zip(names, grads, strict=True))


def check_equal(trainer: Trainer, groups: list[RolloutGroup], microbatch_tokens: int, tolerance: float) -> None:
    packed_R = packed_logprobs(trainer, groups, microbatch_tokens)
    naive_R = naive_logprobs(trainer.model, groups, trainer.objective.temperature)
    torch.testing.assert_close(packed_R, naive_R, rtol=tolerance, atol=tolerance)
    packed, naive = gradients(packed_R, trainer.model), gradients(naive_R, trainer.model)
    for name, expected in naive.items():
        difference = (packed[name] - expected).norm() / expected.norm()
        assert difference < tolerance, f"gradient of {name} differs by {difference:.1e}"


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), *random_layouts(8 if NIGHTLY else 2)], ids=str)
def test_float64(make_trainer, make_groups, layout: tuple[tuple[int, ...], ...]) -> None:
    trainer, groups = make_trainer(torch.float64), make_groups(layout)
    check_equal(trainer, groups, microbatch_tokens=1000, tolerance=1e-11)
    check_equal(trainer, groups, microbatch_tokens=9, tolerance=1e-11)  # groups are cut and repeat their prompt


@pytest.mark.parametrize("layout", [*LAYOUTS.values()], ids=list(LAYOUTS))
def test_float32(make_trainer, make_groups, layout: tuple[tuple[int, ...], ...]) -> None:
    check_equal(make_trainer(), make_groups(layout), microbatch_tokens=1000, tolerance=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        {"family": "llama", "num_kv_heads": 1, "tie_embeddings": False},
        {"family": "qwen2", "num_kv_heads": 4},
    ],
    ids=["one kv head", "as many kv heads"],
)
def test_other_models(make_trainer, make_groups, shape: dict) -> None:
    check_equal(make_trainer(torch.float64, shape), make_groups(), microbatch_tokens=25, tolerance=1e-11)


def test_responses_do_not_see_each_other(make_trainer, make_groups) -> None:
    """Other tokens in one response leave the log-probs of its neighbors bitwise unchanged."""
    trainer, groups = make_trainer(), make_groups(((4, 6, 3),))
    before_R = packed_logprobs(trainer, groups, 1000)
    groups[0].rollouts[1].token_ids_T[:] = (groups[0].rollouts[1].token_ids_T + 7) % 41
    after_R = packed_logprobs(trainer, groups, 1000)
    neighbors = [*range(4), *range(10, 13)]
    assert torch.equal(before_R[neighbors], after_R[neighbors])
    assert not torch.isclose(before_R[4:10], after_R[4:10]).any()


def test_bfloat16_is_near(make_trainer, make_groups) -> None:
    groups = make_groups()
    exact_R = packed_logprobs(make_trainer(), groups, 1000)
    logprobs_R = packed_logprobs(_bfloat16(make_trainer()), groups, 1000)
    assert logprobs_R.dtype is torch.float32
    assert 0 < (logprobs_R - exact_R).abs().max() < 0.3


def _bfloat16(trainer: Trainer) -> Trainer:
    trainer.config = trainer.config.model_copy(update={"dtype": "bfloat16"})
    return trainer


@pytest.mark.skipif(train_attention.kernels().library is None, reason="no kernel")
def test_the_kernel_of_processors_serves_a_trainer(make_trainer, make_groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's gradient norm and log-probabilities are those of torch's own attention."""
    torch.set_num_threads(1)
    backward, calls = train_attention.backward, list[int]()
    monkeypatch.setattr(train_attention, "backward", lambda *given: calls.append(len(given[2])) or backward(*given))
    served = make_trainer().step(make_groups())
    assert len(calls) == 2, "once in each layer"
    monkeypatch.setattr(train_attention, "can_serve", lambda *given: False)
    torchs = make_trainer().step(make_groups())
    assert len(calls) == 2
    assert served.update.grad_norm == pytest.approx(torchs.update.grad_norm, rel=1e-5)
