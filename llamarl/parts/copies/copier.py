"""`CheckpointCopier`: copies checkpoints of a run to `checkpoint.copy_to` while it trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from llamarl.checkpoint.folder import MANIFEST, removable_steps, run_in_background, step_folder
from llamarl.config import RunConfig
from llamarl.parts.copies.remote import RemoteCopies
from llamarl.run.copies import CopyFailed
from llamarl.run.folder import RunFolder

LOOK_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Seconds between two checks for a new checkpoint, and most seconds between two tries to copy one."""
LAST_COPY_S = 120.0
"""Longest wait for the last copy at the end of a run, in seconds."""


class CheckpointCopier:
    """Copies one checkpoint at a time: the newest first, then the ones that are kept forever. Never ends a run."""

    def __init__(self, config: RunConfig, folder: RunFolder, warn: Callable[[str], None]) -> None:
        """Raises ConfigError if the destination cannot be opened."""
        self._settings = settings = config.checkpoint
        self._copies = RemoteCopies(settings, config.name)
        self._folder, self._warn = folder, warn
        self._copied = dict[int, int]()
        """Commit time in ns of each copied checkpoint, by step."""
        self._fault = ""
        """Current error, as it was reported. Empty means none."""

    async def loop(self) -> None:
        """Consumes committed checkpoints of the folder. Waits for copies and for time."""
        pause_s = LOOK_S
        copies = self._copies
        while True:
            if found := self._next():
                step, committed_ns = found
                try:
                    await asyncio.wrap_future(
                        run_in_background(lambda step=step: copies.copy(self._folder.checkpoints, step))
                    )
                except CopyFailed as error:
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                    if not self._fault and self._next() == found:  # else a newer checkpoint has replaced its folder
                        self._warn(f"the checkpoint of step {step} has not been copied to {copies.name} yet: {error}")
                        self._fault = str(error)
                else:
                    self._copied[step], pause_s = committed_ns, LOOK_S
                    if self._fault:
                        self._warn(f"checkpoints are copied to {copies.name} again")
                    self._fault = ""
            await asyncio.sleep(pause_s)

    def _next(self) -> tuple[int, int] | None:
        """Returns the step to copy next, and its commit time."""
        times = dict[int, int]()
        for step in (steps := self._folder.saved_steps()):
            with suppress(OSError):  # it was removed, or is damaged
                times[step] = (self._folder.checkpoints / step_folder(step) / MANIFEST).stat().st_mtime_ns
        if not times:
            return None
        newest = max(times, key=times.__getitem__)
        every = self._settings.keep_every
        may_go = removable_steps(steps, 1, every, lambda _: True) if every else steps
        lasting = [step for step in times if step < newest and step not in may_go]
        return next(((step, times[step]) for step in (newest, *lasting) if self._copied.get(step) != times[step]), None)

    async def finish(self, phase: Callable[[str], None]) -> None:
        """Waits up to `LAST_COPY_S` for the last copy, and warns if it is not complete."""
        copies, found = self._copies, self._next()
        if found is None:
            return
        phase(f"copying the last checkpoint to {copies.name}, at most {LAST_COPY_S:g} s")
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_COPY_S):
                while self._next():
                    await asyncio.sleep(0.1)
                return
        reason = self._fault or "it takes longer"
        self._warn(f"the checkpoint of step {found[0]} is not in {copies.name} after {LAST_COPY_S:g} s: {reason}")
