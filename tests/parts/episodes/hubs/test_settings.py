"""Settings of environments of other frameworks, without their packages."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from llamarl.config import resolved
from llamarl.config.errors import ConfigError
from llamarl.config.roles import AgentConfig
from llamarl.config.schema import RolloutConfig
from llamarl.parts.episodes.gateway._worker import find_agent
from llamarl.run.trust import code_of
from tests.architecture.repository import ROOT


def configured(**sections: Any) -> Any:
    return resolved({"model": {"path": "m"}, "data": {"train": "jsonl"}} | sections)


def test_an_environment_that_is_an_agent_becomes_the_agent() -> None:
    options = {"name": "verifiers", "settings": {"agent": {"max_turns": 3}}, "workers": 2}
    for name in ("environment", "agent"):
        rollout = RolloutConfig.model_validate({name: options})
        assert rollout.environment is None and rollout.agent is not None
        assert (rollout.agent.name, rollout.agent.workers) == ("verifiers", 2)
        assert rollout.agent.options == {"settings": {"agent": {"max_turns": 3}}}
        assert AgentConfig.model_validate_json(rollout.agent.model_dump_json()) == rollout.agent


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"environment": "verifiers", "agent": "a.b:run"}}, r"rollout\.environment = 'verifiers'"),
        ({"rollout": {"agent": {"name": "a.b:run", "worker": 3}}}, r"rollout\.agent\.worker"),
        (
            {"data": {"train": [{"name": "jsonl", "label": "a", "environment": "verifiers"}]}},
            r"rollout\.agent = 'verif",
        ),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configured(**sections)


def test_agents_that_do_not_come_with_llamarl_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean `verifiers`"):
        find_agent(AgentConfig(name="verifier"))


def test_code_that_settings_name_needs_trust() -> None:
    data = {"train": {"name": "verifiers", "id": "sums"}}
    assert code_of(configured(data=data, rollout={"agent": "verifiers"})) == ["data.train.id = 'sums'"]
    gym = {"environment": {"name": "skyrl_gym", "module": "mine.envs"}}
    assert code_of(configured(rollout=gym)) == ["rollout.environment.module = 'mine.envs'"]


def test_examples_of_the_page_are_settings() -> None:
    page = (ROOT / "docs/episodes.md").read_text(encoding="utf-8")
    section = page.partition("\n## Environments of other frameworks")[2].partition("\n## ")[0]
    examples = [tomllib.loads(one) for one in re.findall(r"```toml\n(.*?)```", section, re.DOTALL)]
    assert [bool(configured(**one).has_episodes) for one in examples] == [True, True]
