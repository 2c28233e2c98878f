"""What every member of `llamarl/rewards` keeps. Members are found by listing the folder."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from llamarl.config import ConfigError, Ref, build
from llamarl.config.ref import members
from llamarl.config.schema import RewardConfig
from llamarl.rewards import Reward, WeightedSum, build_reward
from llamarl.types import Outcome, RewardItem, RewardResult
from tests.nightly import also, nightly
from tests.rewards.conftest import item

NOBODY = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "retries": 0}
REQUIRED = {
    "function": {"call": "tests.rewards.functions:is_answer"},
    "regex_format": {"pattern": "(a+)+b"},
    "judge": NOBODY,
}
"""Options without a default."""
HOSTILE = [
    "", " ", "\x00", "#### \x00", "é", "数学 #### 七十二", "\ud800", "💥" * 1000, "#### " + "9" * 1_000_000,
    "#" * 1_000_000, r"\boxed{" * 150_000, r"\boxed{" + "{" * 5000 + "}" * 5000 + "}",
    r"\boxed{" + "(" * 5000 + ")" * 5000 + "}",
    "}" * 1_000_000, r"\boxed{9^{9^{9^{9}}}}", r"\boxed{99999999!}", r"\boxed{\sum_{i=1}^{100} i}", "\\" * 100_001,
    " " * 1_000_000, "a" * 40,
    "$" * 100_000, "####" + "," * 4000, "####" + "-" * 4000, r"\boxed{x}", r"\boxed{\frac{}{}}", "a\r\nb\x85c\u2028d",
]  # fmt: skip


@pytest.fixture(scope="module", params=members("llamarl.rewards"))
def reward(request: pytest.FixtureRequest) -> Iterator[Reward]:
    made = build(Ref(name=request.param, **REQUIRED.get(request.param, {})), "llamarl.rewards", "reward.parts")
    yield made
    made.close()
    made.close()


def test_is_a_documented_dataclass_reward(reward: Reward) -> None:
    assert isinstance(reward, Reward)
    assert dataclasses.is_dataclass(reward)
    assert type(reward).__doc__


@pytest.mark.parametrize("gold", ["\x00é{####", *also("72", r"\frac{\sqrt{2}}{2}", "")])
def test_no_response_raises_or_hangs(reward: Reward, gold: str) -> None:
    items = [item(response, gold) for response in HOSTILE]
    start_s = time.monotonic()
    results = reward.score(items)
    assert time.monotonic() - start_s < 200
    assert len(results) == len(items)
    for result in results:
        assert isinstance(result, RewardResult)
        assert math.isfinite(result.value)
        assert result.outcome is not Outcome.INVALID or (result.value == 0.0 and result.reason)


def test_no_items(reward: Reward) -> None:
    assert reward.score([]) == []


def test_options_in_toml_style() -> None:
    config = RewardConfig.model_validate({"parts": [{"name": "gsm8k", "correct": 2.0}]})
    reward = build_reward(config)
    assert type(reward).__name__ == "Gsm8k"
    assert reward.score([item("#### 72")])[0].value == 2.0


@pytest.mark.parametrize(
    ("part", "message"),
    [({"name": "gsm9k"}, "gsm8k"), ({"name": "gsm8k", "corect": 1}, "correct"),
     ({"name": "exact", "correct": "x"}, "correct"),
     ({"name": "regex_format", "pattern": "("}, "pattern"), ({"name": "math", "workers": 0}, "workers"),
     ({"name": "regex_format"}, "pattern")],
)  # fmt: skip
def test_mistakes_are_config_errors(part: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward(RewardConfig.model_validate({"parts": [part]}))


@dataclasses.dataclass
class Fixed(Reward):
    result: RewardResult
    closed: int = 0

    def score(self, items: list[RewardItem]) -> list[RewardResult]:
        return [self.result] * len(items)

    def close(self) -> None:
        self.closed += 1


SCORE = RewardResult(outcome=Outcome.SCORE, value=1.0)
WRONG = RewardResult(outcome=Outcome.WRONG, value=-1.0, reason="bad")
INVALID = RewardResult(outcome=Outcome.INVALID, value=0.0, reason="crashed")


@pytest.mark.parametrize(
    ("results", "outcome", "value", "reason"),
    [((SCORE, SCORE), Outcome.SCORE, 2.5, ""), ((SCORE, WRONG), Outcome.SCORE, 1.5, "Fixed-1: bad"),
     ((WRONG, WRONG), Outcome.WRONG, -2.5, "Fixed: bad; Fixed-1: bad"),
     ((SCORE, INVALID), Outcome.INVALID, 0.0, "Fixed-1: crashed"),
     ((INVALID, WRONG), Outcome.INVALID, 0.0, "Fixed: crashed; Fixed-1: bad"),
     ((SCORE, None), Outcome.SCORE, 2.0, ""), ((None, WRONG), Outcome.WRONG, -0.5, "Fixed-1: bad"),
     ((None, SCORE), Outcome.SCORE, 0.5, ""), ((None, INVALID), Outcome.INVALID, 0.0, "Fixed-1: crashed"),
     ((None, None), Outcome.INVALID, 0.0, "Fixed: no opinion; Fixed-1: no opinion")],
)  # fmt: skip
def test_weighted_sum(
    results: tuple[RewardResult | None, RewardResult | None], outcome: Outcome, value: float, reason: str
) -> None:
    """None is of a part without an opinion, which is left out."""
    parts = [Fixed(result) for result in results]
    total = WeightedSum(list(parts), [2.0, 0.5])
    first, second = total.score([item("x")] * 2)
    assert first == second
    assert (first.outcome, first.value, first.reason) == (outcome, value, reason)
    assert first.is_right == (outcome is not Outcome.INVALID and next(filter(None, results), None) is SCORE)
    assert total.score([]) == []
    total.close()
    assert [part.closed for part in parts] == [1, 1]


def test_weights_must_fit() -> None:
    with pytest.raises(ConfigError, match="weights"):
        WeightedSum([Fixed(SCORE)], [1.0, 2.0])
    with pytest.raises(ConfigError, match="finite"):
        WeightedSum([Fixed(SCORE)], [math.nan])
    two = RewardConfig.model_validate({"parts": ["gsm8k", {"name": "exact"}], "weights": [1.0, 0.5]})
    assert isinstance(build_reward(two), WeightedSum)
    half = RewardConfig.model_validate({"parts": ["gsm8k"], "weights": [0.5]})
    assert build_reward(half).score([item("#### 72")])[0].value == 0.5


def test_exact_and_regex_format() -> None:
    exact = {"parts": [{"name": "exact", "ignore_case": True}]}
    assert build_reward(RewardConfig.model_validate(exact)).score([item(" YES\n", "yes")])[0].outcome is Outcome.SCORE
    assert build_reward(RewardConfig(parts=[Ref(name="exact")])).score([item("YES", "yes")])[0].outcome is Outcome.WRONG
    whole = build(
        Ref(name="regex_format", pattern="<a>.*</a>", value=0.5, wrong=-0.5), "llamarl.rewards", "reward.parts"
    )
    part = build(Ref(name="regex_format", pattern="a+b", whole=False), "llamarl.rewards", "reward.parts")
    try:
        texts = ["<a>\n</a>", "<a></a> ", "é"]
        assert [result.value for result in whole.score([item(text) for text in texts])] == [0.5, -0.5, -0.5]
        assert [result.value for result in part.score([item("xxaabxx"), item("x")])] == [1.0, 0.0]
    finally:
        whole.close()
        part.close()


@nightly("a reward that never ends; sandbox/test_pool.py ends one by day")
def test_endless_backtracking_is_invalid() -> None:
    reward = build(Ref(name="regex_format", pattern="(a|a)*b"), "llamarl.rewards", "reward.parts")
    try:
        endless, easy = reward.score([item("a" * 60), item("aab")])
        assert (endless.outcome, easy.outcome) == (Outcome.INVALID, Outcome.SCORE)
        assert "CPU" in endless.reason
    finally:
        reward.close()


def test_rewards_import_neither_torch_nor_sympy() -> None:
    code = (
        "import json, sys, pkgutil, importlib, llamarl.rewards as r\n"
        "names = [m.name for m in pkgutil.iter_modules(r.__path__) if m.name != '_math_worker']\n"
        "for name in names: importlib.import_module('llamarl.rewards.' + name)\n"
        "print(json.dumps(sorted({'torch', 'sympy'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("name", ["math", "reasoning_gym", "code", "function"])
def test_a_pool_has_a_bound(name: str) -> None:
    call = {"call": "json:loads"} if name == "function" else {}
    with pytest.raises(ConfigError, match="workers"):
        build(Ref.model_validate({"name": name, "workers": 1_000_000} | call), "llamarl.rewards", "reward.parts")
