"""What executors are started with."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llamarl.algorithms.advantages._base import ValueAdvantage
from llamarl.cluster.api import ExecutorSpec
from llamarl.config import RunConfig, build
from llamarl.config.schema import CriticConfig, GeneratorConfig, ReferenceConfig, RewardModelConfig


def executor_spec(name: str, target: str, threads: int, num_ranks: int = 1, **options: Any) -> ExecutorSpec:
    """`target` is `module:Class` below `llamarl.executors`; `threads` are those of one rank."""
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return ExecutorSpec(name=name, target=f"llamarl.executors.{target}", options=options, num_ranks=num_ranks, env=env)


def models_in_use(config: RunConfig) -> dict[str, ReferenceConfig | CriticConfig | RewardModelConfig]:
    """Settings of the models beside policy and rule-based reward that the config asks for. Raises ConfigError."""
    found = dict[str, ReferenceConfig | CriticConfig | RewardModelConfig]()
    if config.reward.model:
        found["reward-model"] = config.reward.model
    if config.reference.kl_coefficient:
        found["reference"] = config.reference
    advantage = build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage")
    if isinstance(advantage, ValueAdvantage):
        found["critic"] = config.critic
    return found


def model_specs(config: RunConfig, checkpoints: Path) -> list[ExecutorSpec]:
    """One executor for each of `models_in_use`."""
    targets = {
        "reward-model": "reward_model:RewardModelExecutor",
        "reference": "reference:ReferenceExecutor",
        "critic": "critic:CriticExecutor",
    }
    options: dict[str, dict[str, Any]] = {"critic": {"folder": str(checkpoints / "critic")}}
    return [
        executor_spec(name, targets[name], settings.threads, config=config, **options.get(name, {}))
        for name, settings in models_in_use(config).items()
    ]


class GeneratorSpecs:
    """Generators of one run: numbered, and each with a place of its own where its ranks meet."""

    def __init__(self, model_path: str, config: GeneratorConfig, delta: bool, folder: Path) -> None:
        self._model_path = model_path
        self._config = config
        self._delta = delta
        self._folder = folder

    def __call__(self, number: int) -> ExecutorSpec:
        return executor_spec(
            f"generator-{number}", "generator:GeneratorExecutor", self._config.threads, self._config.tensor_parallel,
            model_path=self._model_path, config=self._config, delta=self._delta,
            meeting=str(self._folder / f"generator-{number}-{secrets.token_hex(4)}"),
        )  # fmt: skip


@contextmanager
def generator_specs(model_path: str, config: GeneratorConfig, *, delta: bool = False) -> Iterator[GeneratorSpecs]:
    """Their meeting places lie in a folder that only this user may enter, as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        yield GeneratorSpecs(model_path, config, delta, Path(folder))
