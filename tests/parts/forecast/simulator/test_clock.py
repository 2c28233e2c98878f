"""Virtual time: order, cancellation, time-outs, and no waiting in real time."""

from __future__ import annotations

import asyncio
import time

import pytest

from llamarl.parts.forecast.simulator.clock import NothingScheduled, run_virtual


def test_time_passes_without_waiting() -> None:
    async def main() -> float:
        clock = asyncio.get_running_loop()
        assert clock.time() == 0.0
        await asyncio.sleep(1e6)
        return clock.time()

    start_s = time.monotonic()
    assert run_virtual(main()) == pytest.approx(1e6, abs=1e-6)
    assert time.monotonic() - start_s < 200


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def main() -> list[tuple[str, float]]:
        clock, heard = asyncio.get_running_loop(), list[tuple[str, float]]()

        async def after(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            heard.append((name, clock.time()))

        await asyncio.gather(after("c", 3), after("a", 1), after("same as a", 1), after("b", 2), after("now", 0))
        return heard

    heard = run_virtual(main())
    assert [name for name, _ in heard] == ["now", "a", "same as a", "b", "c"]
    assert [at_s for _, at_s in heard] == pytest.approx([0, 1, 1, 2, 3])


def test_a_cancelled_timer_does_not_move_the_clock() -> None:
    async def main() -> float:
        clock = asyncio.get_running_loop()
        task = asyncio.create_task(asyncio.sleep(1000))
        clock.call_later(500, lambda: None).cancel()
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(1)
        return clock.time()

    assert run_virtual(main()) == pytest.approx(2)


def test_timeouts_hold_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(7)


def test_a_deadlock_is_an_error_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingScheduled):
        run_virtual(main())
