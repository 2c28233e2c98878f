"""What is wrong with a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llamarl.generation.scheduler import Scheduler
from llamarl.models.transformer import Transformer
from llamarl.types import GenerationRequest
from tests.generation.native import GREEDY, assert_same, make_engine, run

Requests = Callable[..., list[GenerationRequest]]


def test_whatever_one_request_meets_is_its_own_end(
    model: Transformer, make_requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stop string that cannot be encoded, and of anything that nobody has thought of."""
    good, odd, unheard = make_requests(3, GREEDY)
    odd = replace(odd, sampling=replace(GREEDY, stop_strings=("\udfff",)))
    add = Scheduler.add

    def failing(scheduler: Scheduler, group: Any) -> None:
        if group.request is unheard:
            raise KeyError("nobody has thought of this")
        add(scheduler, group)

    monkeypatch.setattr(Scheduler, "add", failing)
    found = run(make_engine(model, decode=lambda ids: "x" * len(ids)), [odd, unheard, good])
    said = {key: found.pop(key).error for key in list(found) if key[0] != good.group_id}
    assert len(said) == odd.group_size + unheard.group_size
    for (group_id, _), error in said.items():
        assert ("surrogates not allowed" if group_id == odd.group_id else "nobody has thought of") in error
    monkeypatch.undo()
    assert_same(found, run(make_engine(model), [good]))
