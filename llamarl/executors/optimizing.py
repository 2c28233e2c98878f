"""What the executors of trainer and critic share: ranks that meet, groups that arrive as they are scored, and
checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from llamarl.checkpoint.store import CheckpointStore
from llamarl.cluster.executor import Executor
from llamarl.config.roles import CriticConfig
from llamarl.config.trainer import TrainerConfig
from llamarl.distributed.mesh import join_mesh
from llamarl.distributed.rendezvous import Rendezvous
from llamarl.distributed.runtime import set_up_device
from llamarl.training.optimization import Optimization
from llamarl.types import RolloutGroup


class Optimizing(Executor):
    """All ranks get all calls and all groups, and each computes its share; rank 0 answers."""

    def __init__(
        self,
        name: str,
        settings: TrainerConfig | CriticConfig,
        checkpoints: Path,
        keep: int,
        rendezvous: Rendezvous | None,
        start_timeout_s: float,
    ) -> None:
        """
        Args:
            name: of the settings' section.
            keep: so many checkpoints.
            rendezvous: where several ranks meet.
        """
        self._device = set_up_device(settings.device, settings.threads, f"{name}.device")
        sizes = settings.parallelism.model_dump()
        self._mesh = join_mesh(sizes, rendezvous, self._device, start_timeout_s=start_timeout_s)
        self._groups = dict[int, RolloutGroup]()
        world = self._mesh.world
        self._store = CheckpointStore(checkpoints, keep, world.rank, world.size, self._mesh.exchange)

    def work(self) -> bool:
        """Ends the executor when ranks are lost: the call that all are in may have no end. Raises RanksLost."""
        self._mesh.check()
        return False

    def close(self) -> None:
        self._mesh.close()

    def add_groups(self, groups: Iterable[RolloutGroup]) -> None:
        """Keeps scored groups for a later step."""
        self._groups.update((group.group_id, group) for group in groups)

    def commit(self) -> Future[str] | None:
        """Makes what was saved last the newest checkpoint; its folder. Raises OSError when the disk is full."""
        with self._mesh.together(OSError):
            return self._store.commit()

    def _take(self, group_ids: Sequence[int]) -> list[RolloutGroup]:
        return [self._groups.pop(group_id) for group_id in group_ids]

    def _save(self, optimization: Optimization[Any], state: dict[str, Any]) -> Future[dict[str, Any] | OSError]:
        """Copies what a checkpoint needs and writes it beside the next calls; after the answer comes `commit`."""
        with self._mesh.together():
            return self._store.save(optimization.policy_version, optimization.shards(), state)
