"""The reward `function`: whatever a user's function does, the others go on."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from llamarl.config import ConfigError
from llamarl.config.schema import RewardConfig
from llamarl.rewards import _function_worker, build_reward
from llamarl.rewards.function import TOGETHER, Function
from llamarl.run.python_inputs import pickled
from llamarl.types import Outcome, RewardItem
from tests.nightly import nightly
from tests.rewards import functions


def odd(response: str, **row: Any) -> Any:
    """Does what the response says."""
    if response == "hang":
        while True:
            pass
    if response == "raise":
        raise KeyError("odd")
    values = {"half": 0.5, "minus": -1, "numpy": np.float32(0.25), "true": True, "text": "1", "nan": float("nan")}
    return (values | {"huge": -1e308}).get(response)


async def slow(response: str, answer: str) -> float:
    await asyncio.sleep(float(answer))
    return 1.0


def items(*responses: str, answer: str = "") -> list[RewardItem]:
    return [RewardItem(prompt="p", response=one, answer=answer, metadata={"x": 1}) for one in responses]


@pytest.fixture
def reward() -> Iterator[Function]:
    found = Function(call=f"{__name__}:odd", curve="odd", cpu_s=1)
    yield found
    found.close()


def test_values_and_what_is_none(reward: Function) -> None:
    names = ("half", "minus", "numpy", "true", "text", "nan", "huge", "none", "raise")
    found = dict(zip(names, reward.score(items(*names)), strict=True))
    values = {name: one.value for name, one in found.items() if one.outcome is not Outcome.INVALID}
    assert values == {"half": 0.5, "minus": -1.0, "numpy": 0.25, "true": 1.0}
    assert [name for name, one in found.items() if one.is_right] == ["half", "numpy", "true"]
    assert found["text"].reason == "odd: it gave '1', which is not a number"
    assert found["huge"].reason == "odd gave -1e+308; give a number of at most 1e+30, either way"
    assert "nan" in found["nan"].reason and found["none"].is_absent
    assert found["raise"].reason.startswith("odd: KeyError: 'odd' (line ")
    assert found["raise"].reason.endswith('test_function.py: `raise KeyError("odd")`)')


@nightly("waits in real time; by day functions answer, fail and are named")
def test_one_that_hangs_costs_itself_alone(reward: Function) -> None:
    found = reward.score(items("half", "hang", "half"))
    assert [one.outcome for one in found] == [Outcome.SCORE, Outcome.INVALID, Outcome.SCORE]
    assert "1 s of CPU time" in found[1].reason


@nightly("waits in real time; by day functions answer, fail and are named")
def test_async_ones_wait_side_by_side() -> None:
    reward = Function(call=f"{__name__}:slow", is_async=True, workers=1, wall_s=20.0)
    many = items(*["r"] * (TOGETHER + 2), answer="2")
    reward.score(many[:1])
    started_s = time.monotonic()
    assert [one.value for one in reward.score(many)] == [1.0] * len(many)
    assert time.monotonic() - started_s < 2 * len(many) / 2, "one after the other they take over a minute"
    reward.close()
    reward = Function(call=f"{__name__}:slow", is_async=True, workers=1, wall_s=2.0)
    (late,) = reward.score(items("r", answer="600"))
    assert late.outcome is Outcome.INVALID and "no answer after 2 s (wall_s)" in late.reason
    reward.close()


@nightly("workers once more; by day functions answer and fail")
def test_a_pickle_that_rides_along() -> None:
    factor = 3

    def closure(response: str) -> float:
        if response == "raise":
            raise ValueError("told")
        return factor * 1.0

    content = base64.b64encode(pickled(closure)).decode()
    reward = Function(content=content)
    value, error = reward.score(items("x", "raise"))
    assert value.value == 3.0 and '`raise ValueError("told")`' in error.reason
    reward.close()


def test_a_plain_function_stands_for_itself() -> None:
    config = RewardConfig.model_validate({"parts": [f"{__name__}:odd", "exact"], "weights": [1.0, 2.0]})
    reward = build_reward(config)
    (found,) = reward.score(items("half", answer="half"))
    assert found.value == 0.5 + 2.0 and dict(found.parts) == {"odd": 0.5, "exact": 1.0}
    reward.close()
    for wrong, cause in (
        ({"name": "function"}, "give one of `call`"),
        ({"name": "function", "file": "no.pickle"}, "is not there; start the run from Python again"),
    ):
        with pytest.raises(ConfigError, match=cause):
            build_reward(RewardConfig.model_validate({"parts": [wrong]}))


def test_a_module_that_cannot_be_loaded() -> None:
    reward = Function(call="no_such_module:reward")
    (found,) = reward.score(items("x"))
    assert found.outcome is Outcome.INVALID
    assert "it cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'" in found.reason
    reward.close()


def test_an_answer_is_the_number_that_a_function_declares() -> None:
    def said(function: Callable[..., Any], response: str, answer: str) -> dict[str, Any]:
        return _function_worker._one(function, {"response": response, "answer": answer, "prompt": ""})

    assert said(functions.is_same, "3", "3") == said(functions.is_near, "3.001", "3") == {"value": 1.0}
    assert said(functions.is_same, "1055000", "1.055e+06") == said(functions.Text(), "", "3") == {"value": 1.0}
    for function, answer in ((functions.is_same, "3.5"), (functions.is_same, "three"), (functions.is_near, "")):
        assert repr(answer) in said(function, "3", answer)["error"]


def deep(response: str) -> float:
    if response == "long":
        raise ValueError("x" * 5000)
    return float(json.loads(response))


def of_trl(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0 for _ in completions]


def sleeper(response: str) -> float:
    time.sleep(60)
    return 1.0


def test_errors_name_the_users_own_line() -> None:
    """Also where the error is raised inside of a library, and where its text is long."""
    reward = Function(call=f"{__name__}:deep")
    for found in reward.score(items("{", "long")):
        assert found.reason.endswith("`)") and "test_function.py: `" in found.reason and len(found.reason) < 1000
    reward.close()


def test_functions_in_the_shape_of_trl_get_a_sentence() -> None:
    reward = Function(call=f"{__name__}:of_trl")
    (found,) = reward.score(items("x"))
    assert "completions" in found.reason and "def reward(prompt, response, answer, **row)" in found.reason
    reward.close()


@nightly("workers once more; by day functions answer and fail")
def test_a_limit_is_told_as_it_was_set() -> None:
    reward = Function(call=f"{__name__}:sleeper", wall_s=0.5)
    (found,) = reward.score(items("x"))
    assert found.outcome is Outcome.INVALID and "0.5 s" in found.reason
    reward.close()
