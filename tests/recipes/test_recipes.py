"""A recipe settles what a user leaves open, and nothing else. That each of them learns is tested end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.config import ConfigError, RunConfig, dump_toml, load_config
from llamarl.config.ref import find, members
from llamarl.recipes._base import layered
from llamarl.run.prepare import check_parts

FAMILY = "llamarl.recipes"
MINIMAL = """
model = {path = "nowhere"}
data = {train = "jsonl"}
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def eager(base: RunConfig) -> RunConfig:
    """A recipe of the user's own."""
    return layered(base, {"rollout": {"group_size": 2, "max_staleness": 3}, "trainer": {"beta1": 0.5}})


@pytest.mark.parametrize("name", members(FAMILY))
def test_every_recipe_says_something_and_can_be_read_back(toml: Path, tmp_path: Path, name: str) -> None:
    config = load_config(toml, ["--recipe", name])
    check_parts(config.model_copy(update={"reference": config.reference.model_copy(update={"path": "teacher"})})
                if name == "distillation" else config)  # fmt: skip
    assert config.recipe == name
    assert config.model_fields_set > load_config(toml).model_fields_set
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(config))
    assert load_config(again) == config
    assert find(name, FAMILY, "recipe", name)(config) == config


def test_the_user_wins(toml: Path) -> None:
    toml.write_text(f"{MINIMAL}\nrecipe = 'dapo'\n[trainer]\nloss = 'aipo'\n[shaping]\noverlong_penalty = 0.5\n")
    config = load_config(toml, ["--rollout.max_attempts", "3", "--rollout.group_size=5"])
    assert (config.trainer.loss.name, config.trainer.loss.options) == ("aipo", {})
    assert config.trainer.advantage.name == "group_normalized"
    assert config.shaping.overlong_penalty == 0.5
    assert (config.rollout.max_attempts, config.rollout.group_size) == (3, 5)
    plain = load_config(toml, ["--recipe", ""])
    assert (plain.rollout.max_attempts, plain.trainer.advantage.name) == (1, "group_mean")


def test_even_where_the_user_writes_what_is_the_default(toml: Path) -> None:
    assert load_config(toml, ["--recipe", "dapo", "--rollout.max_attempts", "1"]).rollout.max_attempts == 1


def test_one_of_the_user_s_own(toml: Path) -> None:
    config = load_config(toml, ["--recipe", f"{__name__}:eager", "--trainer.beta1", "0.75"])
    assert (config.rollout.group_size, config.rollout.max_staleness, config.trainer.beta1) == (2, 3, 0.75)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--recipe", "grpoo"], "`recipe = 'grpoo'` is unknown; did you mean `grpo`?"),
        (["--recipe", "dpo"], "`recipe = 'dpo'` is unknown; llamarl has no DPO, which learns from pairs of answers"),
        (["--recipe", "tests.nowhere:eager"], "`recipe = 'tests.nowhere:eager'` cannot be imported"),
        (
            ["--recipe", "dapo", "--rollout.group_size", "1"],
            "recipe = 'dapo': rollout.max_attempts = 10 with rollout.group_size = 1",
        ),
    ],
)
def test_mistakes_are_explained(toml: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(toml, overrides)
    assert str(caught.value).startswith(message)


def test_a_reference_that_only_the_recipe_uses(toml: Path) -> None:
    check_parts(load_config(toml, ["--recipe", "ppo", "--reference.threads", "2"]))
    message = "reference is set but not used; set reference.kl_coefficient, or leave it out"
    with pytest.raises(ConfigError, match=message):
        check_parts(load_config(toml, ["--recipe", "grpo", "--reference.threads", "2"]))
