"""Rewards of the tests of Python: a module of their own, as each worker of each run imports it."""

from __future__ import annotations

import asyncio
from typing import Any


def ends_right(prompt: str, response: str, answer: str, **row: Any) -> bool:
    return response.endswith(answer) and row["hint"] >= 0


async def brevity(response: str, hint: int) -> float:
    await asyncio.sleep(0)
    return -len(response) / 100 - 0 * hint
