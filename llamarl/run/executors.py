"""Executors of a run: how they are specified, started, supervised and stopped."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from llamarl.checkpoint.keeper import MirrorPlace
from llamarl.cluster.api import Cluster, ExecutorError, ExecutorHandle, ExecutorSpec, HostFailed, HostShare, RemoteError
from llamarl.cluster.engine_files import MEMORY, mirror_folder
from llamarl.config import ConfigError, RunConfig
from llamarl.config.ref import part
from llamarl.config.roles import CriticConfig, TrainerConfig
from llamarl.controller.admission import Problems
from llamarl.controller.controller import Controller, build_controller
from llamarl.controller.ports import Executors
from llamarl.controller.progress import Progress
from llamarl.controller.services import Services
from llamarl.controller.supervision import Interrupted, PausableClockLoop, StallWatch, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.distributed.links import open_rendezvous
from llamarl.executors.replies import NO_TRAINER, ControllerState, Partnership
from llamarl.journal.writer import Journal
from llamarl.run.folder import RunFolder
from llamarl.run.placement import Placer, models_in_use
from llamarl.run.python_inputs import with_content

TARGETS = {
    "trainer": "trainer:TrainerExecutor",
    "reward-model": "models:RewardModelExecutor",
    "reference": "models:ReferenceExecutor",
    "critic": "models:CriticExecutor",
}
"""Executors with a model: module and class in `llamarl.executors`, by name."""
PROCESS = "starts its process"
"""Stage of an executor before its first reply."""


def executor_spec(
    name: str, target: str, threads: int, num_ranks: int = 1, *, place: Sequence[HostShare] = (), **options: Any
) -> ExecutorSpec:
    """Returns the specification of an executor.

    Args:
        target: `module:Class` in `llamarl.executors`, or with the full module name.
        threads: CPU threads of each rank.
    """
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return ExecutorSpec(
        name=name,
        target=target if target.startswith("llamarl.") else f"llamarl.executors.{target}",
        options=options,
        num_ranks=num_ranks,
        env=env | {name: value for share in place if not share.name for name, value in share.env.items()},
        hosts=tuple(share for share in place if share.name),
    )


def reward_spec(config: RunConfig, place: Sequence[HostShare] = ()) -> ExecutorSpec:
    """Returns the specification of the executor that scores responses, with the rewards of each source."""
    own = {key: with_content(config.of(one).reward) for key, one in config.data.by_key.items() if one.reward}
    return executor_spec(
        "reward", "reward:RewardExecutor", 1, place=place, model_path=config.model.path,
        config=with_content(config.reward), of_sources=own,
    )  # fmt: skip


class RunSpecs:
    """Specifications of a run's executors except generators, by name. Each new one has its own rendezvous of ranks."""

    def __init__(self, config: RunConfig, folder: RunFolder, places: Placer, *, resume: bool) -> None:
        self._config, self._places, self._checkpoints = config, places, str(folder.checkpoints)
        self._resume = resume
        self._mirror = secrets.token_hex(8) if config.checkpoint.mirror else ""
        self._models = models_in_use(config)

    def first(self) -> list[ExecutorSpec]:
        """Returns the specifications of trainer, reward, and all models that the config needs."""
        also = ("environment",) if self._config.has_episodes else ()
        return [self.spec(name, self._places.place(name)) for name in ("trainer", "reward", *self._models, *also)]

    def again(self, name: str) -> ExecutorSpec:
        """Returns the specification of a replacement for a dead executor, which starts without training state."""
        self._resume = False
        return self.spec(name, self._places.again(name))

    def spec(self, name: str, place: Sequence[HostShare]) -> ExecutorSpec:
        """Returns the specification of one executor."""
        config = self._config
        if name == "reward":
            return reward_spec(config, place)
        if name == "environment":
            return part("episodes", "spec")(config, place)
        settings, options, num_ranks = config.trainer if name == "trainer" else self._models[name], dict[str, Any](), 1
        if layout := self._places.layout(name):
            settings = settings.model_copy(update={"parallelism": layout})
            config = config.model_copy(update={name: settings})
        if isinstance(settings, TrainerConfig | CriticConfig):
            num_ranks = settings.parallelism.num_ranks
            rendezvous = open_rendezvous(num_ranks, config.cluster.timeout_s)
            options.update(checkpoint_folder=self._checkpoints, rendezvous=rendezvous)
            if self._mirror:
                options["mirror"] = MirrorPlace(self._mirror, self._places.keepers())
        if name == "trainer":
            options["resume"] = self._resume
        return executor_spec(name, TARGETS[name], settings.threads, num_ranks, place=place, config=config, **options)

    def close(self) -> None:
        """Removes mirrors of the run's state from this machine."""
        if self._mirror and MEMORY in os.environ:
            shutil.rmtree(mirror_folder(self._mirror), ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorSpecs:
    """Specifications of a run's generators, by number. Each has its own rendezvous of ranks."""

    config: RunConfig
    logs: Path = Path()
    """Folder for the output of processes that are not executors."""
    choices: Path | None = None
    """Folder of the run with the choice of kernels. None means that choices are not kept."""
    partnership: Partnership = NO_TRAINER

    def first(self, places: Placer) -> list[ExecutorSpec]:
        """Returns the specifications of the generators that have a place at the start."""
        return [self(int(name.split("-")[1]), places.place(name)) for name in places.of_role("generator")]

    def __call__(self, number: int, place: Sequence[HostShare] = ()) -> ExecutorSpec:
        name, config = f"generator-{number}", self.config.generator
        is_native = config.backend == "native"
        backend = None if is_native else part(config.backend, "settings")(self.config, self.logs, number)
        return executor_spec(
            name, "generator:GeneratorExecutor", config.threads, config.tensor_parallel, place=place,
            model_path=self.config.model.path, config=config, backend=backend, choices=str(self.choices or ""),
            partnership=self.partnership,
            rendezvous=open_rendezvous(config.tensor_parallel, self.config.cluster.timeout_s),
        )  # fmt: skip


async def spawn_all(
    cluster: Cluster,
    specs: Sequence[ExecutorSpec],
    timeout_s: float,
    tell: Callable[[dict[str, str]], None] = lambda missing: None,
) -> list[ExecutorHandle]:
    """Starts all executors. Returns them in the order of `specs`.

    Args:
        tell: called with the missing executors and their stages, at first and after each change.

    Raises:
        ConfigError: a user's mistake that only an executor can detect, such as damaged weights.
        ExecutorError: an executor did not start.
    """
    missing = {spec.name: PROCESS for spec in specs}

    async def spawn(spec: ExecutorSpec) -> ExecutorHandle:
        def told(stage: str) -> None:
            missing[spec.name] = stage
            tell(missing)

        handle = await cluster.spawn(spec, timeout_s, told)
        del missing[spec.name]
        tell(missing)
        return handle

    tell(missing)
    try:
        return await asyncio.gather(*map(spawn, specs))
    except RemoteError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise


class StartedGenerators:
    """Generators of a run that have been started, by name."""

    def __init__(
        self, cluster: Cluster, specs: GeneratorSpecs, places: Placer, start_timeout_s: float, stop_timeout_s: float
    ) -> None:
        self._cluster, self._specs, self._places = cluster, specs, places
        self._start_timeout_s, self._stop_timeout_s = start_timeout_s, stop_timeout_s
        self._running = dict[str, ExecutorHandle]()

    def add(self, handle: ExecutorHandle) -> None:
        """Adds a generator, whose place is kept until it dies."""
        self._running[handle.name] = handle
        handle.failed.add_done_callback(lambda _: self._leave(handle.name))

    async def spawn(self, number: int) -> ExecutorHandle:
        """Starts another generator, if there is space. Returns its handle."""
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
        """Ends generators whose devices go to another executor."""
        here = [self._running[name] for name in self._places.displaced() if name in self._running]
        await asyncio.gather(*(self._give_up(handle, executor) for handle in here))

    async def _give_up(self, handle: ExecutorHandle, executor: str) -> None:
        lost = HostFailed(handle.name, (0,), f"its devices go to {executor}, which lost its devices")
        with suppress(ExecutorError):  # the error that ends it
            await handle.give_up(lost, self._stop_timeout_s)

    def _leave(self, name: str) -> None:
        self._running.pop(name, None)
        self._places.leave(name)


WIND_DOWN_S = 4.0
"""Longest wait for the current step and a checkpoint when a run is asked to end."""


T = TypeVar("T")


@asynccontextmanager
async def supervised(
    spawn: Callable[[], Coroutine[Any, Any, T]],
    shutdown: Callable[[float], Awaitable[None]],
    timeout_s: float,
    *,
    on_stop: Callable[[], None] = lambda: None,
    leave: Callable[[], None] = lambda: None,
    handles_signals: bool = True,
) -> AsyncIterator[tuple[T, Supervisor]]:
    """Starts executors under a supervisor. Stops all executors at the end, also after errors.

    Args:
        spawn: starts them.
        shutdown: stops them within `timeout_s`.
        on_stop: called when the stop begins.
        leave: restores the terminal before a second signal ends the process.
        handles_signals: Ctrl-C and SIGTERM end supervised work with `Interrupted`. Work that has ended keeps its
        result.
    """
    supervisor = Supervisor()
    with interruptible(supervisor, leave) if handles_signals else nullcontext():
        try:
            yield await supervisor.run(spawn()), supervisor
        finally:
            on_stop()
            await supervisor.stop()
            await shutdown(timeout_s)


@asynccontextmanager
async def assembled(
    config: RunConfig,
    problems: Problems,
    telemetry: Telemetry,
    shutdown: Callable[[float], Awaitable[None]],
    spawn: Callable[[], Coroutine[Any, Any, Executors]],
    *,
    journal: Journal | None = None,
    resumed: Callable[[Executors], Coroutine[Any, Any, ControllerState | None]] | None = None,
    on_stop: Callable[[], None] = lambda: None,
    leave: Callable[[], None] = lambda: None,
    handles_signals: bool = True,
) -> AsyncIterator[tuple[Controller, Supervisor]]:
    """Builds a controller, not started yet, with `supervised` executors: for training, evaluation and simulation.

    Args:
        journal: of rollouts. None means that none is kept.
        resumed: returns the state of the checkpoint to resume from. None means a new run.
    """
    limit_s = config.cluster.shutdown_timeout_s
    spawned = supervised(spawn, shutdown, limit_s, on_stop=on_stop, leave=leave, handles_signals=handles_signals)
    async with spawned as (executors, supervisor):
        state = await supervisor.run(resumed(executors)) if resumed else None
        services = Services(
            supervisor=supervisor,
            telemetry=telemetry,
            watch=StallWatch(config.cluster.stall_timeout_s),
            journal=journal or Journal(),
            progress=Progress.resumed_at(state["step"] if state else 0),
        )
        controller = build_controller(config, problems, executors, services, state)
        for handle in controller.executors.irreplaceable:  # generators have another policy
            supervisor.watch(handle)
        telemetry.attach(list(controller.executors), controller.replicas, services.progress)
        supervisor.start(telemetry.poll_loop(), "status")
        yield controller, supervisor


def nothing_to_resume(resume: bool, damaged: Sequence[str], warn: Callable[[str], None]) -> None:
    """Warns that there is no checkpoint to resume from. Raises ConfigError if there are only `damaged` checkpoints."""
    if damaged:
        raise ConfigError(
            f"--resume: no checkpoint is complete: {damaged[0]}; restore its files, or start a new run with "
            "another --name"
        )
    if resume:
        warn("--resume: no checkpoint was saved yet; the run starts from the beginning")


@contextmanager
def interruptible(supervisor: Supervisor, leave: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Context in which Ctrl-C, SIGTERM and SIGHUP (unless `nohup` ignores it) end the run in order. A second signal
    ends this process and its executors at once, after `leave`. At the end, signals are handled as before."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():  # signals only reach the main thread
        if isinstance(loop, PausableClockLoop):
            loop.listen(lambda: supervisor.fail(Interrupted("ended by SIGINT")))
        yield
        return
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    numbers = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hangs_up else ()))
    before = [signal.getsignal(number) for number in numbers]

    def ask(number: signal.Signals) -> None:
        for other in numbers:
            loop.remove_signal_handler(other)
            signal.signal(other, at_once)
        supervisor.fail(Interrupted(f"ended by {number.name}"))

    def at_once(number: int, _: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_DFL)
        with suppress(OSError, RuntimeError):  # the terminal is gone, or is being written to
            leave()
            text = f"llamarl: ended at once by a second {signal.Signals(number).name}; the last checkpoint is kept\n"
            os.write(2, text.encode())
        os.kill(os.getpid(), number)

    for number in numbers:
        loop.add_signal_handler(number, ask, number)
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set by native code
