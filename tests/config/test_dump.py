"""What is dumped loads to the same config, whatever text it holds."""

from __future__ import annotations

import math
import string
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config import Ref, RunConfig, SftConfig, dump_toml, load_config, load_sft_config
from llamarl.config.schema import (
    DataConfig,
    EvalConfig,
    GeneratorConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
)
from llamarl.config.sft import ShapeConfig
from tests.config.conftest import Write
from tests.nightly import examples

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30) | st.sampled_from(
    ['"', "\\", "\n", "\r\n", "'''", '"""', "\x01\x1f\x7f\x85\u2028", "# no comment", "[x]", "🦙 é", "{a = 1}"]
)
KEYS = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8).filter(lambda key: key != "name")
POSITIVE = st.floats(min_value=1e-12, max_value=10)
SHARE = st.floats(min_value=0, max_value=1)
OPTIONS = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT | st.dates() | st.times(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def refs(draw: st.DrawFn) -> Ref:
    return Ref.model_validate({"name": draw(TEXT)} | draw(st.dictionaries(KEYS, OPTIONS, max_size=3)))


@st.composite
def run_configs(draw: st.DrawFn) -> RunConfig:
    parts = draw(st.lists(refs(), min_size=1, max_size=3))
    weights = draw(
        st.just([])
        | st.lists(
            st.sampled_from([-9.0, 0.5, 1.0, 9.0]) | st.floats(0.01, 9), min_size=len(parts), max_size=len(parts)
        )
    )
    return RunConfig(
        name=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True)),
        output=draw(TEXT),
        seed=draw(st.integers(0, 2**63 - 1)),
        model=ModelConfig(path=draw(TEXT)),
        data=DataConfig(train=draw(refs()), eval=draw(st.none() | refs()), template=draw(TEXT)),
        rollout=RolloutConfig(
            temperature=draw(st.floats(1e-3, 10)),
            min_p=draw(SHARE),
            stop_strings=draw(st.lists(TEXT.filter(bool), max_size=3)),
        ),
        generator=GeneratorConfig(kv_cache_bytes=draw(st.none() | st.integers(1, 2**40))),
        trainer=TrainerConfig(loss=draw(refs()), learning_rate=draw(POSITIVE)),
        reward=RewardConfig(parts=parts, weights=weights),
        eval=EvalConfig(every_steps=draw(st.integers(0, 9)), temperature=draw(st.just(0.0) | st.floats(1e-3, 10))),
    )


@st.composite
def sft_configs(draw: st.DrawFn) -> SftConfig:
    return SftConfig(
        output=draw(TEXT),
        source=draw(refs()),
        template=draw(TEXT),
        shape=ShapeConfig(family=draw(st.sampled_from(["llama", "qwen2", "qwen3"])), init_std=draw(POSITIVE)),
        muon_learning_rate=draw(POSITIVE),
    )


def _written(text: str, folder: str) -> Path:
    path = Path(folder) / "dumped.toml"
    path.write_text(text, encoding="utf-8")
    return path


@settings(max_examples=examples(60), deadline=None)
@given(run_configs())
def test_run_config_comes_back(config: RunConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert load_config(_written(dump_toml(config), folder)) == config


@settings(max_examples=examples(25), deadline=None)
@given(sft_configs())
def test_sft_config_comes_back(config: SftConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert load_sft_config(_written(dump_toml(config), folder)) == config


def test_resolved_paths_come_back_from_another_folder(write: Write, tmp_path: Path) -> None:
    path = write('[model]\npath = "m"\nwarm_start = "base_sft.toml"\n[data]\ntrain = "jsonl"')
    config = load_config(path)
    elsewhere = tmp_path / "run"
    elsewhere.mkdir()
    assert load_config(_written(dump_toml(config), str(elsewhere))) == config


def test_extreme_numbers_come_back(write: Write) -> None:
    path = write('[model]\npath = "m"\n[data]\ntrain = {name = "x", a = inf, b = -inf, c = nan, d = 5e-324, e = 1e308}')
    options = load_config(_written(dump_toml(load_config(path)), str(path.parent))).data.train.options
    assert (options["a"], options["b"], options["d"], options["e"]) == (math.inf, -math.inf, 5e-324, 1e308)
    assert math.isnan(options["c"])
