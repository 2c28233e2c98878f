"""The critic: closed forms, packing that changes nothing, and values that are learnt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from llamarl.algorithms.advantages.gae import Gae
from llamarl.config.schema import TrainerConfig
from llamarl.models.attention import causal_attend
from llamarl.models.scalar import ScalarModel
from llamarl.models.shape import ModelShape
from llamarl.training.critic import Critic, ValueObjective, value_losses
from llamarl.training.optimization import finished
from llamarl.training.result import NonFiniteStep
from llamarl.types import OBSERVED, FinishReason, Outcome, RewardResult, Rollout, RolloutGroup
from tests.training.conftest import SHAPE, MakeGroups
from tests.training.critics import valued


def make_critic(**config) -> Critic:
    torch.manual_seed(3)
    settings = TrainerConfig(**{"learning_rate": 3e-3, "max_grad_norm": 1e9} | config)
    model = ScalarModel(ModelShape(**SHAPE))
    nn.init.normal_(model.model.embed_tokens.weight)  # whoever makes a model fills it
    return Critic(model, settings, ValueObjective(clip=0.2, advantage=Gae()))


def run(critic: Critic, groups: list[RolloutGroup]) -> dict[str, float]:
    return finished(critic.learn(groups)).metrics


def test_value_losses_closed_form() -> None:
    """Within the clip the plain square; beyond it, moving towards the return is not rewarded further."""
    old = torch.zeros(4, dtype=torch.float64)
    values = torch.tensor([0.1, 0.5, -0.5, 0.5], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([1.0, 1.0, 1.0, 0.3], dtype=torch.float64)
    losses = value_losses(values, old, returns, clip=0.2)
    np.testing.assert_allclose(losses.detach(), np.array([0.9, 0.8, 1.5, 0.2]) ** 2 / 2)
    (grad,) = torch.autograd.grad(losses.sum(), values)
    np.testing.assert_allclose(grad, [-0.9, 0.0, -1.5, 0.2], atol=1e-12)


def test_a_value_is_that_of_the_tokens_before(make_groups: MakeGroups) -> None:
    """One response at a time and unpacked gives the same; what a rollout gets does not depend on what is beside it."""
    critic, groups = make_critic(), make_groups()
    values = critic.values([(group.prompt, group.rollouts) for group in groups])
    for group, of_group in zip(groups, values, strict=True):
        for rollout, values_T in zip(group.rollouts, of_group, strict=True):
            ids = np.concatenate([group.prompt.token_ids_T, rollout.token_ids_T])[:-1].astype(np.int64)
            with torch.no_grad():
                hidden = critic.model(torch.from_numpy(ids), torch.arange(len(ids)), causal_attend([len(ids)]))
                expected = critic.model.scalars(hidden)[-rollout.num_tokens :]
            np.testing.assert_allclose(values_T, expected, atol=1e-5)
    alone = critic.values([(groups[2].prompt, groups[2].rollouts)])[0]
    assert all(np.array_equal(a, b) for a, b in zip(alone, values[2], strict=True))


def test_failed_and_empty_rollouts_have_values_of_0(make_groups: MakeGroups) -> None:
    (group,) = make_groups(lengths=[(4, 0, 3)])
    rollouts = (replace(group.rollouts[0], finish_reason=FinishReason.FAILED), *group.rollouts[1:])
    ((failed, empty, computed),) = make_critic().values([(group.prompt, rollouts)])
    assert (failed == 0).all() and len(failed) == 4 and len(empty) == 0
    assert (computed != 0).all() and len(computed) == 3


def test_what_an_environment_wrote_has_no_value(make_groups: MakeGroups) -> None:
    """Loss and explained variance are those of the sampled tokens, whatever was said of others."""
    critic, mask = make_critic(microbatch_tokens=16), np.array([True, False, False, True, True])

    def answered(rollout: Rollout) -> Rollout:
        columns = {"policy_versions": np.where(mask, 0, OBSERVED).astype(np.int32),
                   "values": np.where(mask, rollout.values_T, 1e6).astype(np.float32)}  # fmt: skip
        return replace(rollout, columns=rollout.columns | columns)

    groups = [
        replace(group, rollouts=tuple(map(answered, group.rollouts)))
        for group in valued(critic, make_groups(lengths=[(5, 5), (5, 5, 5)]))
    ]
    found = run(critic, groups)
    rewards = [result.value for group in groups for result in group.results]
    values = [rollout.values_T[mask].astype(np.float64) for group in groups for rollout in group.rollouts]
    errors = np.concatenate([reward - one for reward, one in zip(rewards, values, strict=True)])
    assert found["value_loss"] == pytest.approx((errors**2).mean() / 2, rel=1e-5)
    assert found["explained_variance"] == pytest.approx(1 - errors.var() / np.repeat(rewards, 3).var(), rel=1e-5)


@pytest.mark.parametrize("budget", [8, 30, 8192])
def test_microbatches_do_not_change_the_step(make_groups: MakeGroups, budget: int) -> None:
    whole, cut = make_critic(), make_critic(microbatch_tokens=budget)
    groups = valued(whole, make_groups())
    expected, found = run(whole, groups), run(cut, groups)
    assert found["value_loss"] == pytest.approx(expected["value_loss"], rel=1e-5)
    assert found["critic_grad_norm"] == pytest.approx(expected["critic_grad_norm"], rel=1e-4)
    assert found["explained_variance"] == pytest.approx(expected["explained_variance"], abs=1e-6)


def test_explained_variance_and_loss_are_of_the_values_that_came_along(make_groups: MakeGroups) -> None:
    """Rewards 0, 1, 4 at lambda 1: each token's return is its rollout's reward."""
    critic = make_critic()
    groups = valued(critic, make_groups())
    values = np.concatenate([r.values_T for group in groups for r in group.rollouts]).astype(np.float64)
    returns = np.concatenate([
        np.full(r.num_tokens, result.value)
        for group in groups for r, result in zip(group.rollouts, group.results, strict=True)
    ])  # fmt: skip
    found = run(critic, groups)
    assert found["explained_variance"] == pytest.approx(1 - (returns - values).var() / returns.var(), rel=1e-5)
    assert found["value_loss"] == pytest.approx(((returns - values) ** 2).mean() / 2, rel=1e-5)


def test_it_learns_what_to_expect(make_groups: MakeGroups) -> None:
    """Prompts that are paid for, and prompts that are not."""
    critic = make_critic(learning_rate=1e-2)
    groups = [
        replace(group, results=(RewardResult(outcome=Outcome.SCORE, value=float(group.group_id % 2)),) * 2)
        for group in make_groups(lengths=[(4, 4)] * 6)
    ]
    explained = [run(critic, valued(critic, groups))["explained_variance"] for _ in range(25)]
    assert explained[0] < 0.2
    assert min(explained[-5:]) > 0.8


def test_passes_and_the_clip(make_groups: MakeGroups) -> None:
    """Each pass is an update; values move no further than the clip rewards."""
    once, thrice = make_critic(learning_rate=1e-3), make_critic(learning_rate=1e-3, passes=3)
    groups = valued(once, make_groups())
    moved = list[float]()
    for critic in (once, thrice):
        before = [weight.clone() for weight in critic.model.parameters()]
        run(critic, groups)
        differences = zip(before, critic.model.parameters(), strict=True)
        moved.append(float(torch.cat([(a - b).detach().flatten() for a, b in differences]).norm()))
    assert 1.5 * moved[0] < moved[1] < 3.5 * moved[0]
    tight, loose = make_critic(passes=3, learning_rate=1e-2), make_critic(passes=3, learning_rate=1e-2)
    tight._objective = replace(tight._objective, clip=0.01)
    assert run(tight, groups)["value_loss"] > 1.02 * run(loose, groups)["value_loss"]


def test_invalid_rollouts_teach_nothing(make_groups: MakeGroups) -> None:
    critic = make_critic()
    groups = valued(critic, make_groups(outcome=Outcome.INVALID))
    before = [weight.clone() for weight in critic.model.parameters()]
    assert run(critic, groups)["value_loss"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, critic.model.parameters(), strict=True))


def test_a_step_that_is_not_finite(make_groups: MakeGroups) -> None:
    groups = [
        replace(group, results=tuple(replace(one, value=np.inf) for one in group.results)) for group in make_groups()
    ]
    critic = make_critic()
    with pytest.raises(NonFiniteStep, match=r"critic step 0: .*: the reward of group 0 rollout 0 is inf"):
        run(critic, valued(critic, groups))
    unlike = valued(critic, make_groups())
    for group in unlike:
        group.rollouts[0].columns["values"][:] = np.inf
    with pytest.raises(NonFiniteStep, match=r"critic step 0: .* lower critic.learning_rate_scale"):
        run(critic, unlike)
    skipping = make_critic(on_nonfinite="skip")
    before = [weight.clone() for weight in skipping.model.parameters()]
    result = finished(skipping.learn(valued(skipping, groups)))
    assert result.skipped and result.metrics["critic_skipped"] == 1 and result.policy_version == 1
    assert "loss inf" in result.cause and "the reward of group 0 rollout 0 is inf" in result.cause
    assert all(torch.equal(a, b) for a, b in zip(before, skipping.model.parameters(), strict=True))
    assert all(not weight.grad.any() for weight in skipping.model.parameters())


def test_so_many_skipped_steps_in_a_row_end_it(make_groups: MakeGroups) -> None:
    """One that is finite begins the count anew; the rollout at fault is named."""
    critic = make_critic(on_nonfinite="skip")
    good, bad = (valued(critic, make_groups()) for _ in range(2))
    bad[1] = replace(bad[1], results=(bad[1].results[0], replace(bad[1].results[1], value=np.inf)))
    skipped = [finished(critic.learn(groups)).skipped for groups in (good, bad, bad, good, bad, bad)]
    assert skipped == [False, True, True, False, True, True]
    with pytest.raises(
        NonFiniteStep, match=r"critic step 6: .*the reward of group 1 rollout 1 is inf; .*; 3 steps in a row"
    ):
        finished(critic.learn(bad))
