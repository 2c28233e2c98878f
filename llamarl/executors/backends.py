"""The engines that a generator can have: the native one, on one rank or several, or that of a part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from llamarl.config.schema import GeneratorConfig, RunConfig
from llamarl.config.trainer import LoraConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.distributed.links import Rendezvous
from llamarl.distributed.mesh import join_mesh, set_up_device
from llamarl.executors.adoption import Adopter
from llamarl.generation.backend import GenerationBackend
from llamarl.generation.engine import Engine, kv_budget
from llamarl.generation.model import AdapterMerger, load_generator_model
from llamarl.generation.tensor_parallel import FollowerRank, ModelRanks, TensorParallelEngine
from llamarl.models.hf import open_model


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedEngine:
    """One rank's engine and what belongs to it."""

    engine: GenerationBackend
    adopter: Adopter
    describe: Callable[[], str]
    """Text for the log: what computes what."""
    follower: FollowerRank | None = None
    """Follower of rank 0, on the other ranks."""
    clock: Callable[[], float] | None = None
    """Seconds that a forward took; None where forwards are not seen."""
    close: Callable[[], None] | None = None
    """Ends what outlives the last reference."""


class Backend(Protocol):
    """Another engine: the `joint` of the part that has the name of `generator.backend`."""

    def check(self, config: RunConfig) -> None:
        """Whether it is here and can do what the config asks for. Raises ConfigError."""

    def settings(self, config: RunConfig, logs: Path, number: int) -> Any:
        """Settings that cross to the process of one generator."""

    def open_engine(self, model_path: str, settings: Any, delta: bool) -> OpenedEngine:
        """Opens it there. Raises ConfigError."""


def open_native(
    model_path: str,
    config: GeneratorConfig,
    rendezvous: Rendezvous | None,
    delta: bool,
    lora: LoraConfig | None,
    sleeps: bool = False,
    beside_bytes: int = 0,
) -> OpenedEngine:
    """
    Args:
        sleeps: begins without weights, keys and values.
        beside_bytes: what others on the device will take later while it works.

    Raises:
        ConfigError: no such device or model, or this machine cannot serve it in this way.
        RanksLost: not all ranks have come.
    """
    device = set_up_device(config.device, config.threads, "generator.device")
    mesh = join_mesh({"tp": config.tensor_parallel}, rendezvous, device)
    rank, size = mesh.tp.rank, mesh.tp.size
    ranks = ModelRanks(mesh.tp) if size > 1 else None
    model = load_generator_model(
        model_path, config.dtype, device, ranks, config.kv_dtype, asleep=sleeps and lora is None
    )
    receiver = model
    if lora:
        base, weights = open_model(model_path)
        receiver = AdapterMerger(model, base, lora, weights.read)
    kv_bytes = config.kv_cache_bytes
    if size > 1 and kv_bytes is None:  # all ranks have as many blocks
        kv_bytes = min(mesh.exchange(kv_budget(model, config.max_running, size, prefill_tokens=config.prefill_tokens)))
    native = Engine(
        model, max_running=config.max_running, prefill_tokens=config.prefill_tokens, kv_bytes=kv_bytes,
        kv_on_update=config.kv_on_update, decode=Tokenizer(model_path).decode,
        graphs=False if config.cuda_graphs == "off" else None, records_routes=config.router_replay,
          asleep=sleeps, beside_bytes=beside_bytes,
    )  # fmt: skip
    room = model.room if device.type == "cuda" else None
    adopter = Adopter(receiver.specs(), model.use, rank, delta=delta, hold=receiver.hold, room=room)
    opened = OpenedEngine(
        engine=native, adopter=adopter, describe=native.describe,
        clock=time.thread_time if device.type == "cpu" else time.monotonic,
    )  # fmt: skip
    if size == 1:
        return opened
    if rank:
        follower = FollowerRank(native, mesh, adopter.use)
        return replace(opened, follower=follower, close=follower.close)
    leader = TensorParallelEngine(native, mesh)
    return replace(opened, engine=leader, close=leader.close)
