"""Base of the executors of trainer, critic and supervised training: ranks that meet, groups that arrive as they are
scored, and checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch

from llamarl.checkpoint.folder import CRITIC
from llamarl.checkpoint.keeper import MirrorPlace, Place
from llamarl.checkpoint.mirror import Mirror
from llamarl.checkpoint.store import CheckpointStore
from llamarl.cluster.api import Executor
from llamarl.cluster.engine_files import mirror_folder
from llamarl.config import ConfigError, RunConfig
from llamarl.config.roles import CriticConfig
from llamarl.config.schema import CheckpointConfig
from llamarl.config.trainer import TrainerConfig
from llamarl.distributed.links import Rendezvous
from llamarl.distributed.mesh import join_mesh, set_up_device
from llamarl.kernels import build, fused, half, products
from llamarl.models.hf import open_model
from llamarl.models.lora import add_adapters
from llamarl.models.memory import MOMENTS_BYTES
from llamarl.models.transformer import Transformer
from llamarl.observability.notes import note
from llamarl.training.optimization import Optimization
from llamarl.training.parallel import Read
from llamarl.training.policy import uses_halves
from llamarl.training.preflight import check_layout
from llamarl.training.state import StateMismatch, load_training_state, training_state
from llamarl.types import RolloutGroup


class OptimizingExecutor(Executor):
    """All ranks get all calls and all groups, and each computes its share; rank 0 answers."""

    SHARES_CALLS: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        settings: TrainerConfig | CriticConfig,
        checkpoints: Path,
        saving: CheckpointConfig,
        rendezvous: Rendezvous | None,
        start_timeout_s: float,
        *,
        mirror: MirrorPlace | None = None,
    ) -> None:
        """
        Args:
            name: of the settings' section.
            mirror: of copies of its state in memory; None: none are kept.
            rendezvous: where several ranks meet.
        """
        self._device = set_up_device(settings.device, settings.threads, f"{name}.device")
        build.keep_choices_in((checkpoints.parent if name == CRITIC else checkpoints).parent / "kernels")
        sizes = settings.parallelism.model_dump()
        self._mesh = join_mesh(sizes, rendezvous, self._device, start_timeout_s=start_timeout_s)
        self._groups = dict[int, RolloutGroup]()
        world = self._mesh.world
        self._store = CheckpointStore(
            checkpoints, saving.keep, world.rank, world.size, self._mesh.exchange, saving.keep_every
        )
        self._mirror = None
        if mirror:
            folder = mirror_folder(mirror.run) / name
            with self._mesh.together():
                self._mirror = Mirror(folder, world.rank, world.size, self._mesh.exchange, mirror.keepers)

    def _built(self, optimization: Optimization[Any]) -> None:
        """Says in the log what multiplies. Raises ConfigError when there is no room for the mirror of weights and both
        moments of AdamW."""
        if uses_halves(optimization.config, optimization.device):
            said = half.describe(optimization.device)
        elif said := products.describe():
            said += f"\n{fused.describe()}"
        if said:
            note(said)
        if self._mirror:
            each = MOMENTS_BYTES[optimization.config.moments]
            held = [tensor for _, tensor in optimization.shards().values()]
            self._mirror.check_space(int(sum(tensor.nbytes + each * tensor.numel() for tensor in held)))

    def work(self) -> bool:
        """Ends the executor when ranks are lost: the call that all are in may have no end. Raises RanksLost."""
        self._mesh.check()
        return False

    def whole(self, parts: Mapping[int, bytes], owners: Sequence[int], num_bytes: int) -> memoryview:
        with self._mesh.together():
            return self._mesh.gathered(parts, owners, num_bytes)

    def close(self) -> None:
        self._mesh.close()

    def add_groups(self, groups: Iterable[RolloutGroup]) -> None:
        """Keeps scored groups, or parts of large ones, for a later step."""
        for group in groups:
            held = self._groups.get(group.group_id)
            self._groups[group.group_id] = group if held is None else held.with_more(group)

    def choose_keepers(self, keepers: Sequence[Place]) -> None:
        """Other hosts are here that may keep copies of the state."""
        if self._mirror:
            with self._mesh.together():
                self._mirror.choose_keepers(keepers)

    def commit(self) -> Future[str] | None:
        """Makes what was saved last the newest checkpoint; its folder. Raises OSError when the disk is full."""
        with self._mesh.together(OSError):
            return self._store.commit()

    def _open_policy(self, config: RunConfig) -> tuple[Transformer, Read]:
        """The model to train with its adapters, without memory, and where its weights come from. Says in the log that
        the layout is right.

        Raises:
            ConfigError: it is not, or the model cannot be read.
        """
        torch.manual_seed(config.seed)
        model, weights = open_model(config.model.path)
        if lora := config.trainer.lora:
            add_adapters(model, lora, config.seed, getattr(torch, config.trainer.dtype))
        if self._mesh.world.size > 1:
            sys.stdout.write(f"{check_layout(model.shape, self._mesh, self._device, lora)}\n")
        return model, weights.read

    def _resume(
        self, optimization: Optimization[Any], kind: str, beside: Sequence[CheckpointStore] = ()
    ) -> tuple[Any, list[str]]:
        """Goes on from the newest valid checkpoint: its state of this `kind` (None: there is none), and what was found
        damaged.

        Raises:
            ConfigError: what it holds is not for this model, or of another kind.
        """
        checkpoint, damaged = self._store.load_newest(beside)
        if checkpoint is None:
            return None, damaged
        if kind not in checkpoint.state:
            raise ConfigError(f"--resume: {checkpoint.folder} is of another command; go on with the one that began it")
        try:
            load_training_state(optimization, checkpoint.shapes, checkpoint.read, checkpoint.state)
        except StateMismatch as error:
            raise ConfigError(f"--resume: {error}") from None
        return checkpoint.state[kind], damaged

    def _restore(self, optimization: Optimization[Any], newest: int) -> int:
        """Goes on as processes before this one did: from the newest of mirror and checkpoints up to step `newest`;
        which step that is."""
        with self._mesh.together(StateMismatch):
            state = self._mirror.load(newest) if self._mirror else None
            saved = self._store.load_newest(newest=newest)[0] if state is None or state.step < newest else None
            if saved is not None and (state is None or saved.step > state.step):
                load_training_state(optimization, saved.shapes, saved.read, saved.state)
            elif state is not None:
                load_training_state(optimization, state.shapes, state.read, state.state)
            return optimization.policy_version

    def _mirrored(self, optimization: Optimization[Any]) -> float:
        """Mirrors the state after a step; the seconds that it took."""
        start_s = time.perf_counter()
        if self._mirror:
            self._mirror.save(optimization.policy_version, optimization.shards(), training_state(optimization))
        return time.perf_counter() - start_s

    def _take(self, group_ids: Sequence[int]) -> list[RolloutGroup]:
        return [self._groups.pop(group_id) for group_id in group_ids]

    def _save(self, optimization: Optimization[Any], state: dict[str, Any]) -> Future[dict[str, Any] | OSError]:
        """Copies what a checkpoint needs and writes it beside the next calls; after the answer comes `commit`."""
        with self._mesh.together():
            return self._store.save(optimization.policy_version, optimization.shards(), state)
