"""`Trainer.step`: accumulation, clipping, rates, decay, non-finite policies, and state that resumes bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.algorithms.losses._base import LossInputs, LossOutput
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.algorithms.losses.decoupled_ppo import DecoupledPpo
from llamarl.checkpoint import store as store_module
from llamarl.checkpoint.store import Checkpoint, CheckpointStore
from llamarl.config.schema import TrainerConfig
from llamarl.training.optimizer import build_optimizer, learning_rate_at
from llamarl.training.packing import pack, to_sample_group
from llamarl.training.result import NonFiniteStep, PolicyStepResult
from llamarl.training.state import StateMismatch, load_training_state, training_state
from llamarl.training.trainer import Trainer
from llamarl.types import Outcome, RolloutGroup
from tests.training.layouts import logged


def step_with_gradient(trainer: Trainer, groups: Sequence[RolloutGroup]) -> tuple[PolicyStepResult, dict[str, Tensor]]:
    """One step, and the gradient that the optimizer saw."""
    seen = dict[str, Tensor]()

    def keep(*_: object) -> None:
        for name, weight in trainer.model.named_parameters():
            if weight.grad is not None:
                seen[name] = weight.grad.clone()

    hook = trainer.optimizer.register_step_pre_hook(keep)
    try:
        return trainer.step(groups), seen
    finally:
        hook.remove()


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and moments, in one dictionary."""
    return {name: value.clone() for name, (_, value) in trainer.shards().items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def norm(gradient: dict[str, Tensor]) -> float:
    return float(torch.stack([grad.double().norm() for grad in gradient.values()]).norm())


class TestAccumulation:
    def budget_for(self, groups: list[RolloutGroup], count: int) -> int:
        """A token budget that gives `count` microbatches."""
        samples = [to_sample_group(group, np.zeros(len(group.rollouts))) for group in groups]
        return next(budget for budget in range(1, 200) if len(pack(samples, budget)) == count)

    @pytest.mark.parametrize("count", [2, 5, 7])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
    def test_microbatches_do_not_change_the_gradient(
        self, make_trainer, make_groups, dtype: torch.dtype, tolerance: float, count: int
    ) -> None:
        groups = make_groups()
        whole_result, whole = step_with_gradient(make_trainer(dtype), groups)
        trainer = make_trainer(dtype, microbatch_tokens=self.budget_for(groups, count))
        result, parts = step_with_gradient(trainer, groups)
        difference = norm({name: parts[name] - whole[name] for name in whole}) / norm(whole)
        assert difference < tolerance
        found = logged(result)
        for name, value in logged(whole_result).items():
            if name != "num_input_tokens":  # a group that is cut in two repeats its prompt
                assert found[name] == pytest.approx(value, rel=1e-5), name

    def test_the_gradient_is_per_trainable_token(self, make_trainer, make_groups) -> None:
        """The same groups twice have the same mean gradient; invalid groups beside them change nothing."""
        groups = make_groups()
        invalid = make_groups(first_id=3, outcome=Outcome.INVALID)
        _, once = step_with_gradient(make_trainer(torch.float64), groups)
        for batch in ([*groups, *groups], [*groups, *invalid]):
            _, other = step_with_gradient(make_trainer(torch.float64), batch)
            assert norm({name: other[name] - once[name] for name in once}) < 1e-12 * norm(once)

    def test_loss_is_the_mean_over_tokens(self, make_trainer, make_groups) -> None:
        """AIPO by hand on the log-probs that the trainer computes."""
        groups = make_groups()
        trainer = make_trainer(torch.float64)
        samples = [to_sample_group(group, trainer.step(groups).advantages[group.group_id]) for group in groups]
        trainer = make_trainer(torch.float64)
        (batch,) = pack(samples, 1000)
        logprobs_R = trainer.logprobs(batch).detach()
        ratio_R = (logprobs_R - torch.from_numpy(batch.behavior_logprobs_R)).exp()
        loss_R = -ratio_R.clamp(max=4.0) * torch.from_numpy(batch.advantages_R) * logprobs_R
        metrics = logged(trainer.step(groups))
        assert metrics["loss"] == pytest.approx(float(loss_R.mean()), rel=1e-9)
        assert metrics["importance_ratio_mean"] == pytest.approx(float(ratio_R.mean()), rel=1e-9)
        assert metrics["importance_ratio_max"] == pytest.approx(float(ratio_R.max()), rel=1e-9)
        assert metrics["capped_share"] == pytest.approx(float((ratio_R > 4).double().mean()))
        assert metrics["num_loss_tokens"] == len(logprobs_R)


def test_rows_of_ids_without_a_token_are_not_trained(make_trainer, make_groups) -> None:
    """A padded model learns as it would without its padding."""
    groups = make_groups()
    padded = make_trainer(torch.float64, shape={"vocab_size": 48, "unused_ids": ((41, 48),), "tie_embeddings": False})
    plain = make_trainer(torch.float64, shape={"tie_embeddings": False})
    with torch.no_grad():
        weights = dict(plain.model.named_parameters())
        for name, weight in padded.model.named_parameters():
            weight[: len(weights[name])] = weights[name]
        padded.model.head_weight_V_D[41:] *= 100
    (result, gradient), (without, expected) = (step_with_gradient(one, groups) for one in (padded, plain))
    for name, grad in gradient.items():
        torch.testing.assert_close(grad[: len(expected[name])], expected[name], rtol=1e-9, atol=1e-12)
        assert not grad[len(expected[name]) :].any(), name
    assert result.update.loss == pytest.approx(without.update.loss, rel=1e-9)


@pytest.mark.parametrize("num_flat", [1, 2, 5], ids=["some flat", "most flat", "all flat"])
def test_the_divergence_from_the_reference_is_over_all_tokens(make_trainer, make_groups, num_flat: int) -> None:
    """Of groups that teach nothing, too, which are not computed."""
    sizes = ((5, 1), (3, 3), (2, 7), (4, 4), (1, 2))
    groups = make_groups(sizes[num_flat:]) + make_groups(sizes[:num_flat], reward=lambda _: 1.0, first_id=10)
    trainer = make_trainer(torch.float64)
    (batch,) = pack([to_sample_group(group, np.zeros(2)) for group in groups], 1000)
    logprobs_R = trainer.logprobs(batch).detach().numpy()
    ends, expected, at = np.cumsum([0, *(n for group in groups for n in group_lengths(group))]), 0.0, 0
    rng = np.random.default_rng(1)
    with_reference = []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            own_T = logprobs_R[ends[at] : ends[at + 1]]
            reference_T = (own_T - rng.random(len(own_T))).astype(np.float32)
            columns = {"behavior_logprobs": own_T.astype(np.float32), "reference_logprobs": reference_T}
            rollouts.append(replace(rollout, columns=rollout.columns | columns))
            x_T = own_T.astype(np.float64) - reference_T
            expected, at = expected + float((np.expm1(-x_T) + x_T).sum()), at + 1
        with_reference.append(replace(group, rollouts=tuple(rollouts)))
    found = trainer.step(with_reference).metrics
    assert found["kl_to_reference"] == pytest.approx(expected / ends[-1], rel=1e-5)
    assert found["num_computed_tokens"] == sum(sum(group_lengths(group)) for group in groups[: 5 - num_flat])


def group_lengths(group: RolloutGroup) -> list[int]:
    return [rollout.num_tokens for rollout in group.rollouts]


class TestReport:
    def test_advantages_of_every_group(self, make_trainer, make_groups) -> None:
        groups = make_groups()
        result = make_trainer().step(groups)
        np.testing.assert_allclose(result.advantages[0], np.array([0, 1, 4]) - 5 / 3)
        np.testing.assert_allclose(result.advantages[1], [-0.5, 0.5])
        assert (result.policy_version, result.skipped) == (1, False)

    @pytest.mark.parametrize(
        "nothing", [{"outcome": Outcome.INVALID}, {"reward": lambda _: 0.1}], ids=["all invalid", "equal rewards"]
    )
    def test_nothing_to_learn_is_a_step_without_gradient(self, make_trainer, make_groups, nothing: dict) -> None:
        trainer = make_trainer()
        before = snapshot(trainer)
        result, gradient = step_with_gradient(trainer, make_groups(**nothing))
        assert all((grad == 0).all() for grad in gradient.values())
        after = snapshot(trainer)
        assert_same_bits({name: after[name] for name in before}, before)
        assert (result.policy_version, result.skipped) == (1, False)
        assert (result.update.loss, result.update.grad_norm, result.metrics["num_computed_tokens"]) == (0, 0, 0)
        update = result.update
        ratios = (update.importance_ratio_mean, update.importance_ratio_max, update.capped_share, update.kl_to_behavior)
        assert ratios == (None,) * 4, "nobody has measured them, so they are not 1 and 0"
        assert all((advantages_G == 0).all() for advantages_G in result.advantages.values())

    def test_momentum_goes_on_without_gradient(self, make_trainer, make_groups) -> None:
        trainer = make_trainer()
        trainer.step(make_groups())
        before = snapshot(trainer)
        trainer.step(make_groups(outcome=Outcome.INVALID))
        after = snapshot(trainer)
        assert not any(torch.equal(after[name], before[name]) for name in before if ":" not in name)

    def test_uncomputed_samples_had_no_gradient(self, make_trainer, make_groups) -> None:
        """Leaving out samples whose advantage is 0 changes neither gradient nor loss."""

        class Everything(Aipo):
            LEARNS_WITHOUT_ADVANTAGE = True

        groups = make_groups(reward=lambda index: float(index % 3))
        thrifty, thorough = make_trainer(torch.float64), make_trainer(torch.float64)
        thorough.objective = replace(thorough.objective, loss=Everything())
        result, gradient = step_with_gradient(thrifty, groups)
        full_result, full_gradient = step_with_gradient(thorough, groups)
        assert result.metrics["num_computed_tokens"] < full_result.metrics["num_computed_tokens"]
        assert result.update.num_loss_tokens == full_result.update.num_loss_tokens
        assert result.update.loss == pytest.approx(full_result.update.loss, rel=1e-12)
        assert norm({name: gradient[name] - full_gradient[name] for name in gradient}) < 1e-13 * norm(gradient)

    def test_it_learns(self, make_trainer, make_groups) -> None:
        """Ascent: log-probs of better responses rise against those of worse ones."""
        groups = make_groups(((6, 6),))
        trainer = make_trainer(learning_rate=1e-3)
        (batch,) = pack([to_sample_group(groups[0], np.array([-1.0, 1.0]))], 1000)
        sign_R = torch.from_numpy(batch.advantages_R)
        before = float((trainer.logprobs(batch).detach() * sign_R).sum())
        for _ in range(5):
            trainer.step(groups)
        assert float((trainer.logprobs(batch).detach() * sign_R).sum()) > before + 0.1


class TestPasses:
    def test_without_a_proximal_policy_two_passes_are_two_steps(self, make_trainer, make_groups) -> None:
        groups = make_groups()
        once, twice = make_trainer(), make_trainer(passes=2)
        steps = [once.step(groups), once.step(groups)]
        result = twice.step(groups)
        weights = (dict(trainer.model.named_parameters()) for trainer in (once, twice))
        assert_same_bits(*({name: weight.detach() for name, weight in named.items()} for named in weights))
        assert (once.policy_version, twice.policy_version) == (2, 1)
        for name in ("loss", "kl_to_behavior", "importance_ratio_mean"):
            assert logged(result)[name] == pytest.approx(np.mean([logged(step)[name] for step in steps]), rel=1e-5)
        assert result.metrics["num_flops"] == sum(step.metrics["num_flops"] for step in steps)

    def test_later_passes_stay_near_the_policy_before_the_first(self, make_trainer, make_groups) -> None:
        """In the first pass the ratio to it is 1; then what moved the way of its advantage is clipped."""
        capped = []
        for passes in (1, 2):
            trainer = make_trainer(passes=passes)
            trainer.objective = replace(trainer.objective, loss=DecoupledPpo(clip=1e-6, max_weight=1e9))
            capped.append(trainer.step(make_groups()).update.capped_share)
        assert capped[0] == 0
        assert 0.3 < capped[1] <= 0.5, "most tokens moved the right way; the mean is over both passes"

    def test_a_pass_that_is_not_finite_ends_the_step(self, make_trainer, make_groups) -> None:
        class OnceInfinite(Aipo):
            def __call__(self, inputs: LossInputs) -> LossOutput:
                output = super().__call__(inputs)
                return (
                    output if inputs.proximal_logprobs_N is not None else replace(output, loss=output.loss * torch.inf)
                )

        trainer = make_trainer(passes=3, on_nonfinite="skip")
        trainer.objective = replace(trainer.objective, loss=OnceInfinite())
        result = trainer.step(make_groups())
        assert result.skipped and "step 0 pass 1 of 3: loss " in result.cause
        assert trainer.policy_version == 1


class TestOptimizer:
    def test_clipping(self, make_trainer, make_groups) -> None:
        groups = make_groups()
        free_result, free = step_with_gradient(make_trainer(), groups)
        limit = free_result.update.grad_norm / 10
        result, clipped = step_with_gradient(make_trainer(max_grad_norm=limit), groups)
        assert free_result.update.grad_norm == pytest.approx(norm(free), rel=1e-5)
        assert result.update.grad_norm == pytest.approx(norm(free), rel=1e-5), "reported before clipping"
        assert norm(clipped) == pytest.approx(limit, rel=1e-3)
        direction = norm({name: clipped[name] * 10 - free[name] for name in free})
        assert direction < 1e-3 * norm(free)

    def test_warm_up(self, make_trainer, make_groups) -> None:
        config = TrainerConfig(learning_rate=1.0, warmup_steps=4)
        assert [learning_rate_at(step, config) for step in range(7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])
        assert learning_rate_at(0, TrainerConfig(learning_rate=0.5)) == 0.5

        trainer, groups = make_trainer(learning_rate=1e-3, warmup_steps=1), make_groups()
        moved = list[float]()
        for _ in range(2):
            before = snapshot(trainer)
            result = trainer.step(groups)
            assert result.update.learning_rate == trainer.optimizer.param_groups[0]["lr"]
            after = snapshot(trainer)
            moved.append(max(float((after[name] - before[name]).abs().max()) for name in before if ":" not in name))
        assert moved[0] == pytest.approx(0.5e-3, rel=0.01), "the first AdamW step has the size of the rate"
        assert moved[1] > 0.7e-3

    def test_only_matrices_decay(self, make_model) -> None:
        model = make_model(family="qwen2")
        optimizer = build_optimizer(model.parameters(), TrainerConfig(learning_rate=0.1, weight_decay=0.5))
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        for name, weight in model.named_parameters():
            factor = 1 - 0.1 * 0.5 if weight.ndim == 2 else 1.0
            torch.testing.assert_close(weight.detach(), before[name] * factor, msg=name)
        assert {weight.ndim for weight in model.parameters()} == {1, 2}
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)


