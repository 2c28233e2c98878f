"""One simulated run: the real controller over simulated executors, from start to end."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llamarl.cluster.api import ExecutorError
from llamarl.config import ConfigError, RunConfig
from llamarl.controller.admission import Problems, TooManyInvalid
from llamarl.controller.ports import Executors
from llamarl.controller.supervision import Stalled, Supervisor, rare_garbage_collections
from llamarl.observability.report import Accounts, account, role_of, verdict
from llamarl.observability.screen import NullScreen, RunView
from llamarl.observability.spans import Span
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.simulator.clock import VirtualClockLoop, run_virtual
from llamarl.parts.forecast.simulator.cluster import SimulatedCluster
from llamarl.parts.forecast.simulator.cores import SharedCores, in_turn
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.ledger import CountingTelemetry, StepLog
from llamarl.parts.forecast.simulator.records import simulated_prompts, simulated_sets
from llamarl.parts.forecast.simulator.result import COUNTS, Simulation
from llamarl.parts.forecast.simulator.split import Split
from llamarl.run.executors import assembled
from llamarl.run.placement import models_in_use

NUM_PROMPTS = 4096
PROGRESS_S = 5.0
"""Minimum real seconds between two progress lines."""


def simulate(config: RunConfig, costs: Costs, faults: Faults, split: Split, metrics: Path) -> Simulation:
    """Runs the real controller to `config.steps` in virtual time, and writes step metrics to the file `metrics`.

    A failure that would end a real run ends the simulation. `Simulation.end` has the cause.

    Raises:
        ConfigError: the run has executors without a simulation.
    """
    unknown = [*models_in_use(config), *["trainer.lora"] * bool(config.trainer.lora)]
    if unknown := unknown + ["cluster.placement = 'colocated'"] * config.generators_sleep:
        raise ConfigError(
            f"llamarl simulate knows generators, reward and a trainer of all weights, not {', '.join(unknown)}; "
            "leave them out"
        )
    generator = config.generator.model_copy(update={"replicas": split.replicas})
    screen = config.screen.model_copy(update={"kind": "none"})
    config = config.model_copy(update={"generator": generator, "screen": screen})
    wall_s, cpu_s = time.monotonic(), time.process_time()
    run = _SimulatedRun(config, costs, faults, split, metrics)
    with rare_garbage_collections():  # as a real run does
        run_virtual(run.run())
    return run.result(time.monotonic() - wall_s, time.process_time() - cpu_s)


class _SimulationProgress(NullScreen):
    """Prints progress lines to stderr. Warnings of single faults are only counted in the result."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._printed_s = time.monotonic()

    def show(self, view: RunView) -> None:
        if time.monotonic() - self._printed_s > PROGRESS_S:
            self._printed_s = time.monotonic()
            print(f"simulated {view.step}/{self._steps} steps", file=sys.stderr, flush=True)  # noqa: T201

    def warn(self, text: str) -> None:
        return None


