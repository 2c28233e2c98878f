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
from llamarl.controller.admission import Problems
from llamarl.controller.buffer import RolloutBuffer
from llamarl.controller.controller import Controller
from llamarl.controller.ports import Executors
from llamarl.controller.supervision import Interrupted, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.executors.replies import Adoption, Collected, Scored
from llamarl.forecast.simulator.clock import run_virtual
from llamarl.observability.recorder import RolloutRecorder
from llamarl.observability.screen import NullScreen
from llamarl.observability.sinks import MetricsLog
from llamarl.types import FinishReason, GenerationRequest, Outcome, Prompt, RewardResult, Rollout, continued
from tests.controller.fake_trainer import Trainer

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
        if isinstance(role, Generator):
            self.hosts = role.hosts
        self.failed: asyncio.Future[ExecutorError] = asyncio.get_running_loop().create_future()
        self._turn = asyncio.Lock()
        self.doing = "idle"
        self.is_stopped = False
        self.thawed = asyncio.Event()
        """Cleared while the process stands still (SIGSTOP)."""
        self.thawed.set()
        if isinstance(role, Generator):
            role.thawed = self.thawed

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
        await self.thawed.wait()
        if self.is_stopped or self.failed.done():
            raise MeshFailed(self.name, (0,), "it is gone")
        if method in ("collect", "adopt"):  # answered from between other calls
            result = await getattr(self.role, method)(*args)
        else:
            async with self._turn:
                self.doing = method
                result = await getattr(self.role, method)(*args)
                self.doing = "idle"
        if isinstance(result, asyncio.Task):
            result = await result
        await self.thawed.wait()
        return result

    async def call_each(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        return [await self.call(method, *args, timeout_s=timeout_s, **kwargs)]

    async def status(self, timeout_s: float) -> HostStatus:
        if self.failed.done():
            raise copy.copy(self.failed.result())
        if not self.thawed.is_set():
            await asyncio.sleep(timeout_s)
            raise CallTimeout(self.name, "status", timeout_s, "has not said yet what it does")
        return HostStatus(pid=7, doing=self.doing, doing_age_s=0, busy_s={}, queued_calls=0, spans=[], rss_bytes=0)

    async def status_each(self, timeout_s: float) -> list[HostStatus]:
        return [await self.status(timeout_s)]

    async def stop(self, timeout_s: float) -> None:
        self.is_stopped = True
        if isinstance(self.role, Generator):
            self.role.kill()

    def die(self) -> None:
        if not self.failed.done():
            self.failed.set_result(MeshFailed(self.name, (0,), "pid 7 was killed by SIGKILL"))
            if isinstance(self.role, Generator):
                self.role.kill()


def token(group_id: int, index: int, position: int) -> int:
    """What is sampled there, whoever does it."""
    return group_id % 100_000 * 10_000 + index * 1_000 + position


@dataclass
class Generator:
    """Decodes any number of rollouts at once, their first token at once and the last one after `duration_s`."""

    duration_s: Callable[[int, int], float] = lambda group_id, index: 1.0 + index
    num_tokens: Callable[[int, int], int] = lambda group_id, index: 2
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
    _finished: list[Rollout] = field(default_factory=list)
    _some: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: dict[asyncio.Task[None], int] = field(default_factory=dict)

    async def weight_specs(self) -> tuple[()]:
        return ()

    async def submit(self, requests: list[GenerationRequest]) -> None:
        for request in requests:
            assert request.group_id not in self._tasks.values(), "engines take one request of a group at a time"
            for partial in request.starts():
                task = asyncio.ensure_future(self._decode(request, partial))
                self._tasks[task] = request.group_id
                task.add_done_callback(self._tasks.pop)
        await asyncio.sleep(0)  # a task that is cancelled before it begins says nothing

    async def _decode(self, request: GenerationRequest, partial: Rollout) -> None:
        clock, index, start = asyncio.get_running_loop(), partial.index, partial.num_tokens
        begin_s, group_id = clock.time(), request.group_id
        length = self.num_tokens(group_id, index)
        stop = min(length, start + request.segment_tokens) if request.segment_tokens else length
        versions, reason = list[int](), FinishReason.STOP if stop == length else FinishReason.PARKED
        try:
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

    def kill(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def collect(self) -> Collected:
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
        self.adopted.append((asyncio.get_running_loop().time(), version))
        return Adoption(version=version, stall_s=0.001, fetch_s=seconds, num_bytes=1000, fingerprint=f"{version:016x}")

    async def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        return [np.full(len(sequence) - 1, self.version + self.bias, np.float32) for sequence in sequences]


@dataclass
class Reward:
    judge: Callable[[Rollout], RewardResult] = lambda rollout: RIGHT if rollout.index else WRONG
    score_s: float = 0.05

    async def score(self, groups: list[tuple[Prompt, list[Rollout]]]) -> list[list[Scored]]:
        await asyncio.sleep(self.score_s)
        return [[Scored(response="r", result=self.judge(rollout)) for rollout in rollouts] for _, rollouts in groups]


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
        models: dict[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.generators = generators or [Generator()]
        self.reward = reward or Reward()
        self.trainer = trainer or Trainer()
        self.models = models or {}
        for generator in self.generators:
            generator.source = self.trainer
        self.problems = Problems(train=prompts(num_train), eval=prompts(num_eval, "e"), stop_token_ids=(2,))
        self.metrics_file, self.rollouts_file = folder / "metrics.jsonl", folder / "rollouts.jsonl"
        self.warnings: list[str] = []
        """What the user was told."""
        self.complaints: list[str] = []
        """What asyncio would print about errors that nobody took."""
        self.wall_s = 0.0
        self.saves_on_death = False

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
            self.left = self.handles
            del self.controller, self.supervisor, self.handles
            gc.collect()
        return self

    async def _train(self, state: dict[str, Any] | None, strike: Callable[[Run], Awaitable[None]] | None) -> None:
        clock = asyncio.get_running_loop()
        clock.set_exception_handler(lambda _, context: self.complaints.append(str(context)))
        self.handles = {f"generator-{n}": FakeHandle(f"generator-{n}", g) for n, g in enumerate(self.generators)}
        self.handles |= {"reward": FakeHandle("reward", self.reward), "trainer": FakeHandle("trainer", self.trainer)}
        *generators, reward, trainer = self.handles.values()
        models = {name: FakeHandle(name, role) for name, role in self.models.items()}
        self.handles |= models
        self.supervisor = supervisor = Supervisor()
        rollout = self.config.rollout
        limit = RolloutBuffer(rollout.prompts_per_step, rollout.max_staleness, rollout.window).staleness_limit
        log = MetricsLog(self.metrics_file, self._lost)
        recorder = RolloutRecorder(self.rollouts_file, self._lost)
        screen = NullScreen()
        screen.warn = self.warnings.append
        telemetry = Telemetry(self.config, screen, log, recorder, limit, clock=clock.time)
        executors = Executors(
            generators=generators, reward=reward, trainer=trainer, models=models, **self.new_generators()
        )
        for handle in executors.irreplaceable:
            supervisor.watch(handle)
        self.controller = controller = Controller(self.config, self.problems, executors, supervisor, telemetry, state)
        telemetry.attach(list(executors), controller.replicas)
        if state:
            telemetry.resume_at(controller.version)
        supervisor.start(telemetry.poll_loop(), "status")
        if strike:
            supervisor.start(strike(self), "strike")
        try:
            await supervisor.run(self._main(telemetry))
        except (Interrupted, MeshFailed) as error:
            if isinstance(error, Interrupted) or self.saves_on_death:
                await controller.wind_down()
            raise
        finally:
            self.wall_s = clock.time()
            await supervisor.stop()
            recorder.close()
            log.close()

    def new_generators(self) -> dict[str, Any]:
        """How `Executors` says that there may be more."""
        return {}

    async def _main(self, telemetry: Telemetry) -> None:
        await self.controller.start()
        telemetry.begin_loop(self.controller.version)
        await self.controller.train()
        await self.controller.save()

    async def add(self, name: str, generator: Generator) -> None:
        """One generator more."""
        generator.source = self.trainer
        self.generators.append(generator)
        self.handles[name] = FakeHandle(name, generator)
        await self.controller.recovery.add(self.handles[name])

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