def poisoned(groups: list[RolloutGroup], value: float = float("nan")) -> list[RolloutGroup]:
    """The last group's behavior log-probs are no numbers, as after a broken generator."""
    groups[-1].rollouts[1].behavior_logprobs_T[0] = value
    return groups


class TestNonFinite:
    def test_stop_changes_nothing(self, make_trainer, make_groups) -> None:
        trainer = make_trainer(microbatch_tokens=12)
        trainer.step(make_groups())
        before = snapshot(trainer)
        with pytest.raises(
            NonFiniteStep, match=r"microbatch 4 of 5: group 2 rollout 1 \(behavior log-probs\)"
        ) as error:
            trainer.step(poisoned(make_groups(seed=1)))
        assert "on_nonfinite" in str(error.value)
        assert_same_bits(snapshot(trainer), before)
        assert trainer.policy_version == 1
        assert not any(weight.grad is not None and weight.grad.any() for weight in trainer.model.parameters())

    def test_skip_counts_the_step_and_goes_on(self, make_trainer, make_groups) -> None:
        trainer, never_poisoned = (make_trainer(on_nonfinite="skip", microbatch_tokens=12) for _ in range(2))
        for each in (trainer, never_poisoned):
            each.step(make_groups())
        before = snapshot(trainer)
        result = trainer.step(poisoned(make_groups(seed=1)))
        assert (result.skipped, result.policy_version) == (True, 2)
        assert_same_bits(snapshot(trainer), before)
        result = trainer.step(make_groups(seed=2))
        assert (result.skipped, result.policy_version) == (False, 3)
        never_poisoned.step(make_groups(seed=2))
        assert_same_bits(snapshot(trainer), snapshot(never_poisoned))

    def test_an_infinite_weight_is_found(self, make_trainer, make_groups) -> None:
        trainer = make_trainer()
        with torch.no_grad():
            next(trainer.model.parameters())[3, 3] = torch.inf
        with pytest.raises(NonFiniteStep):
            trainer.step(make_groups())

    def test_extreme_ratios_are_finite(self, make_trainer, make_groups) -> None:
        for behavior in (-200.0, 0.0):
            groups = make_groups()
            for group in groups:
                for rollout in group.rollouts:
                    rollout.behavior_logprobs_T[:] = behavior
            assert not make_trainer().step(groups).skipped


