"""Shared by the reward tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.rewards.math import Math
from llamarl.types import RewardItem

_DATA = Path(__file__).parents[3] / "shared" / "data"


def item(response: str, answer: str = "72") -> RewardItem:
    return RewardItem(prompt="", response=response, answer=answer, metadata={})


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
