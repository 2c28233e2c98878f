"""The log-probabilities that a generator reports are those that the trainer computes, and after a sync still are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.config import RunConfig
from llamarl.config.schema import GeneratorConfig
from llamarl.executors.generator import GeneratorExecutor
from llamarl.executors.trainer import TrainerExecutor
from llamarl.rollouts.packing import pack, to_sample_group
from llamarl.training.result import StepResult
from llamarl.types import GenerationRequest, Outcome, Prompt, RewardResult, Rollout, RolloutGroup, SamplingParams

TEMPERATURE, GROUP = 0.7, 3
TOLERANCE = 1e-4


def settings(model: Path, **rollout: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": "running_total"},
            "rollout": {"temperature": TEMPERATURE, "group_size": GROUP, **rollout},
            "trainer": {"learning_rate": 0.02},
        }
    )


def requests(first: int, max_new_tokens: int = 40) -> list[GenerationRequest]:
    """Prompts of 1 to 60 tokens."""
    random = np.random.default_rng(first)
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=max_new_tokens, stop_token_ids=(0,), seed=5)
    return [
        GenerationRequest(
            group_id=first + number,
            prompt_token_ids_T=random.integers(1, 250, length).astype(np.int32),
            group_size=GROUP,
            sampling=sampling,
        )
        for number, length in enumerate((1, 16, 17, 60))
    ]


def collected(generator: GeneratorExecutor, count: int) -> list[Rollout]:
    rollouts = list[Rollout]()
    while len(rollouts) < count:
        reply = generator.collect()
        while not reply.done():
            assert generator.work()
        rollouts += reply.result().rollouts
    return rollouts


def scored(asked: list[GenerationRequest], rollouts: list[Rollout]) -> list[RolloutGroup]:
    groups = []
    for request in asked:
        members = sorted((r for r in rollouts if r.group_id == request.group_id), key=lambda r: r.index)
        prompt = Prompt(prompt_id="p", text="", token_ids_T=request.prompt_token_ids_T, answer="")
        results = tuple(RewardResult(outcome=Outcome.SCORE, value=float(n == 0)) for n in range(GROUP))
        groups.append(
            RolloutGroup(
                group_id=request.group_id, prompt=prompt, rollouts=tuple(members), results=results,
                responses=("",) * GROUP,
            )
        )  # fmt: skip
    return groups


def recomputed(trainer: TrainerExecutor, groups: list[RolloutGroup]) -> tuple[np.ndarray, np.ndarray]:
    """(behavior, trainer's) log-probabilities of all response tokens."""
    samples = [to_sample_group(group, np.ones(GROUP)) for group in groups]
    behavior, own = [], []
    with torch.no_grad():
        for microbatch in pack(samples, 256):
            behavior.append(microbatch.behavior_logprobs_R)
            own.append(trainer._trainer.logprobs(microbatch).numpy())
    return np.concatenate(behavior), np.concatenate(own)


@pytest.fixture
def trainer(model: Path, tmp_path: Path) -> TrainerExecutor:
    return TrainerExecutor(settings(model), str(tmp_path), resume=False)


@pytest.fixture
def generator(model: Path) -> GeneratorExecutor:
    return GeneratorExecutor(str(model), GeneratorConfig(max_running=8, prefill_tokens=32))


def stepped(trainer: TrainerExecutor, generator: GeneratorExecutor, version: int) -> StepResult:
    asked = requests(100 * version)
    generator.submit(asked)
    groups = scored(asked, collected(generator, 4 * GROUP))
    trainer.add_groups(groups)
    return trainer.step([group.group_id for group in groups])


def test_behavior_logprobs_are_the_trainer_s_before_and_after_syncs(
    trainer: TrainerExecutor, generator: GeneratorExecutor
) -> None:
    specs = generator.weight_specs()
    seen = list[np.ndarray]()
    for version in range(3):
        generator.adopt(version, trainer.publish(version, specs))
        asked = requests(1000)
        generator.submit(asked)
        groups = scored(asked, collected(generator, 4 * GROUP))
        assert {int(v) for group in groups for r in group.rollouts for v in r.policy_versions_T} == {version}
        behavior, own = recomputed(trainer, groups)
        assert len(own) > 100
        np.testing.assert_allclose(own, behavior, atol=TOLERANCE, rtol=0)
        seen.append(own)
        result = stepped(trainer, generator, version)
        assert result.policy_version == version + 1
        assert result.metrics["importance_ratio_mean"] == pytest.approx(1.0, abs=TOLERANCE)
    assert not any(
        len(a) == len(b) and np.allclose(a, b, atol=100 * TOLERANCE) for a in seen for b in seen if a is not b
    )


def test_weights_without_a_sync_are_not_the_trainer_s(trainer: TrainerExecutor, generator: GeneratorExecutor) -> None:
    """The test above can fail: one step without adoption is far outside its tolerance."""
    generator.adopt(0, trainer.publish(0, generator.weight_specs()))
    stepped(trainer, generator, 0)
    asked = requests(1000)
    generator.submit(asked)
    behavior, own = recomputed(trainer, scored(asked, collected(generator, 4 * GROUP)))
    assert np.abs(own - behavior).max() > 100 * TOLERANCE


def test_weights_arrive_between_two_tokens(trainer: TrainerExecutor, generator: GeneratorExecutor) -> None:
    """Rollouts go on under new weights; each token is stamped with, and was sampled from, the version of its moment."""
    specs = generator.weight_specs()
    generator.adopt(0, trainer.publish(0, specs))
    stepped(trainer, generator, 0)
    asked = requests(500, max_new_tokens=60)
    generator.submit(asked)
    for _ in range(12):
        generator.work()
    assert generator.adopt(1, trainer.publish(1, specs)) < 1.0
    rollouts = collected(generator, 4 * GROUP)
    mixed = [r for r in rollouts if set(r.policy_versions_T.tolist()) == {0, 1}]
    assert mixed
    assert all((np.diff(rollout.policy_versions_T) >= 0).all() for rollout in rollouts)
    assert all(rollout.oldest_version == 0 for rollout in mixed)


def test_an_aborted_group_comes_back_with_its_tokens(generator: GeneratorExecutor) -> None:
    asked = requests(0)
    generator.submit(asked)
    for _ in range(8):
        generator.work()
    generator.abort([asked[0].group_id])
    rollouts = collected(generator, 4 * GROUP)
    aborted = [rollout for rollout in rollouts if rollout.finish_reason == "aborted"]
    assert {rollout.group_id for rollout in aborted} == {asked[0].group_id}
    assert all(rollout.num_tokens > 0 for rollout in aborted)
