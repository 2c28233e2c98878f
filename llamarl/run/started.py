"""`StartedGenerators`: generators that run, their start, and how they make way for others."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from llamarl.cluster.api import Cluster, ExecutorError, ExecutorHandle, HostFailed
from llamarl.run.executors import GeneratorSpecs
from llamarl.run.placement import Placer


class StartedGenerators:
    """Generators of a run that have been started, by name."""

    def __init__(
        self, cluster: Cluster, specs: GeneratorSpecs, places: Placer, start_timeout_s: float, stop_timeout_s: float
    ) -> None:
        self._cluster, self._specs, self._places = cluster, specs, places
        self._start_timeout_s, self._stop_timeout_s = start_timeout_s, stop_timeout_s
        self._running = dict[str, ExecutorHandle]()

    def add(self, handle: ExecutorHandle) -> None:
        """Keeps its place until it has died."""
        self._running[handle.name] = handle
        handle.failed.add_done_callback(lambda _: self._leave(handle.name))

    async def spawn(self, number: int) -> ExecutorHandle:
        """Starts one more, where there is room."""
        name = f"generator-{number}"
        spec = self._specs(number, self._places.take_generator(number))
        try:
            handle = await self._cluster.spawn(spec, self._start_timeout_s)
        except BaseException:
            self._places.leave(name)
            raise
        self.add(handle)
        if name not in self._places.of_role("generator"):
            await self._give_up(handle, "another executor")
            raise handle.failed.result()
        return handle

    async def make_way(self, executor: str) -> None:
        """Ends those whose devices go to another executor."""
        here = [self._running[name] for name in self._places.displaced() if name in self._running]
        await asyncio.gather(*(self._give_up(handle, executor) for handle in here))

    async def _give_up(self, handle: ExecutorHandle, executor: str) -> None:
        lost = HostFailed(handle.name, (0,), f"its devices go to {executor}, which has lost its own")
        with suppress(ExecutorError):  # its own fault, now that it has gone
            await handle.give_up(lost, self._stop_timeout_s)

    def _leave(self, name: str) -> None:
        self._running.pop(name, None)
        self._places.leave(name)
