"""The contract of every loss in the folder, and AIPO against its closed form.

Shape suffixes: N positions, V vocabulary.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from llamarl.algorithms.losses._base import Loss, LossInputs, LossOutput, Positions, TokenLosses
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.algorithms.losses.decoupled_ppo import DecoupledPpo
from llamarl.config.errors import ConfigError
from llamarl.config.ref import Ref, build, members

FAMILY = "llamarl.algorithms.losses"
LENGTH = 5
"""Tokens of a sequence in the tests."""
POISONS = (math.nan, math.inf, -math.inf)


OPTIONS = ({}, {"truncate": 1.5}, {"sequence_mask": [0.7, 1.4]}, {"truncate": 2.0, "sequence_mask": [0.5, 2.0]})


@pytest.fixture(params=members(FAMILY))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=OPTIONS, ids=["plain", "truncated", "sequence mask", "both"])
def loss(name: str, request: pytest.FixtureRequest) -> Loss:
    return build(Ref(name=name, **request.param), FAMILY, "trainer.loss")


def random_inputs(num: int, seed: int = 0, dtype: torch.dtype = torch.float64, off_policy: float = 1.0) -> LossInputs:
    """Unmasked positions whose log-ratios have a standard deviation of about `off_policy`."""
    generator = torch.Generator().manual_seed(seed)
    logprobs_N = -torch.rand(num, generator=generator, dtype=torch.float64) * 3
    noise_N = torch.randn(num, generator=generator, dtype=torch.float64) * off_policy
    return LossInputs(
        logprobs_N=logprobs_N.to(dtype, copy=True).requires_grad_(),
        behavior_logprobs_N=(logprobs_N + noise_N).to(dtype),
        advantages_N=torch.randn(num, generator=generator, dtype=torch.float64).to(dtype),
        loss_mask_N=torch.ones(num, dtype=torch.bool),
        sequence_N=torch.arange(num) // LENGTH,
        num_sequences=-(-num // LENGTH),
    )


def gradient(loss: Loss, inputs: LossInputs) -> Tensor:
    (grad_N,) = torch.autograd.grad(loss(inputs).loss, inputs.logprobs_N)
    return grad_N


def part(inputs: LossInputs, rows: slice | Tensor) -> LossInputs:
    return LossInputs(
        logprobs_N=inputs.logprobs_N.detach()[rows].requires_grad_(),
        behavior_logprobs_N=inputs.behavior_logprobs_N[rows],
        advantages_N=inputs.advantages_N[rows],
        loss_mask_N=inputs.loss_mask_N[rows],
        sequence_N=inputs.sequence_N[rows],
        num_sequences=inputs.num_sequences,
    )


def check_is_a_sum(loss: Loss) -> None:
    """Twice the positions, twice the loss and the same gradient at each; parts add up to the whole."""
    inputs = random_inputs(35)
    whole, whole_grad_N = loss(inputs), gradient(loss, inputs)
    copies = inputs.sequence_N + inputs.num_sequences
    doubled = replace(
        part(inputs, torch.arange(35).repeat(2)),
        sequence_N=torch.cat((inputs.sequence_N, copies)),
        num_sequences=2 * inputs.num_sequences,
    )
    torch.testing.assert_close(loss(doubled).loss, 2 * whole.loss)
    torch.testing.assert_close(gradient(loss, doubled), whole_grad_N.repeat(2))

    parts = [part(inputs, rows) for rows in (slice(0, 5), slice(5, 20), slice(20, 35))]
    outputs = [loss(item) for item in parts]
    torch.testing.assert_close(sum(output.loss for output in outputs), whole.loss)
    torch.testing.assert_close(torch.cat([gradient(loss, item) for item in parts]), whole_grad_N)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(output.sums[name] for output in outputs), value)
    for name, value in whole.maxima.items():
        assert max(output.maxima[name] for output in outputs) == value


def check_masks_poison(loss: Loss) -> None:
    """Masked positions act as if they were not there, whatever they hold."""
    clean = random_inputs(24)
    expected, expected_grad_N = loss(clean), gradient(loss, clean)
    generator = torch.Generator().manual_seed(7)
    for poison in POISONS:
        for poisoned in ("logprobs_N", "behavior_logprobs_N", "advantages_N"):
            order_M = torch.randperm(32, generator=generator)
            mask_M = order_M < 24
            values = {
                name: torch.cat((getattr(clean, name).detach(), torch.zeros(8, dtype=torch.float64)))[order_M]
                for name in ("logprobs_N", "behavior_logprobs_N", "advantages_N")
            }
            values[poisoned] = values[poisoned].masked_fill(~mask_M, poison)
            values["logprobs_N"].requires_grad_()
            # Masked positions belong to some sequence too, and must not change its length or its mean.
            sequence_M = torch.cat((clean.sequence_N, torch.arange(8) % clean.num_sequences))[order_M]
            inputs = LossInputs(**values, loss_mask_N=mask_M, sequence_N=sequence_M, num_sequences=clean.num_sequences)
            output, grad_M = loss(inputs), gradient(loss, inputs)
            torch.testing.assert_close(output.loss, expected.loss, msg=f"{poison} in {poisoned} reached the loss")
            assert (grad_M[~mask_M] == 0).all(), f"{poison} in {poisoned} reached the gradient of its own position"
            torch.testing.assert_close(grad_M[mask_M], expected_grad_N[order_M[mask_M]])
            for name, value in expected.sums.items():
                torch.testing.assert_close(output.sums[name], value, msg=f"{poison} in {poisoned} reached {name}")
            assert all(torch.isfinite(value) for value in output.maxima.values())


class TestContract:
    def test_returns_a_sum(self, loss: Loss) -> None:
        check_is_a_sum(loss)

    def test_masked_positions_reach_nothing(self, loss: Loss) -> None:
        check_masks_poison(loss)

    def test_all_masked_is_zero(self, loss: Loss) -> None:
        inputs = random_inputs(5)
        inputs = replace(inputs, loss_mask_N=torch.zeros(5, dtype=torch.bool))
        output = loss(inputs)
        assert output.loss == 0
        assert (gradient(loss, inputs) == 0).all()
        assert all(value == 0 for value in output.sums.values())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("log_ratio", [-200.0, 200.0])
    def test_extreme_log_ratios_stay_finite(self, loss: Loss, log_ratio: float, dtype: torch.dtype) -> None:
        inputs = random_inputs(6, dtype=dtype)
        inputs = replace(inputs, behavior_logprobs_N=inputs.logprobs_N.detach() - log_ratio)
        output = loss(inputs)
        assert torch.isfinite(output.loss)
        assert torch.isfinite(gradient(loss, inputs)).all()
        assert all(torch.isfinite(value) for value in (*output.sums.values(), *output.maxima.values()))

    def test_no_advantage_no_gradient(self, loss: Loss) -> None:
        inputs = random_inputs(9)
        inputs = replace(inputs, advantages_N=torch.zeros(9, dtype=torch.float64))
        assert (gradient(loss, inputs) == 0).all() != loss.LEARNS_WITHOUT_ADVANTAGE

    def test_keeps_the_input_type(self, loss: Loss) -> None:
        for dtype in (torch.float32, torch.float64):
            assert loss(random_inputs(4, dtype=dtype)).loss.dtype is dtype

    def test_outputs_are_detached_scalars(self, loss: Loss) -> None:
        output = loss(random_inputs(4))
        assert output.loss.ndim == 0
        for name, value in (output.sums | output.maxima).items():
            assert value.ndim == 0, name
            assert not value.requires_grad, name


@dataclass(frozen=True)
class MeanLoss(Aipo):
    """Divides by its own count: gradient accumulation would weigh tokens of short microbatches more."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        output = super().__call__(inputs)
        return replace(output, loss=output.loss / len(inputs.logprobs_N))


