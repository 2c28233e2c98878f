"""`Checkpoints`: trainer and critic save one step together, beside the steps after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llamarl.cluster.api import RemoteError
from llamarl.controller.journal import Journal, to_disk
from llamarl.controller.lives import Restarted
from llamarl.controller.ports import CriticPort, TrainerPort
from llamarl.controller.supervision import Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.executors.replies import ControllerState
from llamarl.observability.files import remedy

PATIENCE_S = 5.0
"""Longest wait of the next step for a checkpoint that is still written when another is due; once."""


class NotSaved(RuntimeError):
    """The disk refuses a checkpoint; the last good one stands."""


@contextmanager
def refusals_named(when: str) -> Iterator[None]:
    """Raises NotSaved instead of what the disk says to the call of an executor."""
    try:
        yield
    except RemoteError as error:
        if isinstance(error.__cause__, OSError):
            raise NotSaved(f"no checkpoint {when}: {error.__cause__}; {remedy(error.__cause__)}") from None
        raise


class Checkpoints:
    """Saves of trainer and critic; at most one is being written."""

    def __init__(
        self,
        trainer: TrainerPort,
        critic: CriticPort | None,
        supervisor: Supervisor,
        telemetry: Telemetry,
        journal: Journal,
        saved: Callable[[int], None],
    ) -> None:
        """`saved` hears of each step that has a checkpoint."""
        self._trainer, self._critic, self._journal, self._saved = trainer, critic, journal, saved
        self._supervisor, self._telemetry = supervisor, telemetry
        self._writing: asyncio.Task[None] | None = None
        self._is_late = self._told_of_late = False

    async def takes(self, is_due: bool) -> bool:
        """Whether to save now: what is due while the one before is written waits a bit for it, or comes after it where
        the disk has been found to be slow."""
        if is_due and self._writing is not None and not self._told_of_late:
            await asyncio.wait({self._writing}, timeout=PATIENCE_S)
        is_busy = self._writing is not None and not self._writing.done()
        if is_due and is_busy and not self._told_of_late:
            self._told_of_late = True
            self._telemetry.warn(
                "a checkpoint is due while the one before it is still written, so it comes later; raise "
                "checkpoint.every_steps or use a faster disk"
            )
        self._is_late |= is_due
        takes = self._is_late and not is_busy
        self._is_late &= is_busy
        return takes

    async def save(self, state: ControllerState) -> None:
        """Saves a checkpoint with which, after a resume, nothing is trained twice or skipped.

        Raises:
            NotSaved: the disk refuses.
        """
        await self._written()
        while True:
            try:
                await self._commit(state["step"], self._copies(state))
                return
            except Restarted:
                continue

    def save_beside(self, state: ControllerState) -> None:
        """Saves beside the next steps, where `takes` says so; if the disk refuses, that costs a warning."""
        step = state["step"]
        writing = self._commit_or_warn(step, self._copies(state))
        self._writing = self._supervisor.start(writing, f"checkpoint of step {step}")

    def _copies(self, state: ControllerState) -> Sequence[asyncio.Future[Any]]:
        """Trainer and critic copy their weights before whatever they are asked for next, and write beside that; what
        the journal has so far comes to the disk."""
        located = self._journal.located(state)
        synced = asyncio.to_thread(to_disk, self._journal.next_segment())
        calls = [self._trainer.save(located), *([self._critic.save(state["step"])] if self._critic else [])]
        return [asyncio.ensure_future(call) for call in (*calls, self._or_without(synced))]

    async def _or_without(self, synced: Awaitable[None]) -> None:
        try:
            await synced
        except OSError as error:
            self._journal.fail(error)

    async def _commit(self, step: int, copies: Sequence[asyncio.Future[Any]]) -> None:
        """The critic comes first: where there is a trainer's checkpoint, there is the critic's of the same step."""
        with refusals_named(f"at step {step}"):
            await asyncio.gather(*copies)
            if self._critic:
                await self._critic.commit()
            await self._trainer.commit()
        self._journal.committed(step)
        self._saved(step)

    async def _commit_or_warn(self, step: int, copies: Sequence[asyncio.Future[Any]]) -> None:
        try:
            await self._commit(step, copies)
        except NotSaved as error:
            self._telemetry.warn(f"{error}, the run goes on")
        except Restarted as error:
            self._telemetry.warn(f"no checkpoint at step {step}, as {error.executor} died meanwhile")

    async def _written(self) -> None:
        """Waits for the checkpoint that is being written; its error is the supervisor's."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
