"""Answers of the families of reasoning-gym; problems of a family; what is said without the package."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator

import pytest

from llamarl.config import ConfigError
from llamarl.data.sources.reasoning_gym import ReasoningGym as Problems
from llamarl.rewards._reasoning_gym import verify
from llamarl.rewards.reasoning_gym import ReasoningGym
from llamarl.types import Outcome, RewardItem

IS_THERE = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not IS_THERE, reason="the package `reasoning_gym` is not installed")


@pytest.fixture
def reward() -> Iterator[ReasoningGym]:
    made = ReasoningGym(workers=1, cpu_s=60)
    yield made
    made.close()


@needs_package
def test_answers_are_verified(reward: ReasoningGym) -> None:
    row = Problems(family="chain_sum", count=2, first=5)[1]
    said = [
        f"so <answer>1</answer> no <answer> {row.answer} </answer> done", f"#### {row.answer}", row.answer,
        f"<answer>{row.answer}</answer> <answer>x</answer>", "\ud800",
    ]  # fmt: skip
    items = [RewardItem(prompt="", response=one, answer="", metadata=row.metadata) for one in said]
    found = reward.score([*items, RewardItem(prompt="", response="1", answer="1", metadata={})])
    outcomes = [Outcome.SCORE] * 3 + [Outcome.WRONG] * 2 + [Outcome.INVALID]
    assert [one.outcome for one in found] == outcomes, found
    assert [one.value for one in found[:3]] == [1.0] * 3 and all(one.value < 0.5 for one in found[3:])


@needs_package
def test_ranges_of_a_seed_are_parts_of_one_sequence() -> None:
    whole = Problems(family="chain_sum", count=6, seed=3)
    part = Problems(family="chain_sum", count=2, first=4, seed=3)
    assert [part[0].question, part[1].question] == [whole[4].question, whole[5].question]
    assert (
        part[0].problem_id == "chain_sum-3-4" and whole[0].question != Problems(family="chain_sum", count=1)[0].question
    )


@needs_package
def test_right_answers_of_the_families_are_right() -> None:
    """Through JSON, as they travel. Families whose problems have no one answer are left out."""
    from reasoning_gym.factory import DATASETS

    wrong = list[str]()
    for family in sorted(DATASETS):
        try:
            row = Problems(family=family, count=1)[0]
        except (ConfigError, ImportError, OSError):
            continue  # a composite, or data that it would download
        entry = json.loads(row.metadata["entry"])
        if row.answer and verify({**row.metadata, "answer": row.answer}) < 1:
            wrong.append(f"{family}: {entry['answer']!r:.60}")
    assert len(wrong) <= 3, wrong


@needs_package
@pytest.mark.parametrize(
    ("options", "said"), [({"family": "chain_sums"}, "chain_sums"), ({"options": {"min_term": 1}}, "min_term")]
)
def test_mistakes_are_told(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Problems(**{"family": "chain_sum", "count": 1, **options})[0]


@pytest.mark.skipif(IS_THERE, reason="the package is installed")
def test_a_missing_package_is_told() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'llamarl\[reasoning-gym\]'"):
        Problems(family="chain_sum", count=1)[0]