@dataclass(frozen=True)
class LateMaskLoss(Aipo):
    """Masks after the product: 0 * NaN is NaN."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        weights_N = (inputs.logprobs_N - inputs.behavior_logprobs_N).detach().exp().clamp(max=4.0)
        loss_N = weights_N * inputs.advantages_N * inputs.logprobs_N * inputs.loss_mask_N
        return LossOutput(loss=-loss_N.sum(), sums={}, maxima={})


class TestTheContractCanFail:
    def test_a_mean_is_caught(self) -> None:
        with pytest.raises(AssertionError):
            check_is_a_sum(MeanLoss())

    def test_a_late_mask_is_caught(self) -> None:
        with pytest.raises(AssertionError, match="reached"):
            check_masks_poison(LateMaskLoss())


class TestAipo:
    RHO = 3.0

    def softmax_case(self, off_policy: float) -> tuple[Tensor, Tensor, LossInputs]:
        """Logits [N, V] and targets [N] behind the inputs of a loss."""
        generator = torch.Generator().manual_seed(3)
        logits_N_V = torch.randn(40, 11, generator=generator, dtype=torch.float64, requires_grad=True)
        targets_N = torch.randint(11, (40,), generator=generator)
        logprobs_N = logits_N_V.log_softmax(-1).gather(1, targets_N[:, None]).squeeze(1)
        noise_N = torch.randn(40, generator=generator, dtype=torch.float64) * off_policy
        inputs = LossInputs(
            logprobs_N=logprobs_N,
            behavior_logprobs_N=logprobs_N.detach() + noise_N,
            advantages_N=torch.randn(40, generator=generator, dtype=torch.float64),
            loss_mask_N=torch.ones(40, dtype=torch.bool),
            sequence_N=torch.arange(40) // LENGTH,
            num_sequences=8,
        )
        return logits_N_V, targets_N, inputs

    def score_function(self, logits_N_V: Tensor, targets_N: Tensor) -> Tensor:
        """grad log pi with respect to the logits: onehot(target) - softmax."""
        probs_N_V = logits_N_V.detach().softmax(-1)
        return torch.nn.functional.one_hot(targets_N, 11).to(torch.float64) - probs_N_V

    def test_gradient_is_the_closed_form(self) -> None:
        logits_N_V, targets_N, inputs = self.softmax_case(off_policy=2.0)
        ratio_N = (inputs.logprobs_N.detach() - inputs.behavior_logprobs_N).exp()
        assert (ratio_N > self.RHO).sum() > 5, "the case must hold ratios above the cap"
        assert (ratio_N < 1 / self.RHO).sum() > 5, "and far below 1, where no cap may act"
        (grad_N_V,) = torch.autograd.grad(Aipo(rho=self.RHO)(inputs).loss, logits_N_V)
        weights_N = ratio_N.clamp(max=self.RHO) * inputs.advantages_N
        ascent_N_V = weights_N[:, None] * self.score_function(logits_N_V, targets_N)
        torch.testing.assert_close(grad_N_V, -ascent_N_V, rtol=1e-12, atol=1e-14)

    def test_on_policy_it_is_reinforce(self) -> None:
        logits_N_V, targets_N, inputs = self.softmax_case(off_policy=0.0)
        (grad_N_V,) = torch.autograd.grad(Aipo(rho=self.RHO)(inputs).loss, logits_N_V)
        ascent_N_V = inputs.advantages_N[:, None] * self.score_function(logits_N_V, targets_N)
        torch.testing.assert_close(grad_N_V, -ascent_N_V, rtol=1e-13, atol=1e-15)

    @pytest.mark.parametrize("log_ratio", [1.5, 5.0, 50.0])
    @pytest.mark.parametrize("advantage", [-2.0, 2.0])
    def test_above_the_cap_tokens_still_pull(self, log_ratio: float, advantage: float) -> None:
        """PPO's clip would silence positive advantages here."""
        inputs = random_inputs(1)
        inputs = replace(
            inputs,
            behavior_logprobs_N=inputs.logprobs_N.detach() - log_ratio,
            advantages_N=torch.tensor([advantage], dtype=torch.float64),
        )
        assert gradient(Aipo(rho=self.RHO), inputs).item() == pytest.approx(-self.RHO * advantage, rel=1e-12)

    def test_statistics(self) -> None:
        inputs = random_inputs(64, off_policy=1.5)
        output = Aipo(rho=self.RHO)(inputs)
        log_ratio_N = inputs.logprobs_N.detach() - inputs.behavior_logprobs_N
        ratio_N = log_ratio_N.exp()
        torch.testing.assert_close(output.sums["importance_ratio_excess"], (ratio_N - 1).sum())
        torch.testing.assert_close(output.sums["kl_to_behavior"], (ratio_N - 1 - log_ratio_N).sum())
        torch.testing.assert_close(output.maxima["importance_ratio_max"], ratio_N.max())
        assert output.sums["capped_share"] == (ratio_N > self.RHO).sum()

    def test_kl_keeps_its_digits_near_the_behavior_policy(self) -> None:
        """Log-ratios of 1e-4, as after one small step: a KL of 5e-9 a token, below the rounding of float32 near 1."""
        inputs = random_inputs(500, dtype=torch.float32)
        inputs = replace(inputs, logprobs_N=inputs.behavior_logprobs_N + 2.0**-13)
        log_ratio = (inputs.logprobs_N - inputs.behavior_logprobs_N).double()
        expected = (log_ratio.exp() - 1 - log_ratio).sum().item()
        assert Aipo()(inputs).sums["kl_to_behavior"].item() == pytest.approx(expected, rel=0.01)


def weight(name: str, log_ratio_N: Tensor, advantages_N: Tensor, behavior_N: Tensor) -> Tensor:
    """Closed form of -(d loss / d log pi) of each position, before division by tokens or sequences, from the papers.

    Defaults of the options; sequences of LENGTH positions.
    """
    ratio_N = log_ratio_N.exp()
    sequence_ratio_N = log_ratio_N.view(-1, LENGTH).mean(1).exp().repeat_interleave(LENGTH)

    def clipped(ratio_N: Tensor, low: float, high: float) -> Tensor:
        silent_N = ((advantages_N > 0) & (ratio_N > 1 + high)) | ((advantages_N < 0) & (ratio_N < 1 - low))
        return torch.where(silent_N, 0.0, ratio_N * advantages_N)

    moved_N = behavior_N.exp() * ratio_N - behavior_N.exp()
    forms = {
        "aipo": ratio_N.clamp(max=4.0) * advantages_N,
        "cispo": ratio_N.clamp(0.0, 5.0) * advantages_N,
        "dapo": clipped(ratio_N, 0.2, 0.28),
        "decoupled_ppo": ratio_N.clamp(max=5.0) * advantages_N,
        "dppo": torch.where(moved_N * advantages_N.sign() > 0.2, 0.0, ratio_N * advantages_N),
        "grpo": clipped(ratio_N, 0.2, 0.2) / LENGTH,
        "gspo": (clipped(sequence_ratio_N, 3e-4, 4e-4) / LENGTH).view(-1, LENGTH).mean(1).repeat_interleave(LENGTH),
        "ppo_clip": clipped(ratio_N, 0.2, 0.2),
        "raft": (advantages_N > 0).to(ratio_N.dtype),
        "reinforce": advantages_N,
    }
    return forms[name]


