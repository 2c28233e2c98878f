"""Shared by the reward tests."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamarl.rewards.math import Math
from llamarl.types import RewardItem

_DATA = Path(__file__).parents[3] / "shared" / "data"


def item(response: str, answer: str = "72") -> RewardItem:
    return RewardItem(prompt="", response=response, answer=answer, metadata={})


def alive(pid: int) -> bool:
    """False for zombies too: they run nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        os.sched_yield()
        time.sleep(0.005)


@pytest.fixture(scope="session", params=["gsm8k_train", "gsm8k_test"])
def gsm8k_rows(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    path = _DATA / f"{request.param}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine; GSM8K is not part of the repository")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def math() -> Iterator[Math]:
    reward = Math(cpu_s=1)
    yield reward
    reward.close()
