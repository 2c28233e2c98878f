"""Environments of the package skyrl-gym. `make verifiers` also runs the tests that need it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import ConfigError, Ref
from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.episodes.environments._base import RewardedReply, Task, Turn
from llamarl.parts.episodes.environments._worker import build_environment
from llamarl.parts.episodes.environments.skyrl_gym import SkyrlGym
from llamarl.parts.episodes.executors.environment import EnvironmentExecutor
from llamarl.types import Outcome
from tests.parts.episodes.hubs.toy_gym import Guess
from tests.parts.episodes.test_environment import episode, replies

needs_package = pytest.mark.skipif(not find_spec("skyrl_gym"), reason="the package skyrl-gym is not installed")
TASK = Task(prompt="which?", answer="7", metadata={"env_class": "llamarl_guess"})


class Toy(SkyrlGym):
    """With the class of the toy in place of the package."""

    def _made(self, name: str, extras: Mapping[str, Any]) -> Any:
        return Guess(self.config, extras)


def opened(task: Task = TASK, **options: Any) -> Toy:
    environment = Toy(**options)
    environment.open(task)
    return environment


def turns(*said: str) -> list[Turn]:
    return [Turn(response=one) for one in said]


def test_steps_are_turns_and_their_rewards_are_of_these_turns() -> None:
    environment = opened(max_turns=3)
    no = RewardedReply([{"role": "user", "content": "no"}], 0.1)
    assert environment.reply(TASK, turns("5")) == no and environment.reply(TASK, turns("5", "6")) == no
    last = environment.reply(TASK, turns("5", "6", "7"))
    assert (last.outcome, last.value) == (Outcome.SCORE, 1.0)
    environment.close()
    assert environment._env.closed == 1
    assert opened(is_text=True).reply(TASK, turns("5")) == RewardedReply("no", 0.1)
    assert opened(config={"penalty": 0.25}).reply(TASK, turns("7")).value == 0.75


def test_a_turn_that_is_cut_is_a_step_and_one_that_had_its_step_is_none() -> None:
    environment = opened()
    environment.reply(TASK, turns("5"))
    assert environment.ended(TASK, turns("5")).value == 0.0 and environment._env.turns == 1
    assert environment.ended(TASK, turns("5", "7")).value == 1.0 and environment._env.turns == 2


def test_columns_of_the_row_are_extras() -> None:
    row = {"env_class": "x", "reward_spec": {"ground_truth": "9"}, "max_turns": 1}
    environment = opened(Task(prompt="which?", answer="7", metadata=row))
    assert (environment._env.truth, environment._env.max_turns) == ("9", 1)
    with pytest.raises(ValueError, match=r"rollout\.environment\.id"):
        opened(Task(prompt="which?", answer="7", metadata={}))
    with pytest.raises(ValueError, match="changes its prompt"):
        opened(Task(prompt="which?", answer="rewritten", metadata={"env_class": "x"}))


def test_a_run_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'llamarl\[skyrl-gym\]'"):
        build_environment(Ref(name="skyrl_gym")).check()


@needs_package
def test_episodes_of_the_package(model: Path) -> None:
    """Its own environment of several turns, and a registered one; by turns, and one that ends by length."""
    ref = {"name": "skyrl_gym", "module": "tests.parts.episodes.hubs.toy_gym", "is_text": True, "max_turns": 2}
    executor, tokenizer = EnvironmentExecutor(str(model), Ref.model_validate(ref)), Tokenizer(model)

    def asked(index: int, name: str, *said: str) -> Any:
        made = episode(model, index, *said)
        made.prompt.metadata["env_class"] = name
        return made

    try:
        executor.submit([
            asked(0, "llamarl_guess", "5"), asked(1, "gsm8k_multi_turn", "#### 4"), asked(2, "none", "x"),
            asked(3, "gsm8k_multi_turn", "#### 5"), asked(4, "gsm8k", "#### 4")._replace(is_over=True),
        ])  # fmt: skip
        found = replies(executor, 5)
        assert found[0].result is None, found[0].result
        assert tokenizer.decode(found[0].observation_T) == "no" and found[0].turn_reward == 0.1
        assert found[1].result.value == 1.0 and found[4].result.value == 1.0
        assert "No registered env with id: none" in found[2].result.reason
        assert found[3].turn_reward == 0.1 and "#### ANSWER" in tokenizer.decode(found[3].observation_T)
        executor.submit([asked(3, "gsm8k_multi_turn", "#### 5", "said", "#### 4")])
        assert replies(executor, 1)[3].result.value == 1.0
    finally:
        executor.close()


@needs_package
def test_modules_that_are_not_there_are_named() -> None:
    ref = Ref.model_validate({"name": "skyrl_gym", "module": "no_such_module"})
    with pytest.raises(ConfigError, match=r"rollout\.environment\.module = 'no_such_module'"):
        build_environment(ref).check()
