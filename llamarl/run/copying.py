"""`CheckpointCopier`: what a run saves goes to `checkpoint.copy_to` too, beside the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from llamarl.checkpoint.copies import CopyFailed, RemoteCopies
from llamarl.checkpoint.folder import MANIFEST, removable_steps, run_in_background, step_folder
from llamarl.config import RunConfig
from llamarl.run.folder import RunFolder

LOOK_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Between two looks for a new checkpoint, and between two tries to copy one."""
LAST_COPY_S = 120.0
"""Longest wait for the last copy at the end of a run."""


class CheckpointCopier:
    """One at a time, the newest first; then those that are kept for good. It never ends a run."""

    def __init__(self, config: RunConfig, folder: RunFolder, warn: Callable[[str], None]) -> None:
        """Raises ConfigError: the other place cannot be opened."""
        self._settings = settings = config.checkpoint
        self._copies = RemoteCopies(settings, config.name) if settings.copy_to else None
        self._folder, self._warn = folder, warn
        self._copied = dict[int, int]()
        """When what was copied had been committed, in ns, by step."""
        self._fault = ""
        """Fault that stands in the way, as it was said."""

    async def loop(self) -> None:
        """Consumes what is committed in the folder; waits for copies and for time alone."""
        pause_s = LOOK_S
        while (copies := self._copies) is not None:
            if found := self._next():
                step, committed_ns = found
                try:
                    await asyncio.wrap_future(
                        run_in_background(lambda step=step: copies.copy(self._folder.checkpoints, step))
                    )
                except CopyFailed as error:
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                    if not self._fault and self._next() == found:  # else its folder went as a newer one came
                        self._warn(f"the checkpoint of step {step} has not been copied to {copies.name} yet: {error}")
                        self._fault = str(error)
                else:
                    self._copied[step], pause_s = committed_ns, LOOK_S
                    if self._fault:
                        self._warn(f"checkpoints are copied to {copies.name} again")
                    self._fault = ""
            await asyncio.sleep(pause_s)

    def _next(self) -> tuple[int, int] | None:
        """Step to copy, and when it was committed."""
        times = dict[int, int]()
        for step in (steps := self._folder.saved_steps()):
            with suppress(OSError):  # it is no longer kept, or damaged
                times[step] = (self._folder.checkpoints / step_folder(step) / MANIFEST).stat().st_mtime_ns
        if not times:
            return None
        newest = max(times, key=times.__getitem__)
        every = self._settings.keep_every
        may_go = removable_steps(steps, 1, every, lambda _: True) if every else steps
        lasting = [step for step in times if step < newest and step not in may_go]
        return next(((step, times[step]) for step in (newest, *lasting) if self._copied.get(step) != times[step]), None)

    async def finish(self, phase: Callable[[str], None]) -> None:
        """Waits until the last one is there, for a while; else says that it is not."""
        copies, found = self._copies, self._next()
        if copies is None or found is None:
            return
        phase(f"copying the last checkpoint to {copies.name}, at most {LAST_COPY_S:g} s")
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_COPY_S):
                while self._next():
                    await asyncio.sleep(0.1)
                return
        reason = self._fault or "it takes longer"
        self._warn(f"the checkpoint of step {found[0]} is not in {copies.name} after {LAST_COPY_S:g} s: {reason}")
