"""The bound of staleness is looked at once more where the trainer takes a group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamarl.controller.admission import Admission, Problems, StalenessViolated
from llamarl.controller.progress import Progress
from llamarl.observability.sinks import Flow
from llamarl.types import Rollout, RolloutGroup
from tests.controller.fakes import config, prompts
from tests.executors.ledger import RIGHT


def group(group_id: int, oldest: int, newest: int) -> RolloutGroup:
    """Two rollouts, of which the second has a token of the oldest version; -1: none has tokens."""

    def rollout(index: int, versions: list[int]) -> Rollout:
        columns = {
            "token_ids": np.ones(len(versions), np.int32),
            "behavior_logprobs": np.zeros(len(versions), np.float32),
            "policy_versions": np.array(versions, np.int32),
        }
        return replace(Rollout.empty(group_id, index), columns=columns)

    of_each = [[newest], [oldest, newest]] if oldest >= 0 else [[], []]
    rollouts = tuple(rollout(index, versions) for index, versions in enumerate(of_each))
    (prompt,) = prompts(1)
    return RolloutGroup(group_id=group_id, prompt=prompt, rollouts=rollouts, results=(RIGHT,) * 2, responses=("",) * 2)


@pytest.mark.parametrize(("staleness", "window"), [(0, 1), (1, 1), (1, 2), (3, 4)])
@pytest.mark.parametrize("oldest", [0, 5])
def test_at_the_bound_and_one_beyond(tmp_path: Path, staleness: int, window: int, oldest: int) -> None:
    settings = config(tmp_path, rollout={"max_staleness": staleness, "window": window})
    problems = Problems(train=prompts(9), eval=(), stop_token_ids=(2,))
    admission = Admission(settings, problems, None, Flow(lambda: 0.0), Progress())
    first, second = (request.group_id for request, _ in admission.admit()[:2])
    limit = staleness + -(-(window - 1) // 2)
    assert admission.buffer.staleness_limit == limit
    admission.mark_consumed([group(first, oldest, oldest + limit)], oldest + limit)
    with pytest.raises(StalenessViolated, match=f"group {second} is {limit + 1} steps old, the bound is {limit}$"):
        admission.mark_consumed([group(second, oldest, oldest + limit)], oldest + limit + 1)


def test_a_group_without_tokens_has_no_age(tmp_path: Path) -> None:
    problems = Problems(train=prompts(9), eval=(), stop_token_ids=(2,))
    admission = Admission(config(tmp_path), problems, None, Flow(lambda: 0.0), Progress())
    admission.mark_consumed([group(admission.admit()[0][0].group_id, -1, -1)], 99)


@pytest.mark.parametrize(("max_active", "expected"), [(0, 4), (3, 3), (5, 5)])
def test_so_many_are_admitted_at_once(tmp_path: Path, max_active: int, expected: int) -> None:
    """All may begin with the first version."""
    settings = config(tmp_path, rollout={"window": 2, "max_active": max_active})
    problems = Problems(train=prompts(9), eval=(), stop_token_ids=(2,))
    admission = Admission(settings, problems, None, Flow(lambda: 0.0), Progress())
    assert [request.from_version for request, _ in admission.admit()] == [0] * expected
    assert not admission.admit()


def test_requests_carry_the_oldest_version_that_keeps_the_bound(tmp_path: Path) -> None:
    """The first of those that come when nobody is active are trained on before the others."""
    problems = Problems(train=prompts(9), eval=(), stop_token_ids=(2,))
    admission = Admission(config(tmp_path, rollout={"max_staleness": 3}), problems, None, Flow(lambda: 0.0), Progress())
    admission.version_trained(9, 0)
    assert [request.from_version for request, _ in admission.admit()] == [6, 6, 7, 7, 8, 8, 9, 9]
