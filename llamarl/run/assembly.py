"""Executors from their start to their end: of fine-tuning and replay (`supervised`), and with a controller over them of
training, evaluation and simulation (`assembled`)."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, TypeVar

from llamarl.config import ConfigError, RunConfig
from llamarl.controller.admission import Problems
from llamarl.controller.controller import Controller, build_controller
from llamarl.controller.ports import Executors
from llamarl.controller.progress import Progress
from llamarl.controller.services import Services
from llamarl.controller.supervision import Interrupted, PausableClockLoop, StallWatch, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.executors.replies import ControllerState
from llamarl.journal.writer import Journal

WIND_DOWN_S = 4.0
"""Longest wait for the step under way and a checkpoint when a run is asked to end."""


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
    """Executors, and who watches over what is done with them; at the end all are stopped, whatever has happened.

    Args:
        spawn: starts them.
        shutdown: stops them, within `timeout_s`.
        on_stop: hears that they are being stopped.
        leave: gives the terminal back, before a second signal ends the process.
        handles_signals: Ctrl-C and SIGTERM end what runs under the supervisor with `Interrupted`; what has ended by
            itself stays as it ended.
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
    """A controller that has not started yet, over executors that are `supervised`.

    Args:
        journal: of what is generated; None: none is kept.
        resumed: where a checkpoint says that the run goes on; None: it begins.
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
        for handle in controller.executors.irreplaceable:  # generators have a policy of their own
            supervisor.watch(handle)
        telemetry.attach(list(controller.executors), controller.replicas, services.progress)
        supervisor.start(telemetry.poll_loop(), "status")
        yield controller, supervisor


def nothing_to_resume(resume: bool, damaged: Sequence[str], warn: Callable[[str], None]) -> None:
    """Says that there is no checkpoint to go on from. Raises ConfigError: there are, and all are `damaged`."""
    if damaged:
        raise ConfigError(
            f"--resume: no checkpoint is whole: {damaged[0]}; put its files back, or start another run with another "
            "--name"
        )
    if resume:
        warn("--resume: no checkpoint was saved yet; the run starts from the beginning")


@contextmanager
def interruptible(supervisor: Supervisor, leave: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Ctrl-C, SIGTERM and the end of the terminal (unless `nohup` has it ignored) end the run in order; a second one
    ends this process at once, after `leave`, and the executors with it. Afterwards they mean what they meant before."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():  # where signals do not come
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
        with suppress(OSError, RuntimeError):  # the terminal has gone, or something is being written to it
            leave()
            text = f"llamarl: ended at once by a second {signal.Signals(number).name}; the last checkpoint stands\n"
            os.write(2, text.encode())
        os.kill(os.getpid(), number)

    for number in numbers:
        loop.add_signal_handler(number, ask, number)
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: native code's