def saved(store: CheckpointStore, trainer: Trainer) -> Checkpoint:
    """What a checkpoint of it holds."""
    store.save(trainer.policy_version, trainer.shards(), training_state(trainer)).result(240)
    committed = store.commit()
    assert committed is not None
    committed.result(240)
    return store.load(trainer.policy_version)


def load(trainer: Trainer, checkpoint: Checkpoint) -> None:
    load_training_state(trainer, checkpoint.shapes, checkpoint.read, checkpoint.state)


class TestResume:
    def test_equals_the_uninterrupted_run(self, make_trainer, make_groups, tmp_path: Path) -> None:
        batches = [make_groups(seed=seed) for seed in range(4)]
        settings = {"warmup_steps": 3, "weight_decay": 0.01, "max_grad_norm": 0.1}
        straight, first, resumed = (make_trainer(**settings) for _ in range(3))
        results = [straight.step(batch) for batch in batches]

        for batch in batches[:2]:
            first.step(batch)
        resumed.step(batches[3])  # whatever it held before is replaced, moments included
        load(resumed, saved(CheckpointStore(tmp_path, keep=1), first))
        assert_same_bits(snapshot(resumed), snapshot(first))
        again = [resumed.step(batch) for batch in batches[2:]]
        assert_same_bits(snapshot(resumed), snapshot(straight))
        assert list(map(logged, again)) == list(map(logged, results[2:]))
        assert resumed.policy_version == 4

    def test_training_leaves_the_checkpoint_alone(
        self, make_trainer, make_groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step before the file is written does not change what it will hold, nor does one after it was loaded."""
        store, trainer = CheckpointStore(tmp_path, keep=1), make_trainer()
        trainer.step(make_groups())
        before, write, may_write = snapshot(trainer), store_module._write, threading.Event()
        monkeypatch.setattr(store_module, "_write", lambda *what: may_write.wait(240) and write(*what))
        written = store.save(1, trainer.shards(), training_state(trainer))
        trainer.step(make_groups(seed=1))
        assert not written.done()
        may_write.set()
        written.result(240)
        store.commit().result(240)
        for _ in range(2):
            load(trainer, store.load(1))
            assert_same_bits(snapshot(trainer), before)
            trainer.step(make_groups(seed=2))

    def test_random_numbers_go_on(self, make_trainer, tmp_path: Path) -> None:
        trainer = make_trainer()
        torch.manual_seed(3)
        torch.rand(5)
        checkpoint = saved(CheckpointStore(tmp_path, keep=1), trainer)
        expected = torch.rand(5)
        load(trainer, checkpoint)
        assert torch.equal(torch.rand(5), expected)

    def test_before_the_first_step_there_are_no_moments(self, make_trainer, make_groups, tmp_path: Path) -> None:
        fresh, trainer = make_trainer(), make_trainer()
        trainer.step(make_groups())
        load(trainer, saved(CheckpointStore(tmp_path, keep=1), fresh))
        assert_same_bits(snapshot(trainer), snapshot(fresh))

    @pytest.mark.parametrize(
        "shape", [{"num_layers": 3}, {"intermediate_size": 48}, {"tie_embeddings": False}], ids=str
    )
    def test_another_models_state_is_refused(self, make_trainer, make_groups, tmp_path: Path, shape: dict) -> None:
        other, trainer = make_trainer(shape=shape), make_trainer()
        other.step(make_groups())
        checkpoint, before = saved(CheckpointStore(tmp_path, keep=1), other), snapshot(trainer)
        with pytest.raises(StateMismatch, match=r"other weights"):
            load(trainer, checkpoint)
        assert_same_bits(snapshot(trainer), before)
        assert trainer.policy_version == 0
