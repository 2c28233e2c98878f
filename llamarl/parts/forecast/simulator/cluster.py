"""The cluster of simulated executors, and the fate of its generators."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from llamarl.cluster.api import ExecutorHandle
from llamarl.config import RunConfig
from llamarl.observability.report import role_of
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.simulator.draws import FAULTS, ResponseLengths, keyed
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.handles import SimulatedGenerator, SimulatedTrainer, World
from llamarl.parts.forecast.simulator.reward import SimulatedReward

KINDS = {"trainer": SimulatedTrainer, "reward": SimulatedReward, "generator": SimulatedGenerator}


class SimulatedCluster:
    """Spawns by name: `trainer`, `reward`, `generator-0`, ..."""

    def __init__(self, config: RunConfig, costs: Costs, faults: Faults, trainer_gpus: int) -> None:
        lengths = ResponseLengths(costs, config.rollout.max_new_tokens, config.seed)
        self.world = World(config=config, costs=costs, faults=faults, trainer_gpus=trainer_gpus, lengths=lengths)
        self.generators = list[SimulatedGenerator]()
        """All that were ever spawned."""

    async def spawn(self, name: str) -> ExecutorHandle:
        """Starts an executor."""
        handle = KINDS[role_of(name)](name, self.world)
        if isinstance(handle, SimulatedGenerator):
            self.generators.append(handle)
            await asyncio.sleep(self.world.costs.generator_start_s)
        return handle

    async def spawn_generator(self) -> ExecutorHandle:
        """Spawns a generator under the next free number: both replacements and joins come through here."""
        return await self.spawn(f"generator-{len(self.generators)}")

    async def shutdown(self, timeout_s: float) -> None:
        for handle in self.generators:
            if handle.is_alive:
                await handle.stop(timeout_s)

    def kill(self, handle: SimulatedGenerator) -> None:
        """Ends a generator as `kill -9` does."""
        if handle.is_alive:
            self.world.counts += Counter(deaths=1, dropped_rollouts=handle.num_unfinished)
            handle.die()

    async def strike(self, add_generator: Callable[[], Awaitable[None]]) -> None:
        """Lets the faults happen, at their seconds from now; never returns when some are random."""
        events = [(at_s, 0, replica) for at_s, replica in self.world.faults.deaths]
        events += [(at_s, 1, count) for at_s, count in self.world.faults.joins]
        clock = asyncio.get_running_loop()
        start_s = clock.time()
        tasks = [asyncio.create_task(self._die_at_random())] if self.world.faults.deaths_per_hour else []
        for at_s, is_join, number in sorted(events):
            await asyncio.sleep(max(0.0, start_s + at_s - clock.time()))
            if is_join:
                tasks += [asyncio.ensure_future(add_generator()) for _ in range(number)]
            else:
                self.kill(self.generators[number])
        await asyncio.gather(*tasks)

    async def _die_at_random(self) -> None:
        """A Poisson process of deaths."""
        random = keyed(self.world.config.seed, FAULTS, 0)
        while True:
            await asyncio.sleep(random.exponential(3600 / self.world.faults.deaths_per_hour))
            alive = [handle for handle in self.generators if handle.is_alive]
            if alive:
                self.kill(alive[int(random.integers(len(alive)))])
