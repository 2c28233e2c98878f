"""What executors are started with, and their start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

from llamarl.algorithms.advantages._base import ValueAdvantage
from llamarl.cluster.api import Cluster, ExecutorHandle, ExecutorSpec, RemoteError
from llamarl.config import ConfigError, build
from llamarl.config.schema import CriticConfig, GeneratorConfig, ReferenceConfig, RewardModelConfig, RunConfig
from llamarl.config.trainer import LoraConfig
from llamarl.distributed.rendezvous import Rendezvous, RendezvousStore
from llamarl.generation.vllm_server import VllmSettings

VLLM_START_SHARE = 0.8
"""Of the longest wait for an executor; the rest is for its process, and to hear why vLLM did not start."""


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


def model_specs(
    config: RunConfig, checkpoints: Path, rendezvous: Callable[[int], Rendezvous | None]
) -> list[ExecutorSpec]:
    """One executor for each of `models_in_use`.

    Args:
        checkpoints: the run's.
        rendezvous: of an executor with so many ranks.
    """
    targets = {
        "reward-model": "reward_model:RewardModelExecutor",
        "reference": "reference:ReferenceExecutor",
        "critic": "critic:CriticExecutor",
    }
    num_ranks, options = config.critic.parallelism.num_ranks, dict[str, dict[str, Any]]()
    meets = rendezvous(num_ranks)
    options["critic"] = {"num_ranks": num_ranks, "checkpoint_folder": str(checkpoints), "rendezvous": meets}
    return [
        executor_spec(name, targets[name], settings.threads, config=config, **options.get(name, {}))
        for name, settings in models_in_use(config).items()
    ]


class GeneratorSpecs:
    """Generators of one run: numbered, and each with a rendezvous of its own for its ranks."""

    def __init__(
        self,
        model_path: str,
        config: GeneratorConfig,
        delta: bool,
        vllm: VllmSettings | None,
        lora: LoraConfig | None,
        stores: ExitStack,
        choices: Path | None,
    ) -> None:
        self._model_path = model_path
        self._config = config
        self._delta = delta
        self._vllm = vllm
        self._lora = lora
        self._stores = stores
        self._choices = str(choices or "")

    def __call__(self, number: int) -> ExecutorSpec:
        name, vllm = f"generator-{number}", self._vllm
        if vllm is not None:
            log_path = Path(vllm.log_path or "").with_name(f"{name}.vllm.log")
            vllm = replace(vllm, seed=crc32(f"{vllm.seed}/{number}".encode()), log_path=str(log_path))
        return executor_spec(
            name, "generator:GeneratorExecutor", self._config.threads, self._config.tensor_parallel,
            model_path=self._model_path, config=self._config, delta=self._delta, vllm=vllm,
            lora=self._lora, choices=self._choices, rendezvous=self.rendezvous(self._config.tensor_parallel),
        )  # fmt: skip

    def rendezvous(self, num_ranks: int) -> Rendezvous | None:
        """A new one for ranks of an executor; None: one rank has nobody to meet."""
        return self._stores.enter_context(closing(RendezvousStore())).rendezvous if num_ranks > 1 else None


@contextmanager
def generator_specs(
    model_path: str,
    config: GeneratorConfig,
    *,
    delta: bool = False,
    vllm: VllmSettings | None = None,
    lora: LoraConfig | None = None,
    choices: Path | None = None,
) -> Iterator[GeneratorSpecs]:
    """Ranks can meet as long as the context lasts.

    Args:
        choices: folder of the run that keeps which kernels serve; None: nothing is kept.
    """
    with ExitStack() as stores:
        yield GeneratorSpecs(model_path, config, delta, vllm, lora, stores, choices)


def vllm_settings(config: RunConfig, logs: Path) -> VllmSettings | None:
    """How a run's generators run vLLM, if they do; each gets a seed and a log of its own."""
    generator = config.generator
    if generator.backend != "vllm":
        return None
    assert generator.dtype in ("float32", "bfloat16"), "refused with the settings"
    return VllmSettings(
        python=generator.vllm.python,
        dtype=generator.dtype,
        device=generator.device,
        max_running=generator.max_running,
        prefill_tokens=generator.prefill_tokens,
        kv_bytes=generator.kv_cache_bytes,
        threads=generator.threads,
        kv_on_update=generator.kv_on_update,
        seed=config.seed,
        start_timeout_s=VLLM_START_SHARE * config.cluster.start_timeout_s,
        log_path=str(logs / "vllm.log"),
        arguments=tuple(generator.vllm.arguments),
    )


async def spawn_all(cluster: Cluster, specs: Sequence[ExecutorSpec], timeout_s: float) -> list[ExecutorHandle]:
    """All executors, in the order of `specs`.

    Raises:
        ConfigError: a mistake of the user that only an executor could see, such as damaged weights.
        ExecutorError: one of them did not start.
    """
    try:
        return await asyncio.gather(*(cluster.spawn(spec, timeout_s) for spec in specs))
    except RemoteError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise
