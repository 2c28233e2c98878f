"""A controller over simulated executors that keep a ledger (`tests/executors/ledger.py`), under a virtual clock."""

from __future__ import annotations

import asyncio
import gc
import json
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.cluster.api import MeshFailed, port
from llamarl.config import RunConfig
from llamarl.config.data import OF_EVAL
from llamarl.controller.admission import Problems
from llamarl.controller.controller import build_controller
from llamarl.controller.evaluation import HeldOutSet
from llamarl.controller.ports import CriticPort, Executors, TrainerPort
from llamarl.controller.progress import Progress
from llamarl.controller.services import Services
from llamarl.controller.supervision import Interrupted, StallWatch, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.controller.train_loop import train_again
from llamarl.executors.replies import ControllerState
from llamarl.journal.writer import Journal
from llamarl.observability.screen import NullScreen
from llamarl.observability.sinks import MetricsLog
from llamarl.parts.forecast.simulator.clock import run_virtual
from llamarl.run.rollouts import TrainedSteps
from llamarl.training.result import PolicyStepResult
from llamarl.types import Prompt, RolloutGroup
from tests.controller.oracle import lines_of
from tests.executors.ledger import Generator, Ledgered, Reward, Trainer
from tests.journals import reader_of


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


def held_out(config: RunConfig, count: int) -> tuple[HeldOutSet, ...]:
    """Sets of `data.eval`, or one without a name, of so many prompts each at most; none where there are none."""
    runs = (config.by_eval_set or {None: config}) if count else {}
    return tuple(
        HeldOutSet(
            name=name,
            number=number,
            settings=run.eval,
            prompts=[replace(one, source=OF_EVAL + name if name else "") for one in prompts(count, name or "e")][
                : run.eval.max_prompts
            ],
        )
        for number, (name, run) in enumerate(runs.items())
    )


