"""Specifications with which executors are started, and their start."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.checkpoint.keeper import MirrorPlace
from llamarl.cluster.api import Cluster, ExecutorHandle, ExecutorSpec, HostShare, RemoteError
from llamarl.cluster.engine_files import MEMORY, mirror_folder
from llamarl.config import ConfigError
from llamarl.config.ref import part
from llamarl.config.roles import CriticConfig
from llamarl.config.schema import RunConfig
from llamarl.config.trainer import LoraConfig, TrainerConfig
from llamarl.distributed.links import open_rendezvous
from llamarl.run.folder import RunFolder
from llamarl.run.given import with_content
from llamarl.run.placement import Placer, models_in_use

TARGETS = {
    "trainer": "trainer:TrainerExecutor",
    "reward-model": "reward_model:RewardModelExecutor",
    "reference": "reference:ReferenceExecutor",
    "critic": "critic:CriticExecutor",
}
"""Modules and classes below `llamarl.executors` that have a model."""
PROCESS = "starts its process"
"""Stage of an executor until it answers."""


def executor_spec(
    name: str, target: str, threads: int, num_ranks: int = 1, *, place: Sequence[HostShare] = (), **options: Any
) -> ExecutorSpec:
    """`target` is `module:Class`, below `llamarl.executors` or from the top; `threads` are those of one rank."""
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return ExecutorSpec(
        name=name,
        target=target if target.startswith("llamarl.") else f"llamarl.executors.{target}",
        options=options,
        num_ranks=num_ranks,
        env=env | {name: value for share in place if not share.name for name, value in share.env.items()},
        hosts=tuple(share for share in place if share.name),
    )


def reward_spec(config: RunConfig, place: Sequence[HostShare] = ()) -> ExecutorSpec:
    """Specification of the executor that judges responses, of each source by its own rewards."""
    own = {key: with_content(config.of(one).reward) for key, one in config.data.by_key.items() if one.reward}
    return executor_spec(
        "reward", "reward:RewardExecutor", 1, place=place, model_path=config.model.path,
        config=with_content(config.reward), of_sources=own,
    )  # fmt: skip


class RunSpecs:
    """Executors of one run other than generators, by name: each time with a rendezvous of its own for its ranks."""

    def __init__(self, config: RunConfig, folder: RunFolder, places: Placer, *, resume: bool) -> None:
        self._config, self._places, self._checkpoints = config, places, str(folder.checkpoints)
        self._resume = resume
        self._mirror = secrets.token_hex(8) if config.checkpoint.mirror else ""
        self._models = models_in_use(config)

    def first(self) -> list[ExecutorSpec]:
        """Trainer, reward, and the models that the config asks for."""
        also = ("environment",) if self._config.has_episodes else ()
        return [self.spec(name, self._places.place(name)) for name in ("trainer", "reward", *self._models, *also)]

    def again(self, name: str) -> ExecutorSpec:
        """Specification in the place of an executor that died; it has learnt nothing yet."""
        self._resume = False
        return self.spec(name, self._places.again(name))

    def spec(self, name: str, place: Sequence[HostShare]) -> ExecutorSpec:
        """Specification of one executor."""
        config = self._config
        if name == "reward":
            return reward_spec(config, place)
        if name == "environment":
            return part("episodes", "spec")(config, place)
        settings, options, num_ranks = config.trainer if name == "trainer" else self._models[name], dict[str, Any](), 1
        if layout := self._places.layout(name):
            settings = settings.model_copy(update={"parallelism": layout})
            config = config.model_copy(update={name: settings})
        if isinstance(settings, TrainerConfig | CriticConfig):
            num_ranks = settings.parallelism.num_ranks
            rendezvous = open_rendezvous(num_ranks, config.cluster.start_timeout_s)
            options.update(checkpoint_folder=self._checkpoints, rendezvous=rendezvous)
            if self._mirror:
                options["mirror"] = MirrorPlace(self._mirror, self._places.keepers())
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
    logs: Path = Path()
    """Folder for the output of what is no executor."""
    lora: LoraConfig | None = None
    choices: Path | None = None
    """Folder of the run that keeps which kernels serve; None: nothing is kept."""
    sleeps: bool = False
    """Whether they have memory only between a version and the trainer's next step."""
    beside_bytes: int = 0
    """See `fit.beside_bytes`."""

    def first(self, places: Placer) -> list[ExecutorSpec]:
        """Specifications of the generators that have a place at the start."""
        return [self(int(name.split("-")[1]), places.place(name)) for name in places.of_role("generator")]

    def __call__(self, number: int, place: Sequence[HostShare] = ()) -> ExecutorSpec:
        name, config = f"generator-{number}", self.config.generator
        is_native = config.backend == "native"
        backend = None if is_native else part(config.backend, "settings")(self.config, self.logs, number)
        return executor_spec(
            name, "generator:GeneratorExecutor", config.threads, config.tensor_parallel, place=place,
            model_path=self.config.model.path, config=config, delta=self.delta, backend=backend, lora=self.lora,
            choices=str(self.choices or ""), sleeps=self.sleeps,
            beside_bytes=self.beside_bytes,
            rendezvous=open_rendezvous(config.tensor_parallel, self.config.cluster.start_timeout_s),
        )  # fmt: skip


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