class TestClosedForms:
    @pytest.mark.parametrize("off_policy", [0.0, 0.3, 2.0])
    def test_gradient(self, name: str, off_policy: float) -> None:
        inputs = random_inputs(200, seed=5, off_policy=off_policy)
        if name == "gspo":  # one advantage per response
            inputs = replace(inputs, advantages_N=inputs.advantages_N[::LENGTH].repeat_interleave(LENGTH))
        log_ratio_N = inputs.logprobs_N.detach() - inputs.behavior_logprobs_N
        expected_N = -weight(name, log_ratio_N, inputs.advantages_N, inputs.behavior_logprobs_N)
        loss = build(Ref(name=name), FAMILY, "trainer.loss")
        torch.testing.assert_close(gradient(loss, inputs), expected_N, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize("off_policy", [0.3, 2.0])
    def test_truncation_weighs_what_would_be_on_policy(self, name: str, off_policy: float) -> None:
        """With `truncate` the loss sees ratio 1, and every token is weighed by the capped ratio."""
        inputs = random_inputs(200, seed=6, off_policy=off_policy)
        on_policy = replace(inputs, behavior_logprobs_N=inputs.logprobs_N.detach())
        ratio_N = (inputs.logprobs_N.detach() - inputs.behavior_logprobs_N).exp()
        expected_N = ratio_N.clamp(max=1.5) * gradient(build(Ref(name=name), FAMILY, "loss"), on_policy)
        if name == "gspo":  # a token's weight acts on its sequence's term
            pull_N = -inputs.advantages_N / LENGTH * ratio_N.clamp(max=1.5)
            expected_N = pull_N.view(-1, LENGTH).mean(1).repeat_interleave(LENGTH)
        actual_N = gradient(build(Ref(name=name, truncate=1.5), FAMILY, "loss"), inputs)
        torch.testing.assert_close(actual_N, expected_N, rtol=1e-12, atol=1e-14)

    def test_a_sequence_mask_silences_whole_sequences(self, name: str) -> None:
        inputs = random_inputs(200, seed=7, off_policy=0.8)
        log_ratio_N = inputs.logprobs_N.detach() - inputs.behavior_logprobs_N
        mean_N = log_ratio_N.view(-1, LENGTH).mean(1).exp().repeat_interleave(LENGTH)
        kept_N = (mean_N >= 0.8) & (mean_N <= 1.25)
        assert 0 < kept_N.sum() < 200
        expected_N = torch.where(kept_N, gradient(build(Ref(name=name), FAMILY, "loss"), inputs), 0.0)
        actual_N = gradient(build(Ref(name=name, sequence_mask=[0.8, 1.25]), FAMILY, "loss"), inputs)
        torch.testing.assert_close(actual_N, expected_N, rtol=1e-12, atol=1e-14)

    def test_decoupled_ppo_clips_around_the_proximal_policy(self) -> None:
        inputs = random_inputs(200, seed=8, off_policy=0.5)
        proximal_N = inputs.logprobs_N.detach() - 0.4 * torch.randn(200, dtype=torch.float64)
        change_N = (inputs.logprobs_N.detach() - proximal_N).exp()
        behavior_weight_N = (proximal_N - inputs.behavior_logprobs_N).exp().clamp(max=2.0)
        advantages_N = inputs.advantages_N
        silent_N = ((advantages_N > 0) & (change_N > 1.2)) | ((advantages_N < 0) & (change_N < 0.8))
        expected_N = -torch.where(silent_N, 0.0, behavior_weight_N * change_N * advantages_N)
        actual_N = gradient(DecoupledPpo(max_weight=2.0), replace(inputs, proximal_logprobs_N=proximal_N))
        torch.testing.assert_close(actual_N, expected_N, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "aipo", "rho": 0.0}, "rho = 0.0 must be above 0"),
        ({"name": "ppo_clip", "clip": 1.5}, "clip = 1.5 must be above 0 and at most 1"),
        ({"name": "grpo", "truncate": -1.0}, "truncate = -1.0 must be positive"),
        ({"name": "grpo", "sequence_mask": [2.0, 1.0]}, "sequence_mask"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(Ref(**options), FAMILY, "trainer.loss")


@pytest.mark.parametrize("shape", ["mean", "column", "no cap"])
def test_a_loss_says_something_of_each_position(shape: str) -> None:
    """One that has summed up already would be broadcast, and train something else without a word."""

    class Wrong(Loss):
        def token_losses(self, positions: Positions) -> TokenLosses:
            loss_N = -positions.log_ratio_N.exp() * positions.advantages_N
            capped_N = torch.zeros_like(positions.mask_N)
            if shape == "mean":
                return TokenLosses(loss_N=loss_N.mean(), capped_N=capped_N)
            if shape == "column":
                return TokenLosses(loss_N=loss_N[:, None], capped_N=capped_N)
            return TokenLosses(loss_N=loss_N, capped_N=capped_N.any())

    with pytest.raises(ValueError, match=r"Wrong.token_losses .*(loss_N|capped_N) of shape"):
        Wrong()(random_inputs(9))