class _SimulatedRun:
    def __init__(self, config: RunConfig, costs: Costs, faults: Faults, split: Split, metrics: Path) -> None:
        rollout = config.rollout
        self._config = config
        self._costs = costs
        self._split = split
        self._bound = rollout.staleness_limit
        self._log = StepLog(metrics)
        self._cluster = SimulatedCluster(config, costs, faults, split.trainer_gpus)
        self._problems = Problems(
            train=simulated_prompts(NUM_PROMPTS, costs.prompt_tokens),
            eval=simulated_sets(config, costs.prompt_tokens),
            stop_token_ids=(),
        )
        self._loop_s = (0.0, 0.0)
        self._end = "finished"

    async def run(self) -> None:
        """Starts the executors, trains, and stops them."""
        clock = asyncio.get_running_loop()
        assert isinstance(clock, VirtualClockLoop)
        self._clock = clock
        progress = _SimulationProgress(self._config.steps)
        setting = self._config, progress, self._log, self._bound, clock.time
        self._telemetry = CountingTelemetry(*setting, spend=self._record)
        setting = self._config, self._problems, self._telemetry, self._cluster.shutdown, self._spawn
        try:
            async with assembled(*setting, handles_signals=False) as (self._controller, supervisor):
                clock.set_exception_handler(  # a timer that raises would otherwise only be printed
                    lambda _, context: supervisor.fail(context.get("exception") or RuntimeError(context["message"]))
                )
                try:
                    await supervisor.run(self._train(supervisor))
                finally:
                    self._loop_s = (self._loop_s[0], clock.time())
                    await self._telemetry.poll()  # the last spans
        except (ExecutorError, Stalled, TooManyInvalid) as error:
            self._end = f"{type(error).__name__}: {error}"
        finally:
            self._log.close()

    async def _train(self, supervisor: Supervisor) -> None:
        await self._controller.start()
        self._loop_s = (asyncio.get_running_loop().time(),) * 2
        self._telemetry.begin_loop(self._controller.version)
        supervisor.start(self._cluster.strike(self._join), "faults")
        await self._controller.train()

    async def _join(self) -> None:
        """Adds a generator to those of the start."""
        await self._controller.recovery.add(await self._cluster.spawn_generator())
        self._cluster.world.counts["joins"] += 1

    async def _spawn(self) -> Executors:
        generators = [f"generator-{number}" for number in range(self._split.replicas)]
        names = ("trainer", "reward", *generators)
        trainer, reward, *handles = await asyncio.gather(*map(self._cluster.spawn, names))
        return Executors(
            trainer=trainer,
            reward=reward,
            generators=handles,
            spawn_generator=lambda _: self._cluster.spawn_generator(),
        )

    def _record(self, num_rollouts: int) -> None:
        """Records rollouts, which blocks the controller."""
        seconds = self._costs.controller_rollout_s * num_rollouts
        self._cluster.world.controller.append((self._clock.time(), seconds))
        self._clock.spend(seconds)

    def _shared_cores(self, spans: dict[str, list[Span]]) -> SharedCores:
        """Returns the mapping for executors on `cpu`, which share the machine's cores."""
        trainer, generator = self._config.trainer, self._config.generator
        threads = {
            "trainer": trainer.threads if trainer.device == "cpu" else 0,
            "generator": generator.threads if generator.device == "cpu" else 0,
            "reward": 1,
        }
        all_spans = spans | {"controller": in_turn(self._cluster.world.controller)}
        threads = {name: threads.get(role_of(name), 1) for name in all_spans}
        return SharedCores(all_spans, threads, self._costs.cores, self._costs.contention)

    def _generator_busy_share(self, accounts: Accounts, clock: Callable[[float], float]) -> float:
        """Returns the busy share of generators during their lifetimes."""
        start_s, end_s = self._loop_s
        lives_s = [
            clock(min(end_s, h.alive_s[1])) - clock(max(start_s, h.alive_s[0])) for h in self._cluster.generators
        ]
        busy_s = [accounts.busy_share.get(h.name, 0.0) * accounts.window_s for h in self._cluster.generators]
        return sum(busy_s) / sum(lives_s) if sum(lives_s) > 0 else 0.0

    def result(self, wall_s: float, cpu_s: float) -> Simulation:
        """Returns the result of the simulation, which took `wall_s` real seconds and `cpu_s` CPU seconds."""
        counts = self._cluster.world.counts + Counter(resubmitted_groups=self._controller.recovery.num_resubmitted)
        spans = {name: list(work) for name, work in self._telemetry.spans.items()}
        steps, loop_s = self._log.steps, self._loop_s
        clock: Callable[[float], float] = float
        if self._costs.cores:
            clock = cores = self._shared_cores(spans)
            spans = cores.spans(spans)
            steps = cores.steps(steps, loop_s[0], spans)
            loop_s = (cores(loop_s[0]), cores(loop_s[1]))
            self._log.rewrite(steps)
        accounts = account(spans, *loop_s)
        generator = self._generator_busy_share(accounts, clock)
        accounts = replace(accounts, role_share={**accounts.role_share, "generator": generator})
        return Simulation(
            split=self._split,
            end=self._end,
            steps=tuple(steps),
            accounts=accounts,
            verdict=verdict(accounts, 1, len(steps)),
            staleness=dict(sorted(self._telemetry.counts.items())),
            staleness_bound=self._bound,
            group_ids=tuple(self._telemetry.group_ids),
            loop_s=loop_s,
            counts={name: counts[name] for name in COUNTS},
            spans=spans,
            wall_s=wall_s,
            cpu_s=cpu_s,
            executors_cpu_s=self._cluster.world.executors_cpu_s,
        )
