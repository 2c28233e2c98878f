"""Executors that only take time, and a controller over them. No torch; time is virtual, so nothing sleeps.

Unlike those of the simulator they keep a ledger: what each of them did, when, and under which weights.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import pickle
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.cluster.api import CallTimeout, ExecutorError, ExecutorHandle, HostStatus, MeshFailed
from llamarl.config import RunConfig
from llamarl.controller.controller import Controller, Executors, Problems
from llamarl.controller.supervision import Interrupted, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.executors.replies import Collected, Scored
from llamarl.observability.screen import NullScreen
from llamarl.observability.sinks import JsonlSink, MetricsLog
from llamarl.rollouts.buffer import RolloutBuffer
from llamarl.rollouts.recorder import RolloutRecorder
from llamarl.simulator.clock import run_virtual
from llamarl.training.result import StepResult
from llamarl.types import (
    FinishReason,
    GenerationRequest,
    Outcome,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
)
from llamarl.weight_sync.layout import SegmentAddress

ADDRESS = SegmentAddress(pid=0, fd=0, specs=())
RIGHT = RewardResult(outcome=Outcome.SCORE, value=1.0)
WRONG = RewardResult(outcome=Outcome.WRONG, value=0.0)
UNJUDGED = RewardResult(outcome=Outcome.INVALID, value=0.0, reason="the grader is broken")


def config(tmp_path: Path, **changes: Any) -> RunConfig:
    """Two prompts of two rollouts per step."""
    values: dict[str, Any] = {
        "output": str(tmp_path),
        "steps": 6,
        "model": {"path": "nowhere"},
        "data": {"train": "jsonl"},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_staleness": 1},
        "checkpoint": {"every_steps": 0},
        "cluster": {"kind": "inline"},
        "screen": {"kind": "none"},
    }
    for section, change in changes.items():
        values[section] = values.get(section, {}) | change if isinstance(change, dict) else change
    return RunConfig.model_validate(values)


def prompts(count: int, first: str = "p") -> tuple[Prompt, ...]:
    token_ids_T = np.array([1], np.int32)
    return tuple(Prompt(prompt_id=f"{first}-{n}", text="?", token_ids_T=token_ids_T, answer="") for n in range(count))


class FakeHandle(ExecutorHandle):
    """Calls one at a time, in their order; a caller that leaves does not stop the call. `role` has the methods."""

    def __init__(self, name: str, role: Any) -> None:
        self.name = name
        self.pids = [7]
        self.role = role
        self.failed: asyncio.Future[ExecutorError] = asyncio.get_running_loop().create_future()
        self._turn = asyncio.Lock()
        self.doing = "idle"

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        if self.failed.done():
            raise copy.copy(self.failed.result())
        arguments = pickle.loads(pickle.dumps(args))
        job = asyncio.ensure_future(self._run(method, arguments))
        job.add_done_callback(lambda job: job.cancelled() or job.exception())
        await asyncio.wait({job, self.failed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            raise copy.copy(self.failed.result())
        if not job.done():
            raise CallTimeout(self.name, method, timeout_s, f"is in {self.doing}")
        return job.result()

    async def _run(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == "collect":  # answered from between other calls
            return await self.role.collect()
        async with self._turn:
            self.doing = method
            result = await getattr(self.role, method)(*args)
            self.doing = "idle"
            return result

    async def call_each(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        return [await self.call(method, *args, timeout_s=timeout_s, **kwargs)]

    async def status(self, timeout_s: float) -> HostStatus:
        if self.failed.done():
            raise copy.copy(self.failed.result())
        return HostStatus(pid=7, doing=self.doing, doing_age_s=0, busy_s={}, queued_calls=0, spans=[], rss_bytes=0)

    async def status_each(self, timeout_s: float) -> list[HostStatus]:
        return [await self.status(timeout_s)]

    async def stop(self, timeout_s: float) -> None:
        return None

    def die(self) -> None:
        if not self.failed.done():
            self.failed.set_result(MeshFailed(self.name, (0,), "pid 7 was killed by SIGKILL"))


@dataclass
class Generator:
    """Decodes any number of rollouts at once; each has two tokens, sampled at its begin and at its end."""

    duration_s: Callable[[int, int], float] = lambda group_id, index: 1.0 + index
    adopt_s: float = 0.1
    version: int = -1
    adopted: list[tuple[float, int]] = field(default_factory=list)
    """(when, version)."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) of each rollout."""
    _finished: list[Rollout] = field(default_factory=list)
    _some: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def weight_specs(self) -> tuple[()]:
        return ()

    async def submit(self, requests: list[GenerationRequest]) -> None:
        for request in requests:
            for index in range(request.group_size):
                self._tasks.add(asyncio.ensure_future(self._decode(request.group_id, index)))

    async def _decode(self, group_id: int, index: int) -> None:
        clock = asyncio.get_running_loop()
        begin_s, first = clock.time(), self.version
        await asyncio.sleep(self.duration_s(group_id, index))
        self.spans.append((begin_s, clock.time()))
        self._finished.append(
            Rollout(
                group_id=group_id,
                index=index,
                token_ids_T=np.array([1, 2], np.int32),
                behavior_logprobs_T=np.zeros(2, np.float32),
                policy_versions_T=np.array([first, self.version], np.int32),
                finish_reason=FinishReason.STOP,
            )
        )
        self._some.set()

    async def collect(self) -> Collected:
        await self._some.wait()
        self._some.clear()
        rollouts, self._finished = self._finished, []
        return Collected(rollouts=rollouts, num_running=0, num_waiting=0, generated_tokens=0)

    async def adopt(self, version: int, address: SegmentAddress) -> float:
        await asyncio.sleep(self.adopt_s)
        self.version = version
        self.adopted.append((asyncio.get_running_loop().time(), version))
        return self.adopt_s


