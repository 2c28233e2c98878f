"""A training run from its config to its summary: executors, evaluation, training, evaluation, files."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from llamarl.cluster.api import Cluster, ExecutorError, ExecutorHandle, port
from llamarl.config import ConfigError, RunConfig
from llamarl.config.load import flat_settings
from llamarl.config.ref import part
from llamarl.controller.admission import TooManyInvalid
from llamarl.controller.controller import Controller
from llamarl.controller.ports import CriticPort, Executors, TrainerPort
from llamarl.controller.supervision import Interrupted, Stalled, rare_garbage_collections, run_pausable
from llamarl.controller.telemetry import Telemetry
from llamarl.controller.train_loop import NotSaved, TrainLoop, train_again
from llamarl.executors.replies import ControllerState, Partnership
from llamarl.journal.writer import Journal
from llamarl.models.fit import beside_bytes
from llamarl.observability.files import remedy
from llamarl.observability.metrics import EvalMetrics
from llamarl.observability.report import RunFile, RunSummary, render_summary, verdict, write_summary, write_trace
from llamarl.observability.screen import RunInfo, Screen, open_screen
from llamarl.observability.sinks import EventLog, MetricsLog, RecordedScreen, Subject, start_of_run
from llamarl.observability.spans import now_s
from llamarl.run.copies import open_copier
from llamarl.run.executors import (
    WIND_DOWN_S,
    GeneratorSpecs,
    RunSpecs,
    StartedGenerators,
    assembled,
    nothing_to_resume,
    spawn_all,
)
from llamarl.run.folder import RunFolder
from llamarl.run.journal import open_journal
from llamarl.run.placement import Machines, open_machines
from llamarl.run.prepare import Prepared
from llamarl.training.result import NonFiniteStep, PolicyStepResult
from llamarl.types import RolloutGroup


@dataclass(kw_only=True, slots=True)
class _RunOutcome:
    """Progress of a run, and its end."""

    end: Literal["finished", "interrupted", "failed"] = "failed"
    before: tuple[EvalMetrics, ...] = ()
    after: tuple[EvalMetrics, ...] = ()
    loop_started_s: float = math.nan
    loop_ended_s: float = math.nan
    error: BaseException | None = None
    warnings: list[str] = field(default_factory=list)


def run(
    config: RunConfig,
    prepared: Prepared,
    folder: RunFolder,
    *,
    resume: bool,
    command_started_s: float,
    watch: str = "",
) -> RunSummary:
    """Runs `config` to its end. The screen shows `watch`, the address of the run's page.

    Raises:
        ConfigError: a device or a component cannot work.
        Interrupted: the user ended the run; the last checkpoint is intact.
        ExecutorError, FolderLost, NonFiniteStep, NotSaved, Stalled, TooManyInvalid, WeightsWrong: the run failed.
        All errors have the summary of the run as a note.
    """
    with rare_garbage_collections(), folder:
        return run_pausable(_TrainingRun(config, prepared, folder, resume, command_started_s, watch).run())


class _TrainingRun:
    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        folder: RunFolder,
        resume: bool,
        command_started_s: float,
        watch: str,
    ) -> None:
        self._config = config
        self._watch = watch
        self._folder = folder
        self._resume = resume
        self._command_started_s = command_started_s
        self._problems = prepared.problems
        self._shape = prepared.shape
        self._placer = prepared.placer
        self._specs: RunSpecs | None = None
        """None before executors start."""
        self._outcome = _RunOutcome(warnings=list(prepared.warnings))
        self._unrecorded = list[tuple[list[RolloutGroup], PolicyStepResult]]()
        """Steps that were repeated and are not in the metrics."""

    async def run(self) -> RunSummary:
        config, folder = self._config, self._folder
        rollout = config.rollout
        limit = rollout.staleness_limit
        info = RunInfo(
            name=config.name,
            model=f"{self._shape.family} {self._shape.num_parameters / 1e6:.3g}M",
            folder=folder.path,
            steps=config.steps,
            groups_per_step=rollout.prompts_per_step,
            max_staleness=rollout.max_staleness,
            watch=self._watch,
        )
        with open_screen(config.screen, info) as self._shown:
            keep = (lambda failure: screen.warn(str(failure)), config.record.max_bytes)
            events = EventLog(folder.events, *keep)
            screen = RecordedScreen(self._shown, events)
            facts = start_of_run() | {"staleness_limit": limit, "model": info.model, "resumed": self._resume}
            if self._placer and self._placer.sharing:
                facts["gpu_sharing"] = self._placer.sharing
            events.add("start", **facts)
            for text in self._outcome.warnings:
                screen.warn(text)
            log = MetricsLog(folder.metrics, *keep)
            if set(config.metrics.sinks) - {"jsonl"}:
                log.recorder = part("page", "Trackers")(config.metrics.sinks, self._subject(), screen.warn)
            telemetry = Telemetry(config, screen, log, limit, events=events)
            journal = open_journal(config, self._problems, folder, telemetry.warn)
            try:
                await self._with_executors(screen, telemetry, journal)
            except BaseException as error:
                self._outcome.error = error
                self._outcome.end = "interrupted" if isinstance(error, Interrupted) else "failed"
                raise
            finally:
                for one in (log, journal):
                    one.close()
                summary = self._summary(telemetry, limit)
                if self._outcome.error is not None:
                    self._outcome.error.add_note(render_summary(summary))
                events.flush(is_last=True)
                events.add("end", end=summary.end, reason=summary.end_reason)
                events.close()
                with suppress(OSError):  # a full disk must not hide how the run ended
                    write_summary(folder.summary, summary)
                    write_trace(folder.trace, telemetry.spans)
        return summary

    def _subject(self) -> Subject:
        return Subject(
            name=self._config.name,
            folder=self._folder.path,
            settings=dict(flat_settings(self._config.model_dump(mode="json", exclude_none=True))),
            port=self._config.metrics.port,
            step=self._folder.recorded_steps() if self._resume else 0,
        )

    async def _with_executors(self, screen: Screen, telemetry: Telemetry, journal: Journal) -> None:
        folder = self._folder
        machines = open_machines(
            self._config, folder.logs, folder.path, self._placer, screen.phase, resume=self._resume
        )
        cluster = machines.open()
        copying = open_copier(self._config, self._folder, telemetry.warn)
        async with assembled(
            self._config,
            self._problems,
            telemetry,
            cluster.shutdown,
            lambda: self._spawn(machines, cluster, screen),
            resumed=(lambda executors: self._resumed(executors, screen, journal)) if self._resume else None,
            journal=journal,
            on_stop=lambda: self._stopping(screen),
            leave=self._shown.__exit__,
        ) as (controller, supervisor):
            supervisor.start(self._folder.check_loop(), "run folder")
            if self._resume:
                self._continue(telemetry, controller.version)
            journal.begin(controller.version)
            if copying:
                supervisor.start(copying.loop(), "copies of checkpoints")
            machines.follow(controller, telemetry, supervisor)
            training = controller.training
            assert training, "train starts a trainer"
            try:
                await supervisor.run(self._train(controller, training, telemetry))
            except (Interrupted, ExecutorError, NonFiniteStep, Stalled, TooManyInvalid) as error:
                executor = getattr(error, "executor", "")
                if isinstance(error, NonFiniteStep) or executor in ("trainer", "critic"):  # they cannot save
                    with suppress(TimeoutError):
                        async with asyncio.timeout(WIND_DOWN_S):
                            await training.record_completed()
                else:
                    screen.phase("saving a checkpoint before ending")
                    await self._wind_down(training, screen)
                raise
            finally:
                if copying:
                    await copying.finish(screen.phase)
        self._folder.check()
        self._outcome.end = "finished"

    def _continue(self, telemetry: Telemetry, step: int) -> None:
        """Continues the run's files at `step`. The checkpoint fits these settings, which are recorded now. Raises
        ConfigError."""
        try:
            telemetry.resume_at(min(step, self._folder.recorded_steps()))
            self._folder.drop_rollouts_after(step)
            for groups, result in self._unrecorded:
                telemetry.trained_again(groups, result)
            if lack := self._folder.unrecorded(step, self._config.checkpoint.keep):
                telemetry.warn(f"--resume: {lack}; curves and reports lack them")
            if step >= self._config.steps:
                telemetry.warn(
                    f"--resume: the run is finished, all {step} steps are done; give more --steps to continue"
                )
            self._folder.write_config()
        except OSError as error:
            raise ConfigError(
                f"--resume: cannot write to {self._folder.path}: {error.strerror}; {remedy(error)}"
            ) from None

    def _stopping(self, screen: Screen) -> None:
        screen.phase("stopping executors")
        if self._specs is not None:
            self._specs.close()
        if math.isnan(self._outcome.loop_ended_s):
            self._outcome.loop_ended_s = now_s()

    async def _spawn(self, machines: Machines, cluster: Cluster, screen: Screen) -> Executors:
        config, timeout_s = self._config, self._config.cluster.timeout_s
        places = await machines.places(screen.phase)
        partnership = Partnership(
            delta=config.weight_sync.delta, lora=config.trainer.lora, sleeps=config.generators_sleep,
            beside_bytes=beside_bytes(config, self._shape),
        )  # fmt: skip
        generator = GeneratorSpecs(
            config=config, logs=self._folder.logs, choices=self._folder.kernels, partnership=partnership
        )
        self._specs = others = RunSpecs(config, self._folder, places, resume=self._resume)
        specs = others.first()
        num_others = len(specs)

        def tell(missing: dict[str, str]) -> None:
            names = [f"{name} ({stage})" if stage else name for name, stage in missing.items()]
            text = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            screen.phase("starting executors", len(specs) - len(missing), len(specs), text)

        specs += generator.first(places)
        trainer, reward, *models = (handles := await spawn_all(cluster, specs, timeout_s, tell))[:num_others]
        fleet = StartedGenerators(cluster, generator, places, timeout_s, config.cluster.shutdown_timeout_s)
        for handle in (generators := handles[num_others:]):
            fleet.add(handle)

        async def spawn_again(name: str) -> ExecutorHandle:
            """Starts a replacement of an executor, if there is a place."""
            spec = others.again(name)
            if layout := places.layout(name):
                screen.warn(f"{name} starts in another layout, because too few devices are left: {layout}")
            await fleet.make_way(name)
            return await cluster.spawn(spec, timeout_s)

        return Executors(
            trainer=trainer,
            reward=reward,
            models={handle.name: handle for handle in models},
            generators=generators,
            spawn_generator=fleet.spawn,
            spawn_again=spawn_again,
            free_generator_slots=places.free_generator_slots,
            hosts_may_join=machines.hosts_may_join,
        )

    async def _resumed(self, executors: Executors, screen: Screen, journal: Journal) -> ControllerState | None:
        """Returns the state of the newest checkpoint, extended by the journal. None means that nothing was saved yet.
        Raises ConfigError."""
        screen.phase("loading the checkpoint")
        timeout_s = self._config.cluster.timeout_s
        assert executors.trainer is not None
        trainer = port(TrainerPort, executors.trainer, timeout_s)
        critic = port(CriticPort, executors.models["critic"], timeout_s) if "critic" in executors.models else None
        saved, damaged = await trainer.resumed()
        try:
            state, lost = journal.resume(saved)
        except OSError as error:
            raise ConfigError(f"--resume: cannot read {error.filename}: {error.strerror}") from None
        if state is None or (saved is None and damaged):
            nothing_to_resume(True, damaged, screen.warn)
        said = (
            [f"--resume continues from step {saved['step']}, because {'; '.join(damaged)}"] if saved and damaged else []
        )
        said += [f"--resume: {lost}"] if lost else []
        self._outcome.warnings += said
        for text in said:
            screen.warn(text)
        if saved and critic:
            await critic.resume(saved["step"])
        await self._forward(trainer, critic, journal, saved["step"] if saved else 0, screen)
        return state

    async def _forward(
        self, trainer: TrainerPort, critic: CriticPort | None, journal: Journal, step: int, screen: Screen
    ) -> None:
        """Repeats the steps after a checkpoint's `step` that the journal has."""
        recorded, first = self._folder.recorded_steps(), step

        def told(step: int, groups: list[RolloutGroup], result: PolicyStepResult | None) -> None:
            screen.phase("repeating the steps after the checkpoint", step - first, journal.version - first)
            if result is not None and step > recorded:
                self._unrecorded.append((groups, result))

        try:
            await train_again(journal.steps_after(step), trainer, critic, on_step=told)
        except OSError as error:
            raise ConfigError(f"--resume: cannot read {error.filename}: {error.strerror}") from None

    async def _train(self, controller: Controller, training: TrainLoop, telemetry: Telemetry) -> None:
        outcome, was_done = self._outcome, controller.version >= self._config.steps
        await controller.start()
        now = tuple[EvalMetrics, ...]()
        if self._problems.eval:
            now = tuple(one.metrics for one in await controller.evaluate())
            on_record = self._folder.first_evals([one.name for one in now]) if self._resume else {}
            outcome.before = tuple(on_record.get(one.name, one) for one in now)
        outcome.loop_started_s = now_s()
        telemetry.begin_loop(controller.version)
        await controller.train()
        outcome.loop_ended_s = now_s()
        telemetry.end_loop()
        if was_done:
            outcome.after = now
        elif self._problems.eval:
            outcome.after = tuple(one.metrics for one in await controller.evaluate())
        await training.save()
        await telemetry.poll()  # for the spans of the last half second

    async def _wind_down(self, training: TrainLoop, screen: Screen) -> None:
        try:
            async with asyncio.timeout(WIND_DOWN_S):
                await training.wind_down()
        except (TimeoutError, ExecutorError, NotSaved) as error:
            why = f"it took more than {WIND_DOWN_S:g} s" if isinstance(error, TimeoutError) else str(error)
            screen.warn(f"no checkpoint was saved at the end: {why}; --resume continues from the previous one")

    def _summary(self, telemetry: Telemetry, staleness_limit: int) -> RunSummary:
        outcome, folder = self._outcome, self._folder
        in_loop = math.isfinite(outcome.loop_started_s)
        started_s = outcome.loop_started_s if in_loop else outcome.loop_ended_s
        wall_s = outcome.loop_ended_s - started_s
        accounts = telemetry.accounts(started_s, outcome.loop_ended_s)
        stalls = sorted(telemetry.stalls_s) or [0.0]
        first_step_s = telemetry.first_step_ended_s - self._command_started_s
        return RunSummary(
            name=self._config.name,
            end=outcome.end,
            end_reason=str(outcome.error or "").split("\n", 1)[0],
            steps=telemetry.progress.recorded,
            first_step=telemetry.first_step,
            start_s=started_s - self._command_started_s,
            wall_s=wall_s,
            samples_per_s=telemetry.num_samples / wall_s if wall_s else 0.0,
            unaccounted_share=accounts.unaccounted_share,
            overlap_share=accounts.overlap_share,
            busy_share=accounts.busy_share,
            staleness_max=telemetry.staleness_max,
            staleness_limit=staleness_limit,
            max_staleness=self._config.rollout.max_staleness,
            invalid_share=telemetry.num_invalid / max(telemetry.num_samples, 1),
            verdict=verdict(accounts, telemetry.first_step, telemetry.progress.recorded),
            before=outcome.before,
            after=outcome.after,
            completions=telemetry.completions,
            files=tuple(RunFile(path=path, meaning=meaning) for path, meaning in folder.files.items()),
            warnings=(*outcome.warnings, *telemetry.warnings),
            extra={
                "stall_p99_s": stalls[math.ceil(0.99 * len(stalls)) - 1],
                "first_step_s": first_step_s,
                **telemetry.sources.totals(),
                **telemetry.transport_speeds,
                **telemetry.usages(),
            },
        )
