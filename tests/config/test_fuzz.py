"""Settings, models and rows that nobody would write: each is taken or refused by a `ConfigError`, never a traceback.

In this process, as far as `llamarl train --dry-run` prepares a run.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from llamarl.config import ConfigError, RunConfig, load_config
from llamarl.config.load import flat_settings
from llamarl.models.folder import load_shape
from llamarl.run.prepare import check_parts, looked_ahead
from tests.end_to_end.tiny import make_model
from tests.nightly import NIGHTLY

ODD: tuple[Any, ...] = (
    "", "x", ".", "..", "/", "~", "a" * 300, "\u0663", "nan", "exact", "gae", "chat", "{question}", "{", "a:b", "a.b:c",
    "cuda:0,0", "1", "\0", "\n", "\U0001f999", -1, 0, 1, 2, 3, 7, 10**6, 2**63 - 1, -(2**63), 0.5, -0.5, 1e-300, 1e300,
    -1e300, float("nan"), float("inf"), True, False, [], [3], [[]], ["exact"], ["x", "x"], {}, {"name": "x"},
    {"name": 3}, {"name": "exact", "x": 1}, {"name": "file", "path": 3}, {"a": {"b": {"c": []}}},
    [{"name": "running_total", "count": 4}], [{"name": "running_total", "count": 4}] * 2, [{"source": 3}], [[{}]],
)  # fmt: skip
BASE: dict[str, Any] = {
    "steps": 2,
    "data": {"train": {"name": "running_total", "count": 8}, "template": "{question}\n"},
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8, "window": 2},
    "reward": {"parts": [{"name": "exact"}]},
    "cluster": {"kind": "inline"},
}
MORE = (
    "data.train.name", "data.train.count", "data.train.first", "data.train.path", "data.train.limit", "data.eval",
    "data.train", "data.filter", "data.filter.path", "trainer.loss.truncate", "trainer.loss.sequence_mask",
    "trainer.lora",
    "trainer.lora.rank", "trainer.lora.targets", "reward.parts", "reward.weights", "reward.model", "reward.model.path",
    "rollout.environment", "rollout.tools", "rollout.agent", "model", "trainer",
    "trainer.parallelism",
)  # fmt: skip
"""Options that have no value by default."""
MOST_SAID = 5000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("fuzz") / "model")


def options(model: Path) -> list[str]:
    config = RunConfig.model_validate(BASE | {"model": {"path": str(model)}})
    return sorted({name for name, _ in flat_settings(config.model_dump())} | {*MORE})


def word(value: Any) -> str:
    """As it stands behind an option."""
    if isinstance(value, str):
        return value
    return tomli_w.dumps({"x": value}).partition("=")[2].strip() if not isinstance(value, dict) else _inline(value)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value)


def prepared(toml: Path, overrides: list[str]) -> str:
    """What refuses it; empty: nothing does."""
    try:
        config = load_config(toml, overrides)
        check_parts(config)
        looked_ahead(config, None, command="", weights=False)
    except ConfigError as error:
        said = str(error)
    else:
        return ""
    assert 0 < len(said) < MOST_SAID, said
    return said


def changes(model: Path, seed: int, number: int) -> Iterator[list[str]]:
    rng, names = random.Random(seed), options(model)
    for _ in range(number):
        chosen = rng.sample(names, rng.choice((1, 1, 1, 2, 3)))
        yield [one for name in chosen for one in (f"--{name}", word(rng.choice(ODD)))]


@pytest.mark.parametrize(
    "overrides",
    [
        ("--data.eval", "[{source = 3}]"),
        ("--model.path", "a" * 300),
        ("--cluster.timeout_s", "1e300"),
        ("--reward.model.path", "a" * 300),
    ],
)
def test_settings_that_it_has_found(model: Path, tmp_path: Path, overrides: tuple[str, str]) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(tomli_w.dumps(BASE | {"name": "fuzz", "model": {"path": str(model)}}))
    prepared(toml, [*overrides])


@pytest.mark.parametrize("seed", range(40 if NIGHTLY else 1))
def test_settings(model: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toml = tmp_path / "run.toml"
    toml.write_text(tomli_w.dumps(BASE | {"name": "fuzz", "model": {"path": str(model)}}))
    assert prepared(toml, []) == ""
    for overrides in changes(model, seed, 40):
        try:
            prepared(toml, overrides)
        except Exception as error:
            raise AssertionError(f"llamarl train {overrides}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("seed", range(20 if NIGHTLY else 1))
def test_files_of_a_model(model: Path, tmp_path: Path, seed: int) -> None:
    """Values of all keys in the JSON files of a model, one or two at a time."""
    rng, toml = random.Random(seed), tmp_path / "run.toml"
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    toml.write_text(tomli_w.dumps(BASE | {"name": "fuzz", "model": {"path": str(folder)}}))
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
    files = {name: (folder / name).read_text() for name in names if (folder / name).is_file()}
    for _ in range(30):
        name = rng.choice([*files])
        content = json.loads(files[name])
        changed = {key: rng.choice(ODD) for key in rng.sample(sorted(content), min(len(content), rng.choice((1, 2))))}
        (folder / name).write_text(json.dumps(content | changed))
        try:
            prepared(toml, [])
            load_shape(folder)
        except ConfigError:
            pass
        except Exception as error:
            raise AssertionError(f"{name} with {changed}: {type(error).__name__}: {error}") from error
        finally:
            (folder / name).write_text(files[name])


@pytest.mark.parametrize("seed", range(20 if NIGHTLY else 1))
def test_rows(model: Path, tmp_path: Path, seed: int) -> None:
    rng, toml, data = random.Random(seed), tmp_path / "run.toml", tmp_path / "rows.jsonl"
    settings = BASE | {"name": "fuzz", "model": {"path": str(model)}}
    settings["data"] = {"train": {"name": "file", "path": str(data)}, "template": "{question}\n"}
    toml.write_text(tomli_w.dumps(settings))
    messages = [[{"role": rng.choice(("user", "assistant", "system", 3)), "content": one}] for one in ODD]
    for _ in range(40):
        row = {
            name: rng.choice((*ODD, *messages)) for name in rng.sample(("answer", "id", "messages", "x", "prompt"), 2)
        }
        rows = [{"question": "q", "answer": "1"}, {"question": rng.choice((*ODD, "1+1?")), "answer": "1"} | row]
        data.write_text("".join(json.dumps(one) + "\n" for one in rows))
        try:
            prepared(toml, [])
        except Exception as error:
            raise AssertionError(f"{rows[1]}: {type(error).__name__}: {error}") from error
