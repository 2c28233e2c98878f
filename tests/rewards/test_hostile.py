"""A response is text: no grader executes what is in it, and none takes long over it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.config import Ref, build
from llamarl.config.ref import members
from llamarl.rewards import Reward
from tests.nightly import crossed, some
from tests.rewards.conftest import item

LIMIT_S, CPU_S = 20.0, 100
"""What an answer takes at most, and what it would take if a grader computed with it until its limit."""
NOBODY = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "retries": 0}
OPTIONS = {
    "function": {"call": "tests.rewards.functions:is_answer", "cpu_s": CPU_S},
    "math": {"cpu_s": CPU_S, "wall_s": 200.0},
    "regex_format": {"pattern": "<a>.*</a>", "cpu_s": CPU_S, "wall_s": 200.0},
    "judge": NOBODY,
}
CODE = [
    "__import__('os').system('touch CANARY')", "open('CANARY', 'w')", "$(touch CANARY)", "`touch CANARY`",
    "; touch CANARY #", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{0.__class__}", "%s%n",
    "exec(\"open('CANARY','w')\")",
    "lambda: open('CANARY','w')", "Symbol.__class__.__base__.__subclasses__()", "sympify('__import__(\"os\")')",
    r"\input{|touch CANARY}", r"\immediate\write18{touch CANARY}", r"\input{/etc/passwd}", r"\def\a{\a\a}\a",
]  # fmt: skip
BOMBS = [
    r"\binom{999999999}{499999999}", r"\Gamma(999999999)", r"9^{999\cdot 999\cdot 999}", "1E999999999", "9" * 100_000,
    r"9^{9^{9^{9}}}", r"99999999!", r"\int_{0}^{1} x^{x^{x}} dx", r"\frac{1}{" * 2000, r"\sqrt{" * 5000 + "}" * 5000,
    "x" + "+x" * 20_000,
]  # fmt: skip


@pytest.fixture(scope="module", params=members("llamarl.rewards"))
def reward(request: pytest.FixtureRequest) -> Iterator[Reward]:
    made = build(Ref(name=request.param, **OPTIONS.get(request.param, {})), "llamarl.rewards", "reward.parts")
    made.score([item("#### 1", "1"), item(r"\boxed{1}", "1")])  # workers have started
    yield made
    made.close()


@pytest.mark.parametrize("text", some(CODE, 6))
def test_nothing_is_executed(reward: Reward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    canary = tmp_path / "canary"
    monkeypatch.chdir(tmp_path)
    text = text.replace("CANARY", str(canary))
    reward.score([item(form.format(text), "72") for form in ("{}", "#### {}", r"\boxed{{{}}}", "$${}$$")])
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "gold"), some(crossed(BOMBS, ["72", r"\frac{\sqrt{2}}{2}"]), 6))
def test_none_takes_long(reward: Reward, text: str, gold: str) -> None:
    for form in ("#### {}", r"\boxed{{{}}}"):
        times_s = list[float]()
        while not times_s or (min(times_s) >= LIMIT_S and len(times_s) < 3):  # the machine may be busy
            start_s = time.monotonic()
            (found,) = reward.score([item(form.format(text), gold)])
            times_s.append(time.monotonic() - start_s)
            assert not found.is_right
        assert min(times_s) < LIMIT_S, form
