"""Every reference passes its tests in the judge, the teacher's mistakes fail them; ranges of a seed share nothing."""

from __future__ import annotations

from llamarl.data.sources.list_functions import STEPS, ListFunctions
from llamarl.parts.episodes.rewards.code import Code
from llamarl.types import RewardItem
from tests.nightly import nightly


def share_right(problems: ListFunctions) -> float:
    items = [
        RewardItem(prompt="", response=row.metadata["solution"], answer="", metadata=row.metadata)
        for row in (problems[n] for n in range(len(problems)))
    ]
    reward = Code()
    found = reward.score(items)
    reward.close()
    return sum(one.is_right for one in found) / len(found)


@nightly("many problems; by day its rows are judged in parts/episodes/test_code.py")
def test_references_are_right_and_mistakes_are_seen() -> None:
    questions = [ListFunctions(count=60)[n].question for n in range(60)]
    assert all(any(name.partition(" {")[0] in text for text in questions) for name in STEPS)
    assert share_right(ListFunctions(count=60)) == 1.0
    assert share_right(ListFunctions(count=60, error_rate=1.0)) < 0.25


def test_ranges_are_parts_of_one_sequence() -> None:
    whole, part = ListFunctions(count=300, seed=2), ListFunctions(count=100, first=200, seed=2)
    assert [part[n] for n in range(100)] == [whole[n] for n in range(200, 300)]
    assert len({whole[n].question for n in range(300)}) == 300
