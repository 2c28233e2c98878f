"""What a step says of itself: ratios by the age of the tokens, and the rollouts that made it non-finite."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from llamarl.algorithms.losses._base import Positions, TokenLosses
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.training.optimization import MAX_NAMED_GROUPS, Totals, find_cause
from llamarl.training.packing import pack, to_sample_group
from llamarl.training.result import NonFiniteStep
from llamarl.types import RolloutGroup, SampleGroup
from tests.training.layouts import logged

NAN = float("nan")


def aged(groups: list[RolloutGroup], versions: Sequence[int]) -> list[RolloutGroup]:
    """The first half of each response is by the first version, and so on."""
    for group in groups:
        for rollout in group.rollouts:
            parts = np.array_split(rollout.policy_versions_T, len(versions))
            for part, version in zip(parts, versions, strict=True):
                part[:] = version
    return groups


class TestAges:
    def test_each_part_is_the_mean_over_its_own_tokens(self, make_trainer, make_groups) -> None:
        """By hand, on the log-probs that the trainer computes; the two parts make up the whole."""
        trainer, groups = make_trainer(torch.float64), aged(make_groups(), (1, 2, 3))
        trainer.policy_version = 3
        (batch,) = pack(trainer._samples(groups)[0], 1000)
        log_ratio_R = trainer.logprobs(batch).detach().numpy() - batch.behavior_logprobs_R
        stale_R = batch.policy_versions_R < 3
        metrics = logged(trainer.step(groups))
        assert metrics["stale_share"] == pytest.approx(stale_R.mean())
        for part, own_R in (("staleness", stale_R), ("same_version", ~stale_R)):
            ratio_N = np.exp(log_ratio_R[own_R])
            assert metrics[f"importance_ratio_{part}"] == pytest.approx(ratio_N.mean(), rel=1e-9)
            kl = (ratio_N - 1 - log_ratio_R[own_R]).mean()
            assert metrics[f"kl_{part}"] == pytest.approx(kl, rel=1e-9)
        share = metrics["stale_share"]
        together = share * metrics["kl_staleness"] + (1 - share) * metrics["kl_same_version"]
        assert metrics["kl_to_behavior"] == pytest.approx(together, rel=1e-9)

    @pytest.mark.parametrize(
        ("version", "there", "missing"), [(0, "same_version", "staleness"), (9, "staleness", "same_version")]
    )
    def test_a_part_without_tokens_is_missing(self, make_trainer, make_groups, version, there, missing) -> None:
        trainer = make_trainer()
        trainer.policy_version = version
        metrics = trainer.step(make_groups()).metrics
        assert metrics["stale_share"] == (version > 0)
        assert f"kl_{there}" in metrics
        assert f"kl_{missing}" not in metrics

    def test_microbatches_do_not_change_them(self, make_trainer, make_groups) -> None:
        found = []
        for microbatch_tokens in (1000, 12):
            trainer = make_trainer(torch.float64, microbatch_tokens=microbatch_tokens)
            trainer.policy_version = 2
            found.append(logged(trainer.step(aged(make_groups(), (1, 2)))))
        for name in (
            "stale_share",
            "kl_staleness",
            "kl_same_version",
            "importance_ratio_staleness",
            "padding_share",
            "num_flops",
        ):
            assert found[0][name] == pytest.approx(found[1][name], rel=1e-12), name


class InfiniteGradient(Aipo):
    """Finite everywhere, but the slope of a root at 0 is infinite: for the worst response of a group."""

    def token_losses(self, positions: Positions) -> TokenLosses:
        plain = super().token_losses(positions)
        is_worst_N = positions.advantages_N == positions.advantages_N.min()
        root_N = (positions.logprobs_N - positions.logprobs_N.detach()).sqrt()
        return TokenLosses(loss_N=plain.loss_N + root_N.where(is_worst_N, 0.0), capped_N=plain.capped_N)


class InfiniteLoss(Aipo):
    def token_losses(self, positions: Positions) -> TokenLosses:
        plain = super().token_losses(positions)
        is_best_N = positions.advantages_N == positions.advantages_N.max()
        return TokenLosses(loss_N=plain.loss_N.masked_fill(is_best_N, torch.inf), capped_N=plain.capped_N)


class TestCause:
    def cause(self, trainer, groups: list[RolloutGroup]) -> str:
        with pytest.raises(NonFiniteStep) as error:
            trainer.step(groups)
        return str(error.value)

    def test_behavior_logprobs_of_several_rollouts(self, make_trainer, make_groups) -> None:
        groups = make_groups()
        groups[0].rollouts[2].behavior_logprobs_T[4] = NAN
        groups[2].rollouts[0].behavior_logprobs_T[0] = NAN
        groups[2].rollouts[3].behavior_logprobs_T[1] = NAN
        said = self.cause(make_trainer(), groups)
        expected = (
            "group 0 rollout 2 (behavior log-probs); "
            "group 2 rollout 0 (behavior log-probs), 3 (behavior log-probs); lower trainer.learning_rate"
        )
        assert expected in said

    def test_a_reward_out_of_all_proportion(self, make_trainer, make_groups) -> None:
        groups = make_groups(((3, 4), (5, 6)), reward=lambda index: 1e300 if index == 1 else 0.5)
        said = self.cause(make_trainer(), groups)
        assert ": the reward of group 0 rollout 1 is 1e+300" in said and "learning_rate" not in said

    @pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"])
    def test_a_weight_with_a_flipped_bit(self, make_trainer, make_groups, name: str) -> None:
        """The highest one of the exponent. Where that makes no number infinite, it is named when somebody asks."""
        trainer, groups = make_trainer(), make_groups()
        assert trainer.outsized(groups) == ""
        with torch.no_grad():
            dict(trainer.model.named_parameters())[name].view(torch.int32)[3, 5] ^= 1 << 30
        expected = rf"{name} holds [\d.]+e\+3\d"
        assert re.match(expected, trainer.outsized())
        groups[0].rollouts[2].behavior_logprobs_T[4] = NAN
        said = self.cause(trainer, groups)
        assert re.search(expected, said) and "learning_rate" not in said

    def test_the_index_is_that_of_the_rollout_not_of_what_is_left(self, make_trainer, make_groups) -> None:
        """Rollouts without advantage are not computed."""
        groups = make_groups(((3, 4, 5, 6),), reward=lambda index: (1.0, 1.0, 0.0, 2.0)[index])
        groups[0].rollouts[3].behavior_logprobs_T[0] = NAN
        groups = [*groups, *make_groups(first_id=1)]
        assert "group 0 rollout 3 (behavior log-probs);" in self.cause(make_trainer(), groups)

    def test_one_embedding_row(self, make_trainer, make_groups) -> None:
        """What the forward makes of a token that nobody else has."""
        groups, trainer = make_groups(((4, 4), (4, 4))), make_trainer(shape={"tie_embeddings": False})
        for group in groups:
            for rollout in group.rollouts:
                rollout.token_ids_T[:] = rollout.token_ids_T % 40
            group.prompt.token_ids_T[:] %= 40
        groups[1].rollouts[1].token_ids_T[1] = 40
        with torch.no_grad():
            trainer.model.model.embed_tokens.weight[40] = NAN
        assert ": model.embed_tokens.weight holds nan" in self.cause(trainer, groups)
        trainer.outsized = lambda groups: ""
        assert ": group 1 rollout 1 (log-probs);" in self.cause(trainer, groups)

    def test_a_loss(self, make_trainer, make_groups) -> None:
        trainer = make_trainer()
        trainer.objective = replace(trainer.objective, loss=InfiniteLoss())
        groups = make_groups(((3, 4), (3, 4)), reward=float)
        said = self.cause(trainer, groups)
        assert "loss inf" in said
        assert "every group" in said

    def test_a_gradient_alone(self, make_trainer, make_groups) -> None:
        trainer, groups = make_trainer(), make_groups(((3, 4), (3, 4, 3)))
        trainer.objective = replace(trainer.objective, loss=InfiniteGradient())
        said = self.cause(trainer, groups)
        assert "microbatch" not in said, "all forwards were finite"
        assert "(gradient)" in said

    def test_weights(self, make_trainer, make_groups) -> None:
        trainer = make_trainer()
        with torch.no_grad():
            trainer.model.model.norm.weight[0] = NAN
        assert ": model.norm.weight holds nan" in self.cause(trainer, make_groups())
        trainer.outsized = lambda groups: ""
        assert "every group" in self.cause(trainer, make_groups())

    def test_looking_for_it_leaves_nothing(self, make_trainer, make_groups) -> None:
        trainer = make_trainer()
        groups = make_groups()
        groups[0].rollouts[0].behavior_logprobs_T[0] = NAN
        self.cause(trainer, groups)
        assert not any(weight.grad is not None and weight.grad.any() for weight in trainer.model.parameters())

    def test_it_looks_into_few_groups(self, make_groups) -> None:
        groups = make_groups(((2, 2, 2),) * 9)
        computed = [to_sample_group(group, np.ones(3)) for group in groups]
        asked = list[int]()

        def alone(some: Sequence[SampleGroup]) -> tuple[dict[str, float], float]:
            asked.append(sum(len(part.samples) for part in some))
            is_first = some[0].samples[0].token_ids_T is groups[0].rollouts[0].token_ids_T
            return {"loss": 0.0 if is_first and len(some[0].samples) == 3 else NAN}, 1.0

        said = find_cause(groups, computed, alone)
        assert asked.count(3) == 9
        assert asked.count(1) == 3 * MAX_NAMED_GROUPS
        assert said.startswith("group 1 rollout 0 (loss), 1 (loss), 2 (loss); group 2")
        assert said.endswith("; 4 more groups")

    def test_nobody_alone(self, make_groups) -> None:
        groups = make_groups()
        computed = [to_sample_group(group, np.ones(len(group.rollouts))) for group in groups]
        assert find_cause(groups, computed, lambda _: ({"loss": 1.0}, 1.0)).startswith("no single group")


class TestSkips:
    def poisoned(self, make_groups) -> list[RolloutGroup]:
        groups = make_groups()
        groups[1].rollouts[0].behavior_logprobs_T[0] = NAN
        return groups

    def test_so_many_in_a_row_end_the_run(self, make_trainer, make_groups) -> None:
        trainer = make_trainer(on_nonfinite="skip")
        for expected in (True, True, False, True, True):
            result = trainer.step(self.poisoned(make_groups) if expected else make_groups())
            assert result.skipped is expected
            assert ("group 1 rollout 0" in result.cause) is expected
        with pytest.raises(NonFiniteStep, match=r"step 5: .*group 1 rollout 0.*; 3 steps in a row"):
            trainer.step(self.poisoned(make_groups))
        assert trainer.policy_version == 5


def test_counts_that_float32_does_not_have_stay_exact() -> None:
    """They are read together with numbers in float32."""
    totals, count = Totals(), (1 << 24) + 1
    for loss in (1.0, 0.25):
        totals.add({"loss": torch.tensor(loss), "tokens": torch.tensor(count)}, {"length": torch.tensor(count)})
    logged, losses = totals.read()
    assert logged.sums == {"loss": 1.25, "tokens": 2.0 * count} and losses == [1.0, 0.25]
    assert logged.maxima == {"length": float(count)}
