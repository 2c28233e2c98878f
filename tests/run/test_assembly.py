"""How a run is ended from outside: in order, at once, or not at all when it has ended by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from llamarl.controller.admission import Problems
from llamarl.controller.ports import Executors
from llamarl.controller.supervision import Interrupted
from llamarl.controller.telemetry import Telemetry
from llamarl.observability.screen import NullScreen
from llamarl.observability.sinks import MetricsLog
from llamarl.run.executors import assembled, supervised
from tests.controller.fakes import config, prompts
from tests.executors.ledger import Generator, Reward, Trainer

TWICE = """if True:
    import asyncio, os, signal
    from llamarl.controller.supervision import Supervisor
    from llamarl.run.executors import interruptible

    async def main():
        with interruptible(Supervisor(), lambda: os.write(1, b"the terminal is given back")):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.05)
    asyncio.run(main())"""


def run(folder: Path, number: int | None, at_stop: int | None) -> list[str]:
    """A run that is asked to end while it works, or when its executors are stopped; what asyncio complained of."""
    settings, complaints = config(folder), list[str]()
    problems = Problems(train=prompts(9), eval=(), stop_token_ids=(2,))
    telemetry = Telemetry(settings, NullScreen(), MetricsLog(None, print), 1)

    async def spawn() -> Executors:
        return Executors(
            trainer=Trainer().start("trainer"),
            reward=Reward().start("reward"),
            generators=[Generator().start("generator-0")],
        )

    async def shutdown(timeout_s: float) -> None:
        if at_stop is not None:
            os.kill(os.getpid(), at_stop)
        await asyncio.sleep(0.01)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(str(context)))
        async with assembled(settings, problems, telemetry, shutdown, spawn) as (_, supervisor):
            if number is not None:
                os.kill(os.getpid(), number)
            await supervisor.run(asyncio.sleep(0.05))

    asyncio.run(main())
    return complaints


class Refused(Exception):
    """One of several executors does not start."""


@pytest.mark.parametrize("fails", [False, True])
def test_what_has_started_is_stopped_once_nothing_runs_any_more(fails: bool) -> None:
    """Also where others do not start. Loops end before the executors that they call."""
    events = list[str]()

    async def spawn() -> str:
        events.append("one has started")
        if fails:
            raise Refused
        return "executors"

    async def shutdown(timeout_s: float) -> None:
        await asyncio.sleep(0)
        events.append(f"stopped within {timeout_s:g} s")

    async def loop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            events.append("the loop has ended")

    async def main() -> None:
        options: dict[str, Any] = {"on_stop": lambda: events.append("stopping"), "handles_signals": False}
        async with supervised(spawn, shutdown, 3.0, **options) as (executors, supervisor):
            assert executors == "executors"
            supervisor.start(loop(), "loop")
            await asyncio.sleep(0)

    with pytest.raises(Refused) if fails else nullcontext():
        asyncio.run(main())
    loops = [] if fails else ["the loop has ended"]
    assert events == ["one has started", "stopping", *loops, "stopped within 3 s"]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Signals mean what they meant, so that Ctrl-C does not end a script or a prompt whose run was ended by one."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGTERM, own := lambda number, frame: None)
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == [before[0], own, before[2]]


@pytest.mark.usefixtures("handlers")
def test_what_has_finished_stays_finished(tmp_path: Path) -> None:
    assert run(tmp_path, number=None, at_stop=signal.SIGINT) == []


@pytest.mark.usefixtures("handlers")
def test_what_is_asked_to_end_ends(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="ended by SIGTERM"):
        run(tmp_path, number=signal.SIGTERM, at_stop=None)


def test_a_second_signal_says_so_and_gives_the_terminal_back() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=240)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == "the terminal is given back"
    assert done.stderr == "llamarl: ended at once by a second SIGTERM; the last checkpoint is kept\n"
