"""One optimizer step against the whole batch's loss, written by hand in float64: what the trainer divides by, the price
of leaving a reference, and what later passes over a batch are relative to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.kl import KlPenalty
from llamarl.algorithms.losses._base import Loss
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.algorithms.losses.grpo import Grpo
from llamarl.algorithms.losses.gspo import Gspo
from llamarl.algorithms.losses.ppo_clip import PpoClip
from llamarl.config.schema import TrainerConfig
from llamarl.training.packing import Microbatch, pack, to_sample_group
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import OBSERVED, Rollout, RolloutGroup
from tests.training.conftest import MakeGroups, MakeModel
from tests.training.test_trainer import step_with_gradient

ADVANTAGES = [np.array([0.0, 1.0, 4.0]), np.array([0.0, 1.0]), np.array([1.0, 1.0])]
"""Rewards; the last group has nothing to compare."""


@pytest.fixture
def groups(make_groups: MakeGroups) -> list[RolloutGroup]:
    """Responses of 5, 1, 9, 3, 3, 4 and 6 tokens, with log-probs of a reference."""
    made = make_groups(((5, 1, 9), (3, 3))) + make_groups(((4, 6),), first_id=2, reward=lambda _: 1.0)
    rng = np.random.default_rng(9)

    def judged(group: RolloutGroup) -> RolloutGroup:
        draws = [(-rng.random(rollout.num_tokens) * 5).astype(np.float32) for rollout in group.rollouts]
        rollouts = zip(group.rollouts, draws, strict=True)
        return replace(
            group,
            rollouts=tuple(
                replace(one, columns=one.columns | {"reference_logprobs": drawn}) for one, drawn in rollouts
            ),
        )

    return [judged(group) for group in made]


def trainer_of(make_model: MakeModel, loss: Loss, kl: KlPenalty | None = None, **config) -> Trainer:
    settings = TrainerConfig(**{"learning_rate": 1e-3, "max_grad_norm": 1e9} | config)
    return Trainer(
        make_model(torch.float64), settings, Objective(loss=loss, advantage=GroupMean(), temperature=0.7, kl_in_loss=kl)
    )


def whole(groups: list[RolloutGroup]) -> Microbatch:
    (batch,) = pack(
        [to_sample_group(group, one - one.mean()) for group, one in zip(groups, ADVANTAGES, strict=True)], 10_000
    )
    return batch


def expected_loss(kind: type[Loss], batch: Microbatch, logprobs_R: Tensor, coefficient: float) -> Tensor:
    mu_R, advantages_R, reference_R = (
        torch.from_numpy(array).double()
        for array in (batch.behavior_logprobs_R, batch.advantages_R, batch.columns_R["reference_logprobs"])
    )
    sequence_R = torch.from_numpy(batch.sequence_R)
    lengths_R = torch.bincount(sequence_R)[sequence_R].double()
    num_sequences = int(sequence_R.max()) + 1
    x_R = logprobs_R - reference_R
    kl_R = coefficient * (torch.expm1(-x_R) + x_R)
    ratio_R = (logprobs_R - mu_R).exp()
    if kind is Aipo:
        return (-(ratio_R.clamp(max=4).detach() * advantages_R * logprobs_R) + kl_R).mean()
    if kind is Gspo:
        sums = torch.zeros(num_sequences, dtype=torch.float64).index_add(0, sequence_R, logprobs_R - mu_R)
        ratio_R = (sums / torch.bincount(sequence_R)).exp()[sequence_R]
    low, high = (0.2, 0.2) if kind is Grpo else (Gspo().clip_low, Gspo().clip_high)
    surrogate_R = -torch.minimum(ratio_R * advantages_R, ratio_R.clamp(1 - low, 1 + high) * advantages_R)
    return ((surrogate_R + kl_R) / lengths_R).sum() / num_sequences


@pytest.mark.parametrize("kind", [Aipo, Grpo, Gspo])
@pytest.mark.parametrize("coefficient", [0.0, 0.3])
@pytest.mark.parametrize("budget", [1000, 16])
def test_step(make_model, groups, kind: type[Loss], coefficient: float, budget: int) -> None:
    """A group without advantage pays for its divergence, and counts in the mean."""
    kl = KlPenalty(coefficient=coefficient, estimator="k3") if coefficient else None
    loss = kind() if kind is not Grpo else Grpo(clip=0.2)
    result, found = step_with_gradient(trainer_of(make_model, loss, kl, microbatch_tokens=budget), groups)
    by_hand, batch = trainer_of(make_model, loss), whole(groups)
    value = expected_loss(kind, batch, by_hand.logprobs(batch), coefficient)
    value.backward()
    assert result.update.loss == pytest.approx(float(value.detach()), rel=1e-7)
    for name, weight in by_hand.model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [Aipo, Grpo, Gspo])
def test_nobody_learns_from_what_an_environment_wrote(make_model, groups, kind: type[Loss]) -> None:
    """Neither the loss, nor its price for divergence, nor what it divides by knows these tokens."""

    def answered(rollout: Rollout) -> Rollout:
        versions_T = rollout.policy_versions_T.copy()
        versions_T[1:-1:2] = OBSERVED
        logprobs_T = np.where(versions_T == OBSERVED, 0, rollout.behavior_logprobs_T).astype(np.float32)
        columns = {"policy_versions": versions_T, "behavior_logprobs": logprobs_T}
        return replace(rollout, columns=rollout.columns | columns)

    episodes = [replace(group, rollouts=tuple(map(answered, group.rollouts))) for group in groups]
    loss, kl = kind() if kind is not Grpo else Grpo(clip=0.2), KlPenalty(coefficient=0.3, estimator="k3")
    result, found = step_with_gradient(trainer_of(make_model, loss, kl, microbatch_tokens=16), episodes)
    by_hand, batch = trainer_of(make_model, loss), whole(episodes)
    mask_R = batch.policy_versions_R != OBSERVED
    assert 5 < (~mask_R).sum() < mask_R.sum()
    columns_R = {name: column_R[mask_R] for name, column_R in batch.columns_R.items()}
    sampled = replace(batch, sequence_R=batch.sequence_R[mask_R], columns_R=columns_R)
    value = expected_loss(kind, sampled, by_hand.logprobs(batch)[torch.from_numpy(mask_R)], 0.3)
    value.backward()
    assert result.update.loss == pytest.approx(float(value.detach()), rel=1e-7)
    assert result.update.num_loss_tokens == mask_R.sum()
    for name, weight in by_hand.model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-6, atol=1e-9)


def test_a_second_pass_is_relative_to_the_first(make_model, groups) -> None:
    """With `truncate`: tokens weigh min(proximal / mu, c), and the clip is around the proximal policy."""
    loss, seen = PpoClip(clip=0.02, truncate=1.5), list[dict[str, Tensor]]()
    trainer = trainer_of(make_model, loss, passes=2, learning_rate=3e-3)
    batch = whole(groups)
    weights = list[dict[str, Tensor]]()

    def keep(*_: object) -> None:
        seen.append({name: weight.grad.clone() for name, weight in trainer.model.named_parameters()})
        weights.append({name: weight.detach().clone() for name, weight in trainer.model.named_parameters()})

    proximal_R = trainer.logprobs(batch).detach()
    trainer.optimizer.register_step_pre_hook(keep)
    metrics = trainer.step(groups).metrics
    by_hand = trainer_of(make_model, loss)
    by_hand.model.load_state_dict(weights[1])
    logprobs_R = by_hand.logprobs(batch)
    mu_R, advantages_R = (torch.from_numpy(a).double() for a in (batch.behavior_logprobs_R, batch.advantages_R))
    ratio_R, weights_R = (logprobs_R - proximal_R).exp(), (proximal_R - mu_R).exp().clamp(max=1.5)
    gain_R = torch.minimum(ratio_R * advantages_R, ratio_R.clamp(0.98, 1.02) * advantages_R)
    assert ((ratio_R * advantages_R) > gain_R).any(), "nothing is clipped"
    (-(weights_R * gain_R)).mean().backward()
    for name, weight in by_hand.model.named_parameters():
        torch.testing.assert_close(seen[1][name], weight.grad, rtol=1e-6, atol=1e-9)
    once = trainer_of(make_model, loss, learning_rate=3e-3).step(groups).metrics
    assert metrics["kl_same_version"] == pytest.approx(once["kl_same_version"], rel=1e-9)  # of the first pass alone


def test_a_pass_that_is_not_finite_is_named(make_model, groups) -> None:
    trainer = trainer_of(make_model, Aipo(), passes=3, on_nonfinite="skip")
    trainer.config = trainer.config.model_copy(update={"learning_rate": 1e300})  # which no settings allow
    result = trainer.step(groups)
    assert result.skipped
    assert result.cause.startswith("step 0 pass 2 of 3: loss ")
