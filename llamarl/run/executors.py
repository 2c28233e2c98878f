"""What executors are started with, and their start."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from llamarl.cluster.api import Cluster, ExecutorHandle, ExecutorSpec, RemoteError
from llamarl.config import ConfigError
from llamarl.config.schema import RunConfig
from llamarl.config.trainer import LoraConfig
from llamarl.distributed.rendezvous import open_rendezvous
from llamarl.generation.vllm_server import VllmSettings
from llamarl.run.placement import ANYWHERE, Place, Places, models_in_use

VLLM_START_SHARE = 0.8
"""Of the longest wait for an executor; the rest is for its process, and to hear why vLLM did not start."""


def executor_spec(
    name: str, target: str, threads: int, num_ranks: int = 1, *, place: Place = ANYWHERE, **options: Any
) -> ExecutorSpec:
    """`target` is `module:Class` below `llamarl.executors`; `threads` are those of one rank."""
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return ExecutorSpec(
        name=name,
        target=f"llamarl.executors.{target}",
        options=options,
        num_ranks=num_ranks,
        env=env | dict(place.env),
        hosts=place.hosts,
    )


def model_specs(config: RunConfig, checkpoints: Path, places: Places) -> list[ExecutorSpec]:
    """One executor for each of `models_in_use`; `checkpoints` are the run's."""
    targets = {
        "reward-model": "reward_model:RewardModelExecutor",
        "reference": "reference:ReferenceExecutor",
        "critic": "critic:CriticExecutor",
    }
    models, options = models_in_use(config), dict[str, dict[str, Any]]()
    if "critic" in models:
        num_ranks = config.critic.parallelism.num_ranks
        rendezvous = open_rendezvous(num_ranks, config.cluster.start_timeout_s)
        options["critic"] = {"num_ranks": num_ranks, "checkpoint_folder": str(checkpoints), "rendezvous": rendezvous}
    return [
        executor_spec(
            name, targets[name], settings.threads, place=places.place(name), config=config, **options.get(name, {})
        )
        for name, settings in models.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorSpecs:
    """Generators of one run: numbered, and each with a rendezvous of its own for its ranks."""

    config: RunConfig
    delta: bool = False
    vllm: VllmSettings | None = None
    lora: LoraConfig | None = None
    choices: Path | None = None
    """Folder of the run that keeps which kernels serve; None: nothing is kept."""

    def __call__(self, number: int, place: Place = ANYWHERE) -> ExecutorSpec:
        name, config, vllm = f"generator-{number}", self.config.generator, self.vllm
        if vllm is not None:
            log_path = Path(vllm.log_path or "").with_name(f"{name}.vllm.log")
            vllm = replace(vllm, seed=crc32(f"{vllm.seed}/{number}".encode()), log_path=str(log_path))
        return executor_spec(
            name, "generator:GeneratorExecutor", config.threads, config.tensor_parallel, place=place,
            model_path=self.config.model.path, config=config, delta=self.delta, vllm=vllm, lora=self.lora,
            choices=str(self.choices or ""),
            rendezvous=open_rendezvous(config.tensor_parallel, self.config.cluster.start_timeout_s),
        )  # fmt: skip


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
        kv_dtype=generator.kv_dtype,
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
