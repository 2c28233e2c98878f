"""What executors are started with, and their start."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from llamarl.cluster.api import Cluster, ExecutorHandle, ExecutorSpec, RemoteError
from llamarl.cluster.engine_files import MEMORY, mirror_folder
from llamarl.config import ConfigError
from llamarl.config.roles import CriticConfig
from llamarl.config.schema import RunConfig
from llamarl.config.trainer import LoraConfig, TrainerConfig
from llamarl.distributed.rendezvous import open_rendezvous
from llamarl.parts.vllm.server import VllmSettings
from llamarl.run.folder import RunFolder
from llamarl.run.placement import ANYWHERE, Place, Places, models_in_use

TARGETS = {
    "trainer": "trainer:TrainerExecutor",
    "reward-model": "reward_model:RewardModelExecutor",
    "reference": "reference:ReferenceExecutor",
    "critic": "critic:CriticExecutor",
}
"""Modules and classes below `llamarl.executors` that have a model."""
PROCESS = "starts its process"
"""What an executor is at until it answers."""
VLLM_START_SHARE = 0.8
"""Of the longest wait for an executor; the rest is for its process, and to hear why vLLM did not start."""


def executor_spec(
    name: str, target: str, threads: int, num_ranks: int = 1, *, place: Place = ANYWHERE, **options: Any
) -> ExecutorSpec:
    """`target` is `module:Class`, below `llamarl.executors` or from the top; `threads` are those of one rank."""
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return ExecutorSpec(
        name=name,
        target=target if target.startswith("llamarl.") else f"llamarl.executors.{target}",
        options=options,
        num_ranks=num_ranks,
        env=env | dict(place.env),
        hosts=place.hosts,
    )


def environment_spec(config: RunConfig, place: Place = ANYWHERE) -> ExecutorSpec:
    """What answers turns, or runs the agents that ask for them."""
    path, rollout, folder = config.model.path, config.rollout, "llamarl.parts.episodes.executors"
    target, settings = f"{folder}.environment:EnvironmentExecutor", rollout.environment
    if rollout.agent:
        target, settings = f"{folder}.gateway:GatewayExecutor", rollout
    return executor_spec("environment", target, 1, place=place, model_path=path, config=settings)


class RunSpecs:
    """Executors of one run other than generators, by name: each time with a rendezvous of its own for its ranks."""

    def __init__(self, config: RunConfig, folder: RunFolder, places: Places, *, resume: bool) -> None:
        self._config, self._places, self._checkpoints = config, places, str(folder.checkpoints)
        self._resume = resume
        self._mirror = secrets.token_hex(8) if config.checkpoint.mirror else ""
        self._models = models_in_use(config)

    def first(self) -> list[ExecutorSpec]:
        """Trainer, reward, and the models that the config asks for."""
        also = ("environment",) if self._config.rollout.has_episodes else ()
        return [self.spec(name, self._places.place(name)) for name in ("trainer", "reward", *self._models, *also)]

    def again(self, name: str) -> ExecutorSpec:
        """In the place of one that died; it has learnt nothing yet."""
        self._resume = False
        return self.spec(name, self._places.again(name))

    def spec(self, name: str, place: Place) -> ExecutorSpec:
        """Of one executor."""
        config = self._config
        if name == "reward":
            return executor_spec(
                name, "reward:RewardExecutor", 1, place=place, model_path=config.model.path, config=config.reward
            )
        if name == "environment":
            return environment_spec(config, place)
        settings, options, num_ranks = config.trainer if name == "trainer" else self._models[name], dict[str, Any](), 1
        if isinstance(settings, TrainerConfig | CriticConfig):
            num_ranks = settings.parallelism.num_ranks
            rendezvous = open_rendezvous(num_ranks, config.cluster.start_timeout_s)
            options.update(checkpoint_folder=self._checkpoints, rendezvous=rendezvous, mirror=self._mirror)
        if name == "trainer":
            options["resume"] = self._resume
        return executor_spec(name, TARGETS[name], settings.threads, num_ranks, place=place, config=config, **options)

    def close(self) -> None:
        """The run is over: what was mirrored on this machine goes."""
        if self._mirror and MEMORY in os.environ:
            shutil.rmtree(mirror_folder(self._mirror), ignore_errors=True)


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


async def spawn_all(
    cluster: Cluster,
    specs: Sequence[ExecutorSpec],
    timeout_s: float,
    tell: Callable[[dict[str, str]], None] = lambda missing: None,
) -> list[ExecutorHandle]:
    """All executors, in the order of `specs`.

    Args:
        tell: hears who is not there yet, and what each is at, at first and whenever that may have changed.

    Raises:
        ConfigError: a mistake of the user that only an executor could see, such as damaged weights.
        ExecutorError: one of them did not start.
    """
    missing = {spec.name: PROCESS for spec in specs}

    async def spawn(spec: ExecutorSpec) -> ExecutorHandle:
        def told(stage: str) -> None:
            missing[spec.name] = stage
            tell(missing)

        handle = await cluster.spawn(spec, timeout_s, told)
        del missing[spec.name]
        tell(missing)
        return handle

    tell(missing)
    try:
        return await asyncio.gather(*map(spawn, specs))
    except RemoteError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise
