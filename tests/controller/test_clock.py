"""A pause of the whole process breaks no deadline; work does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time

import pytest

from llamarl.controller import supervision
from llamarl.controller.supervision import Stalled, StallWatch, run_pausable


async def _no_facts() -> str:
    return "nobody"


def test_a_stopped_process_has_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP for longer than the limit, and what it waited for comes after it."""
    monkeypatch.setattr(supervision, "PAUSE_S", 1.0)

    async def main() -> float:
        watch, answer = StallWatch(1.5), asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.5, answer.set_result, None)
        watching = asyncio.create_task(watch.loop(_no_facts))
        async with asyncio.timeout(1.5):
            await answer
        assert not watching.done()
        with pytest.raises(Stalled):
            await watching
        return asyncio.get_running_loop().time() - started_s

    started_s = time.monotonic()
    pid = os.getpid()
    waker = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -STOP {pid}; sleep 6; kill -CONT {pid}"])
    assert run_pausable(main()) < 6.0 < time.monotonic() - started_s
    assert waker.wait() == 0


def test_time_passes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nothing happens for longer than what counts as a pause."""
    monkeypatch.setattr(supervision, "PAUSE_S", 0.8)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        await asyncio.sleep(2.0)
        assert loop.time() - start_s == pytest.approx(2.0, abs=0.5)

    run_pausable(main())
