"""A generator that decodes by the clock, and keeps a ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from llamarl.executors.replies import Adoption, Collected
from llamarl.types import FinishReason, GenerationRequest, Rollout, continued
from tests.controller.fake_trainer import Trainer


def token(group_id: int, index: int, position: int) -> int:
    """What is sampled there, whoever does it."""
    return group_id % 100_000 * 10_000 + index * 1_000 + position


@dataclass
class Generator:
    """Decodes any number of rollouts at once, their first token at once and the last one after `duration_s`."""

    duration_s: Callable[[int, int], float] = lambda group_id, index: 1.0 + index
    num_tokens: Callable[[int, int], int] = lambda group_id, index: 2
    turn_tokens: int = 0
    """Of each turn, where an environment says what follows; 0: there is none."""
    adopt_s: float | Callable[[int], float] = 0.1
    """Seconds in which a version is fetched."""
    outcomes: list[str] = field(default_factory=list)
    """How the next fetches end; when there are none left, with an adoption."""
    bias: float = 0.0
    """By which its log-probabilities are wrong, in nats."""
    thawed: asyncio.Event = field(default_factory=asyncio.Event)
    hosts: tuple[str, ...] = ("",)
    source: Trainer | None = None
    """Whose staging memory it serves from."""
    version: int = -1
    slot: int = -1
    adopted: list[tuple[float, int]] = field(default_factory=list)
    """(when, version)."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) of each rollout or segment of one."""
    sampled: list[tuple[int, int, int]] = field(default_factory=list)
    """(group, index, position) of every token."""
    held: set[tuple[int, int]] = field(default_factory=set)
    """Rollouts that wait for their environment, by group and index."""
    _finished: list[Rollout] = field(default_factory=list)
    _some: asyncio.Event = field(default_factory=asyncio.Event)
    _adopted: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: dict[asyncio.Task[None], int] = field(default_factory=dict)

    async def weight_specs(self) -> tuple[()]:
        return ()

    async def submit(self, requests: list[GenerationRequest]) -> None:
        for request in requests:
            for partial in request.starts():
                task = asyncio.ensure_future(self._decode(request, partial))
                self._tasks[task] = request.group_id
                task.add_done_callback(self._tasks.pop)
        await asyncio.sleep(0)  # a task that is cancelled before it begins says nothing

    async def _decode(self, request: GenerationRequest, partial: Rollout) -> None:
        clock, index, start = asyncio.get_running_loop(), partial.index, partial.num_tokens
        self.held.discard((request.group_id, index))
        begin_s, group_id = clock.time(), request.group_id
        length = self.num_tokens(group_id, index)
        if self.turn_tokens:
            of_turn = len(partial.turns[-1][1]) if partial.num_tokens and partial.turns[-1][0] else 0
            length = start - of_turn + self.turn_tokens
        stop = min(length, start + request.segment_tokens) if request.segment_tokens else length
        versions, reason = list[int](), FinishReason.STOP if stop == length else FinishReason.PARKED
        try:
            while self.version < request.from_version:
                self._adopted.clear()
                await self._adopted.wait()
                begin_s = clock.time()
            for position in range(start, stop):
                if position:
                    await asyncio.sleep(self.duration_s(group_id, index) / (length - 1))
                    await self.thawed.wait()
                self.sampled.append((group_id, index, position))
                versions.append(self.version)
                if self.source is not None:
                    assert self.source.staging[self.slot] == self.version, "overwritten while it serves"
        except asyncio.CancelledError:
            reason = FinishReason.ABORTED
        if reason is FinishReason.STOP and request.has_turns:
            self.held.add((group_id, index))
        self.spans.append((begin_s, clock.time()))
        ids = [token(group_id, index, start + n) for n in range(len(versions))]
        self._finished.append(
            Rollout(
                group_id=group_id,
                index=index,
                columns=continued(
                    partial.columns,
                    {
                        "token_ids": np.array(ids, np.int32),
                        "behavior_logprobs": np.array(ids, np.float32),
                        "policy_versions": np.array(versions, np.int32),
                    },
                ),
                finish_reason=reason,
            )
        )
        self._some.set()

    async def abort(self, group_ids: list[int]) -> None:
        for task, group_id in list(self._tasks.items()):
            if group_id in group_ids:
                task.cancel()

    async def release(self, rollouts: list[tuple[int, int]]) -> None:
        self.held -= set(rollouts)

    def kill(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def collect(self, num_wanted: int = 0) -> Collected:
        await self._some.wait()
        self._some.clear()
        rollouts, self._finished = self._finished, []
        return Collected(rollouts=rollouts)

    async def adopt(self, version: int, slot: int) -> Adoption:
        seconds = self.adopt_s if isinstance(self.adopt_s, float) else self.adopt_s(version)
        for _ in range(2):
            await asyncio.sleep(seconds / 2)
            if self.source is not None and self.source.staging[slot] != version:
                return Adoption(version=version, outcome="superseded")
        if self.outcomes and (outcome := self.outcomes.pop(0)) != "adopted":
            return Adoption(version=version, outcome=outcome, reason=f"w of version {version} on rank 0: {outcome}")
        self.version, self.slot = version, slot
        self._adopted.set()
        self.adopted.append((asyncio.get_running_loop().time(), version))
        return Adoption(version=version, stall_s=0.001, fetch_s=seconds, num_bytes=1000, fingerprint=f"{version:016x}")

    async def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        return [np.full(len(sequence) - 1, self.version + self.bias, np.float32) for sequence in sequences]
