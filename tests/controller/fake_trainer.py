"""A trainer that computes nothing."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llamarl.cluster.api import RemoteError
from llamarl.executors.replies import Probe, Published
from llamarl.observability.metrics import UpdateMetrics
from llamarl.training.result import PolicyStepResult
from llamarl.types import RolloutGroup


@dataclass
class Trainer:
    """Knows nothing but its version; `saved` is the disk, and outlives it."""

    step_s: float = 0.5
    write_s: float = 0.0
    """From `save` to its answer."""
    disk_size: int = 1000
    """Checkpoints that fit on it."""
    version: int = 0
    saved: list[tuple[int, str]] = field(default_factory=list)
    """(trainer's version, the controller's state as JSON) of each checkpoint."""
    published: list[tuple[int, int]] = field(default_factory=list)
    """(name that the weights got, steps that they have had)."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    staging: list[int | None] = field(default_factory=list)
    """Version in each slot; a slot is written again when nobody uses its version."""
    consumed: list[RolloutGroup] = field(default_factory=list)
    learnt: list[list[int]] = field(default_factory=list)
    """Group ids of each step: its weights."""
    weights: dict[int, list[list[int]]] = field(default_factory=dict)
    """`learnt` of each checkpoint; as `saved` it is the disk."""
    mirror: dict[int, list[list[int]]] | None = None
    """The newest copies of `learnt`, which outlive it, by step."""
    damage: str = ""
    """What is said of a weight."""
    _groups: dict[int, RolloutGroup] = field(default_factory=dict)

    async def add_groups(self, groups: list[RolloutGroup]) -> None:
        self._groups.update((group.group_id, group) for group in groups)

    async def step(self, group_ids: list[int], new: list[RolloutGroup]) -> PolicyStepResult:
        await self.add_groups(new)
        clock = asyncio.get_running_loop()
        begin_s = clock.time()
        groups = [self._groups.pop(group_id) for group_id in group_ids]
        self.consumed += groups
        await asyncio.sleep(self.step_s)
        self.spans.append((begin_s, clock.time()))
        self.version += 1
        self.learnt.append(list(group_ids))
        if self.mirror is not None:
            self.mirror[self.version] = list(self.learnt)
        return PolicyStepResult(
            policy_version=self.version,
            skipped=False,
            update=UpdateMetrics(num_loss_tokens=1),
            advantages={group.group_id: np.zeros(len(group.rollouts)) for group in groups},
        )

    async def policy_version(self) -> int:
        return self.version

    async def set_layout(self, rank: int, specs: tuple[()]) -> None:
        assert (rank, specs) == (0, ())

    async def publish(self, version: int, in_use: tuple[int, ...]) -> Published:
        self.published.append((version, self.version))
        newest = max((held for held in self.staging if held is not None), default=None)
        free = [slot for slot, held in enumerate(self.staging) if held not in (*in_use, newest)]
        slot = free[0] if free else len(self.staging)
        self.staging[slot : slot + 1] = [version]
        sequence = np.arange(5, dtype=np.int32)
        probe = Probe(sequences=[sequence], logprobs=[np.full(4, version, np.float32)])
        return Published(version=version, addresses={"": slot}, probe=probe)

    async def outsized(self) -> str:
        return self.damage

    async def save(self, state: dict[str, Any]) -> asyncio.Task[None]:
        """Answers later, beside other calls."""
        self.written = (self.version, json.dumps(state))
        return asyncio.create_task(asyncio.sleep(self.write_s))

    async def commit(self) -> str:
        if len(self.saved) >= self.disk_size:
            raise RemoteError("trainer", "commit", "Traceback") from OSError(errno.ENOSPC, "No space left on device")
        self.saved.append(self.written)
        self.weights[self.written[0]] = self.learnt[: self.written[0]]
        return "somewhere"

    def another(self) -> Trainer:
        """A new one in place of this one, which is dead; its disk, its mirror and what generators hold are there."""
        new = {"version": 0, "learnt": [], "consumed": [], "spans": [], "_groups": {}, "staging": list(self.staging)}
        return replace(self, **new)

    async def restore(self, newest: int) -> int:
        left = self.weights | (self.mirror or {})
        self.version = max((step for step in left if step <= newest), default=0)
        self.learnt = list(left.get(self.version, []))
        return self.version
