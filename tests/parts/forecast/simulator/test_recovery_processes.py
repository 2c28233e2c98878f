"""`kill -9` of one of two generators in processes of their own: the run ends with every group trained on once.

The executors are light, the processes, the cluster and the controller are real. It does not cover the real engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("monarch")

from llamarl.cluster.api import Cluster, ExecutorHandle, ExecutorSpec, MeshFailed
from llamarl.cluster.open import open_cluster
from llamarl.config import RunConfig
from llamarl.config.cluster import ClusterConfig
from llamarl.controller.admission import Problems
from llamarl.controller.controller import Controller
from llamarl.controller.ports import Executors
from llamarl.controller.supervision import Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.observability.screen import NullScreen
from llamarl.parts.forecast.simulator.ledger import CountingTelemetry, StepLog
from llamarl.parts.forecast.simulator.records import simulated_prompts
from tests.parts.forecast.simulator.conftest import run_config

STEPS = 25
START_S = 60.0


class Warnings(NullScreen):
    """Keeps what the user is told."""

    def __init__(self) -> None:
        self.texts = list[str]()

    def warn(self, text: str) -> None:
        self.texts.append(text)


class Run:
    """A run on Monarch that loses a generator after `kill_after` steps."""

    def __init__(self, config: RunConfig, folder: Path, kill_after: int) -> None:
        self.config = config
        self.log = StepLog(folder / "metrics.jsonl")
        self.screen = Warnings()
        self.generators = list[ExecutorHandle]()
        self.killed: ExecutorHandle
        self._kill_after = kill_after

    async def spawn(self, cluster: Cluster, name: str, **options: float) -> ExecutorHandle:
        kind = name.partition("-")[0].title()
        target = f"light_executors:Light{kind}"
        spec = ExecutorSpec(name=name, target=target, options=options, code_paths=(str(Path(__file__).parent),))
        handle = await cluster.spawn(spec, START_S)
        if kind == "Generator":
            self.generators.append(handle)
        return handle

    async def run(self) -> None:
        async with open_cluster(ClusterConfig(kind="monarch")) as cluster:
            supervisor = Supervisor()
            names: Sequence[str] = ("trainer", "reward")
            trainer, reward, *generators = await asyncio.gather(
                *(self.spawn(cluster, name) for name in names),
                *(self.spawn(cluster, f"generator-{number}", rollout_s=0.01) for number in range(2)),
            )
            executors = Executors(
                trainer=trainer,
                reward=reward,
                generators=generators,
                spawn_generator=lambda number: self.spawn(cluster, f"generator-{number}", rollout_s=0.01),
            )
            setting = self.config, self.screen, self.log, 2
            self.counter = telemetry = CountingTelemetry(*setting, spend=lambda _: None)
            problems = Problems(train=simulated_prompts(64, 4), eval=(), stop_token_ids=())
            controller = Controller(self.config, problems, executors, supervisor, telemetry)
            telemetry.attach(list(executors), controller.replicas)
            supervisor.start(telemetry.poll_loop(), "status")
            try:
                await supervisor.run(self._train(controller, telemetry, supervisor))
            finally:
                await supervisor.stop()
                self.log.close()

    async def _train(self, controller: Controller, telemetry: Telemetry, supervisor: Supervisor) -> None:
        await controller.start()
        telemetry.begin_loop(0)
        supervisor.start(self._kill(), "killer")
        await controller.train()

    async def _kill(self) -> None:
        while len(self.log.steps) < self._kill_after:
            await asyncio.sleep(0.01)
        self.killed = self.generators[1]
        os.kill(self.killed.pids[0], signal.SIGKILL)


def config(policy: str) -> RunConfig:
    cluster = {"on_failure": {"generator": policy}, "stall_timeout_s": 30.0}
    return run_config(steps=STEPS, max_staleness=1, window=5, cluster=cluster)


@pytest.mark.parametrize("policy", ["drop", "respawn"])
def test_the_run_survives(tmp_path: Path, policy: str) -> None:
    run = Run(config(policy), tmp_path, kill_after=3)
    asyncio.run(run.run())
    assert sorted(run.counter.group_ids) == list(range(4 * STEPS))
    assert max(run.counter.counts) <= 2
    assert f"{run.killed.name} (rank 0)" in run.screen.texts[0]
    assert "unfinished groups go to the others" in run.screen.texts[0]


def test_stop_says_who_died(tmp_path: Path) -> None:
    with pytest.raises(MeshFailed, match=r"generator-\d \(rank 0\)"):
        asyncio.run(Run(config("stop"), tmp_path, kill_after=3).run())
