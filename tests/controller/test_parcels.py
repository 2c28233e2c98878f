"""What is large goes in several calls, in its order, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest

from llamarl.controller import parcels as module
from llamarl.controller.parcels import parcels, requests_of, routes_bytes
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams

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


def test_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARCEL_BYTES", 10)
    assert list(parcels([3, 7, 1, 20, 4], int)) == [[3, 7], [1], [20], [4]]
    assert list(parcels([], int)) == []


def test_requests_are_cut_by_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARCEL_BYTES", 100)
    requests = [request(0, 5, 5, 40), request(1), request(2, 1)]
    found = list(requests_of(requests))
    of = [[(one.group_id, [part.index for part in one.partials]) for one in call] for call in found]
    assert of == [[(0, [0])], [(0, [1])], [(0, [2])], [(1, []), (2, [0])]]


def test_small_ones_go_together() -> None:
    requests = [request(0, 5, 5, 40), request(1), request(2, 1)]
    assert [[one.group_id for one in call] for call in requests_of(requests)] == [[0, 1, 2]]
