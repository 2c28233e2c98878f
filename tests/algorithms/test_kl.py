"""Estimators of a divergence over a small vocabulary, where means and gradients are sums that can be written down.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.algorithms.kl import KlPenalty, estimate, penalty
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.algorithms.losses.gspo import Gspo
from llamarl.config import RunConfig
from llamarl.config.schema import ReferenceConfig
from tests.algorithms.test_losses import gradient, random_inputs

LOGITS_V = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64)
REFERENCE_V = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()


def policy(logits_V: Tensor) -> Tensor:
    return logits_V.log_softmax(0)


def kl(p_V: Tensor, q_V: Tensor) -> Tensor:
    return (p_V.exp() * (p_V - q_V)).sum()


def mean(estimator: str) -> float:
    p_V = policy(LOGITS_V)
    return float((p_V.exp() * estimate(p_V - REFERENCE_V, estimator)).sum())


def test_k1_and_k3_are_unbiased() -> None:
    truth = float(kl(policy(LOGITS_V), REFERENCE_V))
    assert mean("k1") == pytest.approx(truth, rel=1e-12)
    assert mean("k3") == pytest.approx(truth, rel=1e-12)
    assert mean("k2") == pytest.approx(truth, rel=0.3)


def test_k2_and_k3_are_never_negative() -> None:
    x = torch.linspace(-30, 30, 601, dtype=torch.float64)
    for name in ("k2", "k3"):
        assert (estimate(x, name) >= 0).all() and estimate(x, name).isfinite().all()
    assert estimate(torch.tensor([1e-9], dtype=torch.float64), "k3").item() == pytest.approx(5e-19, rel=1e-6)


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        ("k2", lambda p_V: kl(p_V, REFERENCE_V)),
        ("k3", lambda p_V: kl(REFERENCE_V, p_V)),
        ("k1", lambda p_V: p_V[0] * 0),
    ],
    ids=["k2", "k3", "k1"],
)
def test_gradient_in_the_loss(estimator, divergence) -> None:
    """On average over what the policy samples: of KL(pi || ref), of KL(ref || pi), and none."""
    logits_V = LOGITS_V.clone().requires_grad_()
    p_V = policy(logits_V)
    (found_V,) = torch.autograd.grad((p_V.detach().exp() * estimate(p_V - REFERENCE_V, estimator)).sum(), logits_V)
    (truth_V,) = torch.autograd.grad(divergence(policy(logits_V)), logits_V)
    torch.testing.assert_close(found_V, truth_V, atol=1e-12, rtol=1e-9)


def test_gradient_in_the_reward() -> None:
    """Of k1 as a negative reward: that of KL(pi || ref)."""
    logits_V = LOGITS_V.clone().requires_grad_()
    p_V = policy(logits_V)
    cost_V = estimate((p_V - REFERENCE_V).detach(), "k1")
    (found_V,) = torch.autograd.grad((p_V.detach().exp() * cost_V * p_V).sum(), logits_V)
    (truth_V,) = torch.autograd.grad(kl(policy(logits_V), REFERENCE_V), logits_V)
    torch.testing.assert_close(found_V, truth_V, atol=1e-12, rtol=1e-9)


def test_arrays_and_tensors_agree() -> None:
    x = np.linspace(-3, 3, 7)
    for name in ("k1", "k2", "k3"):
        np.testing.assert_allclose(estimate(x, name), estimate(torch.from_numpy(x), name).numpy(), rtol=1e-12)


@pytest.mark.parametrize("loss", [Aipo(), Gspo()], ids=["mean over tokens", "mean over sequences"])
def test_a_loss_with_a_penalty_is_the_loss_plus_the_penalty(loss) -> None:
    plain = random_inputs(20)
    reference_N = plain.logprobs_N.detach() + torch.linspace(-1, 1, 20, dtype=torch.float64)
    measured = replace(plain, reference_logprobs_N=reference_N)
    charged = replace(measured, kl=KlPenalty(coefficient=0.25, estimator="k2"))
    x_N = plain.logprobs_N.detach() - reference_N
    share = 1 / 5 if loss.MEAN_OVER == "sequences" else 1.0
    losses = [float(loss(inputs).loss.detach()) for inputs in (plain, measured, charged)]
    assert losses[0] == losses[1]
    assert losses[2] - losses[0] == pytest.approx(float(0.25 * share * (x_N**2 / 2).sum()))
    torch.testing.assert_close(gradient(loss, charged) - gradient(loss, plain), 0.25 * share * x_N)
    expected = float((torch.exp(-x_N) - 1 + x_N).sum())
    assert float(loss(measured).sums["kl_to_reference"]) == pytest.approx(expected)


def test_masked_positions_cost_nothing() -> None:
    inputs = random_inputs(10)
    mask_N = torch.arange(10) % 2 == 0
    reference_N = inputs.logprobs_N.detach().masked_fill(~mask_N, torch.nan) - 0.5
    kl_penalty = KlPenalty(coefficient=1.0, estimator="k3")
    masked = replace(inputs, loss_mask_N=mask_N, reference_logprobs_N=reference_N, kl=kl_penalty)
    grad_N = gradient(Aipo(), masked)
    assert grad_N.isfinite().all()
    assert (grad_N[~mask_N] == 0).all()


def test_where_it_is_charged() -> None:
    config = ReferenceConfig(kl_coefficient=0.1, kl_in="reward", kl_estimator="k1")
    assert penalty(config, "loss") is None
    assert penalty(config, "reward") == KlPenalty(coefficient=0.1, estimator="k1")
    assert penalty(ReferenceConfig(), "loss") is None


@pytest.mark.parametrize(
    ("reference", "rollout", "message"),
    [
        ({"kl_coefficient": 0.1, "kl_in": "reward"}, {"top_p": 0.9}, "top_p, top_k or min_p leave tokens out"),
        ({"kl_coefficient": 0.1}, {"top_k": 20}, "tokens out that the reference counts; leave them out"),
    ],
)
def test_what_would_charge_for_something_else_or_nothing(reference: dict, rollout: dict, message: str) -> None:
    values = {"model": {"path": "x"}, "data": {"train": "jsonl"}, "rollout": rollout}
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(values | {"reference": reference})


def test_an_estimator_without_gradient_is_refused() -> None:
    values = {"model": {"path": "x"}, "data": {"train": "jsonl"}}
    with pytest.raises(ValueError, match="has no gradient on average; use 'k2' or 'k3'"):
        RunConfig.model_validate(values | {"reference": {"kl_coefficient": 0.1, "kl_estimator": "k1"}})