class RecordingJournal(Journal):
    """Writes down rollouts beside the journal, too, as they are trained on."""

    def __init__(self, file: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._oracle = file
        file.touch()
        self._groups = dict[int, RolloutGroup]()

    def begin(self, version: int) -> None:
        lines = self._oracle.read_text().splitlines(keepends=True)
        self._oracle.write_text("".join(line for line in lines if json.loads(line)["step"] <= version))
        super().begin(version)

    def groups(self, groups: Iterable[RolloutGroup], prompt_of: Callable[[int], int]) -> None:
        groups = list(groups)
        self._groups |= {group.group_id: group for group in groups}
        super().groups(groups, prompt_of)

    def pop_generated(self, group_id: int) -> Any:
        found = super().pop_generated(group_id)
        self._groups |= {group_id: found[0]} if found[0] else {}
        return found

    def step(self, group_ids: Sequence[int], state: ControllerState, result: PolicyStepResult | None = None) -> None:
        assert result is not None
        with self._oracle.open("a") as file:
            groups = [self._groups[one] for one in group_ids]
            file.writelines(f"{line}\n" for line in lines_of(state["step"], groups, result))
        super().step(group_ids, state, result)


Strike = Callable[["Run"], Awaitable[None]]


def kills(*deaths: tuple[str, float]) -> Strike:
    """Who dies, and after how many seconds."""

    async def one(run: Run, name: str, at_s: float) -> None:
        await asyncio.sleep(at_s)
        run.handles[name].die()

    async def strike(run: Run) -> None:
        await asyncio.gather(*(one(run, name, at_s) for name, at_s in deaths))

    return strike


class Run:
    """A controller, its executors, its files and what it did."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        generators: list[Generator] | None = None,
        reward: Reward | None = None,
        trainer: Trainer | None = None,
        num_train: int = 1000,
        num_eval: int = 0,
        models: dict[str, Ledgered] | None = None,
        keeps_journal: bool = False,
    ) -> None:
        self.config = config
        self.folder = folder if keeps_journal else None
        self.generators = generators or [Generator()]
        self.reward = reward or Reward()
        self.trainer = trainer or Trainer()
        self.models = models or {}
        self.problems = Problems(train=prompts(num_train), eval=held_out(config, num_eval), stop_token_ids=(2,))
        self.metrics_file, self.rollouts_file = folder / "metrics.jsonl", folder / "oracle.jsonl"
        self.warnings: list[str] = []
        """What the user was told."""
        self.complaints: list[str] = []
        """What asyncio would print about errors that nobody took."""
        self.lacks: Sequence[int] = ()
        """Steps of which the journal has lost something."""
        self.wall_s = 0.0
        self.saves_on_death = False
        self.start_s: float | None = None
        """In which an executor is started again; None: it is not."""
        self.lives = Counter[str]()
        """How often it was."""

    def train(self, state: dict[str, Any] | None = None, *, strike: Strike | None = None) -> Run:
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

    async def _train(self, state: dict[str, Any] | None, strike: Strike | None) -> None:
        clock = asyncio.get_running_loop()
        clock.set_exception_handler(lambda _, context: self.complaints.append(str(context)))
        self._feed()
        self.handles: dict[str, Ledgered] = {f"generator-{n}": one for n, one in enumerate(self.generators)}
        self.handles |= {"reward": self.reward, "trainer": self.trainer, **self.models}
        for name, handle in self.handles.items():
            handle.start(name)
        generators, reward, trainer, models = list(self.generators), self.reward, self.trainer, dict(self.models)
        self.supervisor = supervisor = Supervisor()
        rollout = self.config.rollout
        limit = rollout.staleness_limit
        log = MetricsLog(self.metrics_file, self._lost)
        screen = NullScreen()
        screen.warn = self.warnings.append
        telemetry = Telemetry(self.config, screen, log, limit, clock=clock.time)
        executors = Executors(
            generators=generators, reward=reward, trainer=trainer, models=models, **self.new_generators()
        )
        saved, unrecorded = self.trainer.version, list[Any]()
        steps, keep = [step for step, _ in self.trainer.saved], self.config.checkpoint.keep
        journal = RecordingJournal(
            self.rollouts_file,
            reader_of(self.folder, self.problems.train, saved=steps[-keep:]),
            self.warnings.append,
            keep=keep,
            keeps="all",
        )
        state, self.lost = journal.resume(state)
        recorded = max((row["step"] for row in self.steps), default=0) if self.folder else 1 << 30
        critic = port(CriticPort, models["critic"], 1e6) if "critic" in models else None
        await train_again(
            journal.steps_after(saved),
            port(TrainerPort, trainer, 1e6),
            critic,
            on_step=lambda step, *done: unrecorded.append(done) if step > recorded else None,
        )
        services = Services(
            supervisor=supervisor,
            telemetry=telemetry,
            watch=StallWatch(self.config.cluster.stall_timeout_s),
            journal=journal,
            progress=Progress.resumed_at(state["step"] if state else 0),
        )
        self.controller = controller = build_controller(self.config, self.problems, executors, services, state)
        for handle in controller.executors.irreplaceable:
            supervisor.watch(handle)
        telemetry.attach(list(controller.executors), controller.replicas, services.progress)
        if state:
            telemetry.resume_at(min(controller.version, recorded))
        for groups, result in unrecorded:
            telemetry.trained_again(groups, result)
        journal.begin(controller.version)
        supervisor.start(telemetry.poll_loop(), "status")
        if strike:
            supervisor.start(strike(self), "strike")
        try:
            await supervisor.run(self._main(telemetry))
        except (Interrupted, MeshFailed) as error:
            if isinstance(error, Interrupted) or self.saves_on_death:
                await controller.training.wind_down()
            raise
        finally:
            self.wall_s = clock.time()
            await supervisor.stop()
            log.close()
            journal.close()
            self._check_record()

    def _check_record(self) -> None:
        """What is made of the journal is what happened."""
        if self.folder:
            derived = [line for one in TrainedSteps(self.folder).new() for line in one.lines()]
            expected = self.rollouts_file.read_text().splitlines()
            assert derived == [line for line in expected if json.loads(line)["step"] not in self.lacks]

    def new_generators(self) -> dict[str, Any]:
        """How `Executors` says that there may be more."""
        return {"spawn_again": self._again} if self.start_s is not None else {}

    async def _again(self, name: str) -> Ledgered:
        """Another life of an executor, in `start_s`."""
        assert self.start_s is not None
        await asyncio.sleep(self.start_s)
        self.lives[name] += 1
        handle = self.handles[name] = self.handles[name].another().start(name)
        if isinstance(handle, Trainer):
            self.trainer = handle
            self._feed()
        elif name in self.models:
            self.models[name] = handle
        return handle

    def _feed(self) -> None:
        """Generators fetch from the trainer that there is."""
        self.trainer.readers = self.generators
        for generator in self.generators:
            generator.source = self.trainer

    async def _main(self, telemetry: Telemetry) -> None:
        await self.controller.start()
        telemetry.begin_loop(self.controller.version)
        await self.controller.train()
        await self.controller.training.save()

    async def add(self, name: str, generator: Generator) -> None:
        """One generator more."""
        await self.controller.recovery.add(self.added(name, generator))

    def added(self, name: str, generator: Generator) -> Generator:
        """One generator more, which nobody asks yet."""
        self.generators.append(generator)
        self._feed()
        self.handles[name] = generator.start(name)
        return generator

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