@dataclass
class Reward:
    judge: Callable[[Rollout], RewardResult] = lambda rollout: RIGHT if rollout.index else WRONG
    score_s: float = 0.05

    async def score(self, groups: list[tuple[Prompt, list[Rollout]]]) -> list[list[Scored]]:
        await asyncio.sleep(self.score_s)
        return [[Scored(response="r", result=self.judge(rollout)) for rollout in rollouts] for _, rollouts in groups]


@dataclass
class Trainer:
    """Knows nothing but its version; `saved` is the disk, and outlives it."""

    step_s: float = 0.5
    version: int = 0
    saved: list[tuple[int, str]] = field(default_factory=list)
    """(trainer's version, the controller's state as JSON) of each checkpoint."""
    published: list[tuple[int, int]] = field(default_factory=list)
    """(name that the weights got, steps that they have had)."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    _groups: dict[int, RolloutGroup] = field(default_factory=dict)

    async def add_groups(self, groups: list[RolloutGroup]) -> None:
        self._groups.update((group.group_id, group) for group in groups)

    async def step(self, group_ids: list[int]) -> StepResult:
        clock = asyncio.get_running_loop()
        begin_s = clock.time()
        groups = [self._groups.pop(group_id) for group_id in group_ids]
        await asyncio.sleep(self.step_s)
        self.spans.append((begin_s, clock.time()))
        self.version += 1
        return StepResult(
            policy_version=self.version,
            skipped=False,
            metrics={"num_loss_tokens": 1, "importance_ratio_mean": 1, "grad_norm": 0, "learning_rate": 0},
            advantages={group.group_id: np.zeros(len(group.rollouts)) for group in groups},
        )

    async def policy_version(self) -> int:
        return self.version

    async def publish(self, version: int, specs: tuple[()]) -> SegmentAddress:
        self.published.append((version, self.version))
        return ADDRESS

    async def save(self, state: dict[str, Any]) -> str:
        self.saved.append((self.version, json.dumps(state)))
        return "somewhere"


class Run:
    """A controller over fakes, its files and what it did."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        generators: list[Generator] | None = None,
        reward: Reward | None = None,
        trainer: Trainer | None = None,
        num_train: int = 1000,
        num_eval: int = 0,
    ) -> None:
        self.config = config
        self.generators = generators or [Generator()]
        self.reward = reward or Reward()
        self.trainer = trainer or Trainer()
        self.problems = Problems(train=prompts(num_train), eval=prompts(num_eval, "e"), stop_token_ids=(2,))
        self.metrics_file, self.rollouts_file = folder / "metrics.jsonl", folder / "rollouts.jsonl"
        self.complaints: list[str] = []
        """What asyncio would print about errors that nobody took."""
        self.wall_s = 0.0

    def train(
        self, state: dict[str, Any] | None = None, *, strike: Callable[[Run], Awaitable[None]] | None = None
    ) -> Run:
        """Runs to the end under a virtual clock; `strike` runs beside it. Raises what the run raises."""
        try:
            run_virtual(self._train(state, strike))
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise
        finally:  # a forgotten error is complained of when its task is deleted
            self.version = self.controller.version
            del self.controller, self.supervisor, self.handles
            gc.collect()
        return self

    async def _train(self, state: dict[str, Any] | None, strike: Callable[[Run], Awaitable[None]] | None) -> None:
        clock = asyncio.get_running_loop()
        clock.set_exception_handler(lambda _, context: self.complaints.append(str(context)))
        self.handles = {f"generator-{n}": FakeHandle(f"generator-{n}", g) for n, g in enumerate(self.generators)}
        self.handles |= {"reward": FakeHandle("reward", self.reward), "trainer": FakeHandle("trainer", self.trainer)}
        *generators, reward, trainer = self.handles.values()
        self.supervisor = supervisor = Supervisor()
        supervisor.watch(reward)
        supervisor.watch(trainer)
        rollout = self.config.rollout
        limit = RolloutBuffer(rollout.prompts_per_step, rollout.max_staleness, rollout.window).staleness_limit
        log = MetricsLog([JsonlSink(self.metrics_file)], self._lost)
        recorder = RolloutRecorder(self.rollouts_file, self._lost)
        telemetry = Telemetry(self.config, NullScreen(), log, recorder, limit, clock=clock.time)
        executors = Executors(generators=generators, reward=reward, trainer=trainer)
        self.controller = controller = Controller(self.config, self.problems, executors, supervisor, telemetry, state)
        telemetry.attach(list(executors), controller.generators)
        if state:
            telemetry.resume_at(controller.version)
        if strike:
            supervisor.start(strike(self), "strike")
        try:
            await supervisor.run(self._main(telemetry))
        except Interrupted:
            await controller.wind_down()
            raise
        finally:
            self.wall_s = clock.time()
            await supervisor.stop()
            recorder.close()
            log.close()

    async def _main(self, telemetry: Telemetry) -> None:
        await self.controller.start()
        telemetry.begin_loop(self.controller.version)
        await self.controller.train()
        await self.controller.save()

    def _lost(self, failure: object) -> None:
        raise AssertionError(failure)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [row for row in rows(self.metrics_file) if row["kind"] == "step"]

    @property
    def evals(self) -> list[dict[str, Any]]:
        return [row for row in rows(self.metrics_file) if row["kind"] == "eval"]

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        return rows(self.rollouts_file)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
