"""Several generators answer as one engine does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamarl.cluster.api import ExecutorError
from llamarl.config import RunConfig, resolved
from llamarl.executors.generator import open_native
from llamarl.generation.backend import RolloutEngine
from llamarl.parts.answers.fleet import Fleet
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams
from tests.end_to_end.tiny import make_model
from tests.nightly import also, nightly


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("fleet") / "model")


def settings(model: Path, **generator: object) -> RunConfig:
    kind = generator.pop("kind", "monarch")
    wanted = {"model": {"path": str(model)}, "data": {"train": "jsonl"}, "cluster": {"kind": kind}}
    return resolved(wanted | {"generator": generator})


def request(number: int, size: int = 2, tokens: int = 12) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=tokens, seed=5)
    prompt_T = np.arange(3, 5 + number % 4, dtype=np.int32)
    return GenerationRequest(group_id=number, prompt_token_ids_T=prompt_T, group_size=size, sampling=sampling)


def answers(engine: RolloutEngine) -> Iterator[Rollout]:
    while engine.has_work:
        yield from engine.step()


def by_key(rollouts: Iterator[Rollout]) -> dict[tuple[int, int], list[int]]:
    found = {(one.group_id, one.index): one.token_ids_T.tolist() for one in rollouts}
    assert all(found.values())
    return found


@nightly("engines in processes; by day nothing is lost between threads")
@pytest.mark.parametrize(
    "asked", [{"replicas": 2, "kind": "inline"}, {"tensor_parallel": 2, "kind": "monarch"}, *also({"replicas": 2})]
)
def test_as_one_engine(model: Path, asked: dict[str, object]) -> None:
    config = settings(model, max_running=3, **asked)
    alone = open_native(str(model), config.generator.model_copy(update={"tensor_parallel": 1})).engine
    alone.submit(map(request, range(7)))
    expected = by_key(answers(alone))
    with Fleet(config) as fleet:
        assert not fleet.has_work and fleet.step() == []
        fleet.submit(map(request, range(7)))
        assert fleet.stats().running + fleet.stats().waiting <= 14
        assert by_key(answers(fleet)) == expected
        assert fleet.stats().decode_tokens == sum(map(len, expected.values()))
        fleet.submit([request(1)])  # a number may come again once it is answered
        assert by_key(answers(fleet)) == {key: tokens for key, tokens in expected.items() if key[0] == 1}


def test_work_goes_to_who_owes_least(model: Path) -> None:
    with Fleet(settings(model, replicas=2, max_running=4, kind="inline")) as fleet:
        fleet.submit([request(0, size=6, tokens=100), request(1, size=1, tokens=100), request(2, size=1, tokens=100)])
        assert sorted(one.owed.total() for one in fleet._members) == [2, 6]
        assert (fleet.stats().running, fleet.stats().waiting) == (6, 2)
        while not (heard := fleet.so_far([1, 9])):
            fleet.step()
        assert [one.group_id for one in heard] == [1] and 0 < heard[0].num_tokens <= 100
        assert fleet.abort([0, 1, 9]) == []
        ended = {(one.group_id, one.finish_reason) for one in answers(fleet)}
        assert {(0, FinishReason.ABORTED), (2, FinishReason.LENGTH)} <= ended


@nightly("engines in processes; by day nothing is lost between threads")
def test_who_dies_is_named_and_nothing_is_left(model: Path) -> None:
    fleet = Fleet(settings(model, replicas=2, max_running=1))
    pids = {handle.name: handle.pids[0] for handle in fleet._cluster._handles}
    assert len({*pids.values()}) == 2
    fleet.submit([request(number, tokens=200) for number in range(8)])
    os.kill(pids["generator-0"], signal.SIGKILL)
    with pytest.raises(ExecutorError, match="generator-0"):
        list(answers(fleet))
    fleet.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_nothing_is_lost_between_threads(model: Path) -> None:
    """However often they take turns."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Fleet(settings(model, replicas=2, max_running=8, kind="inline")) as fleet:
            found = list[Rollout]()
            for number in range(120):
                fleet.submit([request(number, tokens=2)])
                found += fleet.step() if number % 3 else []
            found += answers(fleet)
    finally:
        sys.setswitchinterval(before)
    assert len(found) == len({(one.group_id, one.index) for one in found}) == 240


def test_what_its_loop_raises_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Fleet(settings(model, replicas=1, kind="inline")) as fleet:
        monkeypatch.setattr(fleet._members[0].long, "collect", lambda num: 1 / 0)
        fleet.submit([request(1)])
        with pytest.raises(ZeroDivisionError):
            list(answers(fleet))
