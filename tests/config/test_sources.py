"""`data.train` as a list: flat and nested entries, labels, settings of their own, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.config import ConfigError, RunConfig, dump_toml, load_config
from tests.config.conftest import Write

HEAD = '[model]\npath = "m"\n'
TWO = (
    HEAD
    + """
[rollout]
max_new_tokens = 64

[reward]
parts = ["gsm8k"]

[[data.train]]
name = "hub"
path = "openai/gsm8k@main"
config = "main"
weight = 3
template = "{question}"
max_new_tokens = 512
reward = [{name = "math"}, "format"]

[[data.train]]
source = {name = "jsonl", path = ["svamp.train.jsonl"]}
environment = "python"
filter = {path = "rates.jsonl", min = 0.1}
"""
)


def _message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    assert "\n" not in str(error.value), "one sentence"
    return str(error.value)


def test_entries_are_flat_or_nested(write: Write) -> None:
    config = load_config(write(TWO))
    first, second = config.data.sources
    assert first.source.model_dump() == {"name": "hub", "path": "openai/gsm8k@main", "config": "main"}
    assert second.source.model_dump() == {"name": "jsonl", "path": ["svamp.train.jsonl"]}
    assert [(one.label, one.weight) for one in config.data.sources] == [("gsm8k", 3), ("svamp", 1)]
    assert (second.filter.min, second.filter.max) == (0.1, 0.95)  # type: ignore[union-attr]


def test_a_mixture_comes_back(write: Write) -> None:
    config = load_config(write(TWO))
    assert load_config(write(dump_toml(config))) == config


def test_a_source_alone_is_a_run(write: Write) -> None:
    config = load_config(write(TWO))
    first, second = (config.of(source) for source in config.data.sources)
    assert (first.rollout.max_new_tokens, second.rollout.max_new_tokens) == (512, 64)
    assert [part.name for part in first.reward.parts] == ["math", "format"]
    assert [part.name for part in second.reward.parts] == ["gsm8k"]
    assert (first.data.template, second.data.template) == ("{question}", "auto")
    assert first.rollout.environment is None
    assert second.rollout.environment.name == "python"  # type: ignore[union-attr]
    assert first.data.filter is None
    assert second.data.filter.path == "rates.jsonl"  # type: ignore[union-attr]
    assert not first.data.sources
    assert first.data.train == config.data.sources[0].source
    assert RunConfig.model_validate(first.model_dump(exclude_none=True)) == first


@pytest.mark.parametrize(
    "text",
    [
        "train = ['running_total', {name = 'list_functions', count = 3, weight = 2}]",
        "train = [{name = 'running_total'}, {source = 'list_functions', weight = 2}]",
        "train = ['my.module:running_total', {source = {name = 'list_functions'}, weight = 2}]",
    ],
)
def test_short_forms(write: Write, text: str) -> None:
    sources = load_config(write(f"{HEAD}[data]\n{text}")).data.sources
    assert [(one.label, one.weight) for one in sources] == [("running_total", 1), ("list_functions", 2)]


def test_the_command_line_mixes(minimal: Path, write: Write) -> None:
    text = '[{name = "jsonl", path = "a.jsonl"}, {name = "jsonl", path = "b.jsonl", weight = 2.5}]'
    sources = load_config(minimal, ["--data.train", text, "--data.train.0.weight=4"]).data.sources
    assert [(one.label, one.weight) for one in sources] == [("a", 4), ("b", 2.5)]
    assert load_config(write(TWO), ["--data.train.1.source.limit=5"]).data.sources[1].source.options["limit"] == 5


def test_tools_are_an_environment(write: Write) -> None:
    text = f"{HEAD}[[data.train]]\nname = 'running_total'\ntools = ['my.tools:add']"
    (source,) = load_config(write(text)).data.sources
    assert source.environment.model_dump() == {"name": "tools", "functions": ["my.tools:add"]}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train = []", "`data.train = []`: list should have at least 1 item"),
        (
            "train = 5",
            "`data.train = 5` does not name a component; give its name as text, or a table with its `name` and options",
        ),
        ("train = [5]", "`data.train.0 = 5` is a section, not a value; set its settings, as data.train.0.source = "),
        (
            "train = [{path = 'a'}]",
            "`data.train.0`: a source needs its `name`, such as 'hub' or 'jsonl'; this has path",
        ),
        ("train = [{name = 'a', weight = 0}]", "`data.train.0.weight = 0`: input should be greater than 0"),
        ("train = [{name = 'a', weight = true}]", "`data.train.0.weight = True`: input should be a valid number"),
        (
            "train = [{name = 'a', label = 'a b'}]",
            "`data.train.0.label = 'a b'`: it names files and curves; begin with a letter",
        ),
        ("train = [{source = 'a', name = 'b'}]", "`data.train.0`: `name` next to `source`: an entry is flat, or"),
        ("train = [{source = 'a', wieght = 2}]", "unknown option `data.train.0.wieght`; did you mean `weight`?"),
        (
            "train = ['a', {name = 'a', x = 1}]",
            "data.train: 2 sources have the label 'a'; give each a different `label`",
        ),
        ("train = [{name = 'a', filter = {}}]", "`data.train.0.filter.path` is missing; set it in the file or with"),
        (
            "train = [{name = 'a', filter = {path = 'r', max = 0.01}}]",
            "`data.train.0.filter`: min = 0.05 is above max = 0.01, which keeps nothing",
        ),
        (
            "train = [{name = 'a', reward = {parts = ['math'], weights = [1.0, 2.0]}}]",
            "`data.train.0.reward`: reward.weights has 2 numbers for 1 parts; give one each",
        ),
        (
            "train = [{name = 'a', tools = ['m:f'], environment = 'python'}]",
            "`data.train.0`: tools with environment = 'python': tools are an environment themselves",
        ),
        ("train = [{name = 'a', environment = 'my:World'}]", "data.train.0: my:World without a reward, which scores"),
        (
            "train = [{name = 'a', environment = 'python'}]\n[rollout]\nagent = 'm:run'\n[reward]\nparts = ['math']",
            "data.train.0.environment with rollout.agent = 'm:run': the agent runs every episode",
        ),
        (
            "train = 'a'\neval = [{name = 'a', template_arguments = {b = 1}}]\n[rollout]\nagent = 'm:run'\n[reward]",
            "data.eval.0.template_arguments with rollout.agent = 'm:run': the agent runs every episode",
        ),
    ],
)
def test_mistakes_are_one_sentence(write: Write, text: str, message: str) -> None:
    assert message in _message(write(f"{HEAD}[data]\n{text}"))


def test_entries_of_the_command_line_exist(write: Write) -> None:
    path = write(TWO)
    assert "the list has no entry '2'; it has 2, counted from 0" in _message(path, "--data.train.2.weight=1")
    assert "the list has no entry 'gsm8k'" in _message(path, "--data.train.gsm8k.weight=1")
    assert "`weight` is a value, not a section" in _message(path, "--data.train.0.weight.x=1")
