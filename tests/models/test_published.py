"""Published models: their `config.json`, as far as it decides sizes and arithmetic, and what docs/models.md says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llamarl.config import ConfigError
from llamarl.models.hybrid import text_config
from llamarl.models.refused import OTHERS
from llamarl.models.shape import ARCHITECTURES, ModelShape
from llamarl.models.transformer import Transformer
from llamarl.parts.forecast.shapes import MODELS, DecoderShape

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
LOAD = [*PUBLISHED["loads"], *PUBLISHED["mixtures"], *PUBLISHED["hybrids"]]
OF_GATE_UP = ("experts.gate_proj", "experts.up_proj")
"""Matrices that transformers keeps as one."""
PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


@pytest.mark.parametrize("model", PUBLISHED["loads"], ids=lambda model: model["name"])
class TestOneThatLoads:
    def test_has_as_many_parameters_as_its_files(self, model: dict[str, Any]) -> None:
        shape = ModelShape.from_hf(model["config"])
        assert shape.num_parameters == model["parameters"]
        planned = DecoderShape.from_hf(model["config"])
        assert planned.num_parameters == pytest.approx(model["parameters"], rel=1e-3)
        assert planned.max_position_embeddings == shape.max_position_embeddings

    def test_has_the_parameters_of_transformers(self, model: dict[str, Any]) -> None:
        config = {**model["config"], "num_hidden_layers": 1}
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
            ours = Transformer(ModelShape.from_hf(config))
        named = {name: one.shape for name, one in theirs.named_parameters()}
        assert {name: one.shape for name, one in ours.named_parameters()} == named

    def test_has_its_row_in_the_docs(self, model: dict[str, Any]) -> None:
        size, context = model["parameters"] / 1e9, model["config"]["max_position_embeddings"]
        row = f"| `{model['name']}` | {model['config']['model_type']} | {size:.2f} | {context:,} |"
        assert row in PAGE


@pytest.mark.parametrize("model", PUBLISHED["mixtures"], ids=lambda model: model["name"])
class TestMixtureThatLoads:
    def test_has_its_parameters(self, model: dict[str, Any]) -> None:
        config = {**model["config"], "num_hidden_layers": 2}
        assert ModelShape.from_hf(model["config"]).num_parameters == model["parameters"]
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
            ours = Transformer(shape := ModelShape.from_hf(config)).state_dict()
        assert sum(one.numel() for one in theirs.state_dict().values()) == shape.num_parameters
        assert sum(one.numel() for one in ours.values()) == shape.num_parameters
        others = {name: one.shape for name, one in theirs.state_dict().items() if ".experts.g" not in name}
        assert others == {name: one.shape for name, one in ours.items() if not name.endswith(OF_GATE_UP)}

    def test_has_its_row_in_the_docs(self, model: dict[str, Any]) -> None:
        size, context = model["parameters"] / 1e9, model["config"]["max_position_embeddings"]
        row = f"| `{model['name']}` | {model['config']['model_type']} | {size:.2f} | {context:,} |"
        assert row in PAGE


@pytest.mark.parametrize("model", PUBLISHED["hybrids"], ids=lambda model: model["name"])
class TestHybridThatLoads:
    def test_has_the_parameters_of_transformers(self, model: dict[str, Any]) -> None:
        """Of the decoder: the names of models count an image encoder and layers that predict further tokens."""
        shape = ModelShape.from_hf(model["config"])
        assert shape.num_parameters == model["parameters"]
        named = float(re.search(r"-([\d.]+)B", model["name"])[1])  # pyrefly: ignore[unsupported-operation]
        assert shape.num_parameters == pytest.approx(named * 1e9, rel=0.011)
        config = text_config(model["config"]) | {"num_hidden_layers": 4}
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        assert sum(one.numel() for one in theirs.parameters()) == ModelShape.from_hf(config).num_parameters

    def test_is_known_to_the_planner(self, model: dict[str, Any]) -> None:
        (known,) = (one for one in MODELS.values() if one.path == model["name"])
        assert replace(DecoderShape.from_hf(model["config"]), name=known.name, path=known.path) == known

    def test_has_its_row_in_the_docs(self, model: dict[str, Any]) -> None:
        size, context = model["parameters"] / 1e9, 262_144
        assert f"| `{model['name']}` | {model['config']['model_type']} | {size:.2f} | {context:,} |" in PAGE


@pytest.mark.parametrize("model", PUBLISHED["refused"], ids=lambda model: model["name"])
def test_one_of_a_family_that_does_not_load(model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ModelShape.from_hf(model["config"])
    assert f"| `{model['name']}` | {model['why']} |" in PAGE


def test_the_docs_name_no_model_that_is_not_checked() -> None:
    known = {one["name"] for one in [*LOAD, *PUBLISHED["refused"]]}
    assert set(re.findall(r"^\| `(\w[\w.-]*/[\w.-]+)`", PAGE, re.MULTILINE)) == known


@pytest.mark.parametrize("model_type", OTHERS)
def test_another_architecture_is_named_with_the_nearest_that_works(model_type: str) -> None:
    what, lacks, nearest = OTHERS[model_type]
    assert nearest in {one["name"] for one in LOAD}
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_hf({"model_type": model_type})
    said = f"config.json: `model_type` = {model_type!r} is {what}: {lacks} not computed here; the nearest that works is"
    assert str(caught.value) == f"{said} {nearest}"
    assert f"`{model_type}` ({what})" in PAGE.replace("\n", " ")


def test_all_that_is_refused_by_name_is_an_architecture_of_transformers() -> None:
    assert set(OTHERS) <= set(transformers.CONFIG_MAPPING.keys())
    assert not set(OTHERS) & set(ARCHITECTURES)
