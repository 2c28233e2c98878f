"""What is large goes in several calls, in its order, and nothing is lost."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import reduce
from itertools import permutations

import numpy as np
import pytest

from llamarl.controller import ports as module
from llamarl.controller.ports import group_bytes, routes_bytes, split_calls, split_groups, split_requests
from llamarl.types import (
    FinishReason,
    GenerationRequest,
    Outcome,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
    SamplingParams,
)

PROMPT = np.zeros((10, 4), np.uint8)


def parked(group_id: int, index: int, num: int) -> Rollout:
    columns = Rollout.empty(0, 0).columns | {"routes": np.zeros((num, 4), np.uint8)}
    return Rollout(
        group_id=group_id, index=index, columns=columns, finish_reason=FinishReason.PARKED, prompt_routes=PROMPT
    )


def request(group_id: int, *sizes: int) -> GenerationRequest:
    return GenerationRequest(
        group_id=group_id, prompt_token_ids_T=np.zeros(11, np.int32), group_size=8, sampling=SamplingParams(),
        partials=tuple(parked(group_id, index, num) for index, num in enumerate(sizes)),
    )  # fmt: skip


def test_a_prompt_that_is_shared_counts_once() -> None:
    assert routes_bytes(request(0, 5, 7).partials) == 40 + 4 * 12


def test_items_are_cut_into_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_BYTES", 10)
    assert list(split_calls([3, 7, 1, 20, 4], int)) == [[3, 7], [1], [20], [4]]
    assert list(split_calls([], int)) == []


def test_requests_are_cut_by_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_BYTES", 100)
    requests = [request(0, 5, 5, 40), request(1), request(2, 1)]
    found = list(split_requests(requests))
    of = [[(one.group_id, [part.index for part in one.partials]) for one in call] for call in found]
    assert of == [[(0, [0])], [(0, [1])], [(0, [2])], [(1, []), (2, [0])]]


def test_small_ones_go_together() -> None:
    requests = [request(0, 5, 5, 40), request(1), request(2, 1)]
    assert [[one.group_id for one in call] for call in split_requests(requests)] == [[0, 1, 2]]


def group(number: int, *sizes: int, environment: bool = False) -> RolloutGroup:
    return RolloutGroup(
        group_id=number, prompt=Prompt(prompt_id="p", text="", token_ids_T=np.zeros(11, np.int32), answer=""),
        rollouts=tuple(parked(number, index, num) for index, num in enumerate(sizes)),
        results=tuple(RewardResult(outcome=Outcome.SCORE, value=float(index)) for index in range(len(sizes))),
        responses=tuple(str(index) for index in range(len(sizes))),
        environment_s=tuple(index / 2 for index in range(len(sizes))) if environment else (),
    )  # fmt: skip


@pytest.mark.parametrize("environment", [False, True])
def test_a_large_group_goes_by_its_rollouts_and_is_whole_again(monkeypatch, environment: bool) -> None:
    """In whatever order its parts come, and where one comes twice."""
    monkeypatch.setattr(module, "CALL_BYTES", 400)
    one, small = group(0, 50, 60, 5, 90, environment=environment), group(1)
    calls = list(split_groups([one, small]))
    assert [[len(part.rollouts) for part in call] for call in calls] == [[1], [2], [1], [0]]
    parts = [part for call in calls for part in call if part.group_id == 0]
    for order in permutations([*parts, parts[1]]):
        whole = reduce(RolloutGroup.with_more, order)
        for name in ("rollouts", "results", "responses", "environment_s"):
            found, expected = getattr(whole, name), getattr(one, name)
            assert len(found) == len(expected) and all(map(operator.is_, found, expected)), name


def test_a_group_of_many_tokens_or_of_no_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_BYTES", 400)
    ids = {"token_ids": np.zeros(20, np.int32)}
    long = replace(
        group(0, 0, 0), rollouts=tuple(replace(one, columns=one.columns | ids) for one in group(0, 0, 0).rollouts)
    )
    empty = replace(group(1), prompt=replace(long.prompt, text=500 * "x"))
    assert [[len(part.rollouts) for part in call] for call in split_groups([long, empty])] == [[1], [1], [0]]


def test_small_groups_go_whole() -> None:
    groups = [group(0, 50, 60), group(1, 5)]
    assert list(split_groups(groups)) == [groups]
    assert group_bytes(groups[0]) == routes_bytes(groups[0].rollouts) + 24 * 11
