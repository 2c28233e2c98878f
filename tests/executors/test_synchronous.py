"""S = 0 through controller, executors and weight sync is a straight synchronous loop, bit for bit.

Not covered: more than one thread or replica, where sums may be taken in another order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.checkpoint.store import CheckpointStore
from llamarl.config import RunConfig
from llamarl.config.schema import GeneratorConfig
from llamarl.data.sampler import PromptSampler
from llamarl.data.tokenizer import Tokenizer
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel
from llamarl.models.hf import load_model
from llamarl.run.folder import prepare_run_folder
from llamarl.run.prepare import prepare
from llamarl.run.train import run
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import GenerationRequest, Prompt, RewardItem, Rollout, RolloutGroup, SamplingParams
from tests.end_to_end.tiny import rows
from tests.executors.rewards import EvenLength

STEPS, PROMPTS, GROUP = 5, 3, 4


def settings(model: Path, output: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "synchronous",
            "output": str(output),
            "seed": 3,
            "steps": STEPS,
            "model": {"path": str(model)},
            "data": {"train": {"name": "running_total", "count": 7}},
            "rollout": {
                "prompts_per_step": PROMPTS,
                "group_size": GROUP,
                "max_staleness": 0,
                "max_new_tokens": 24,
                "temperature": 0.8,
            },
            "trainer": {"learning_rate": 0.01, "warmup_steps": 2, "microbatch_tokens": 128},
            "reward": {"parts": [{"name": "tests.executors.rewards:EvenLength"}]},
            "cluster": {"kind": "inline"},
            "screen": {"kind": "none"},
        }
    )


def straight_loop(config: RunConfig) -> tuple[list[Rollout], dict[str, torch.Tensor]]:
    """Generate, score, train, copy the weights; what it generated and the last weights."""
    problems = prepare(config).problems
    sampler = PromptSampler(len(problems.train), config.seed)
    first = load_model(config.model.path, torch.float32, "cpu")
    generator = GeneratorModel(first.shape, "float32", "cpu")
    generator.load(first)
    limits = GeneratorConfig()
    engine = Engine(
        generator, EngineSettings(max_running=limits.max_running, prefill_tokens=limits.prefill_tokens, kv_bytes=None)
    )
    trainer = Trainer(
        load_model(config.model.path, torch.float32, "cpu"),
        config.trainer,
        Objective(loss=Aipo(), advantage=GroupMean(), temperature=config.rollout.temperature),
    )
    sampling = SamplingParams(
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        stop_token_ids=problems.stop_token_ids,
        seed=config.seed,
    )
    tokenizer, everything = Tokenizer(config.model.path), list[Rollout]()
    for step in range(config.steps):
        prompts = {PROMPTS * step + n: problems.train[sampler.next()] for n in range(PROMPTS)}
        engine.set_version(step)
        engine.submit(
            [
                GenerationRequest(
                    group_id=number, prompt_token_ids_T=prompt.token_ids_T, group_size=GROUP, sampling=sampling
                )
                for number, prompt in prompts.items()
            ]
        )
        finished = list[Rollout]()
        while engine.has_work:
            finished += engine.step()
        finished.sort(key=lambda rollout: (rollout.group_id, rollout.index))
        everything += finished
        groups = [_scored(number, prompt, finished, tokenizer) for number, prompt in prompts.items()]
        trainer.step(groups)
        generator.load(trainer.model)
    return everything, dict(trainer.model.named_parameters())


def _scored(number: int, prompt: Prompt, finished: list[Rollout], tokenizer: Tokenizer) -> RolloutGroup:
    rollouts = tuple(rollout for rollout in finished if rollout.group_id == number)
    texts = tuple(tokenizer.decode(rollout.token_ids_T) for rollout in rollouts)
    items = [RewardItem(prompt=prompt.text, response=text, answer="", metadata={}) for text in texts]
    results = tuple(EvenLength().score(items))
    return RolloutGroup(group_id=number, prompt=prompt, rollouts=rollouts, results=results, responses=texts)


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return settings(model, tmp_path_factory.mktemp("runs"))


def test_a_run_with_staleness_zero_is_a_straight_loop(config: RunConfig) -> None:
    folder = prepare_run_folder(config, resume=False, overwrite=False)
    summary = run(config, prepare(config), folder, resume=False, command_started_s=0.0)
    assert (summary.steps, summary.staleness_max) == (STEPS, 0)
    rollouts, weights = straight_loop(config)

    recorded = rows(folder.rollouts)
    assert len(recorded) == len(rollouts) == STEPS * PROMPTS * GROUP
    assert len({row["reward"] for row in recorded}) > 1, "nothing was learnt, so nothing was compared"
    for row, rollout in zip(recorded, rollouts, strict=True):
        assert (row["group_id"], row["index"]) == (rollout.group_id, rollout.index)
        assert row["token_ids"] == rollout.token_ids_T.tolist()
        assert row["policy_versions"] == [[row["step"] - 1, rollout.num_tokens]]
        assert np.array_equal(np.array(row["behavior_logprobs"], np.float32), rollout.behavior_logprobs_T)

    checkpoint, damaged = CheckpointStore(folder.checkpoints, keep=2).load_newest()
    assert checkpoint is not None and checkpoint.step == STEPS and not damaged
    start = dict(load_model(config.model.path, torch.float32, "cpu").named_parameters())
    for name, weight in weights.items():
        assert torch.equal(checkpoint.read(name), weight), name
        assert not torch.equal(start[name], weight), f"{name} was not trained"
