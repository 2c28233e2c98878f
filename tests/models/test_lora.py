"""Adapters: their formula, where they begin, and their files, against PEFT."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from llamarl.config import ConfigError
from llamarl.config.roles import LoraConfig
from llamarl.models.attention import causal_attend
from llamarl.models.hf import new_model, save_model
from llamarl.models.lora import A, B, LoraLinear, adapted_weights, adapter_of, add_adapters, merged, save_adapters
from llamarl.models.transformer import Transformer
from tests.models.test_transformer import SHAPE as QWEN3

SHAPE = replace(QWEN3, family="qwen2")
SOME = LoraConfig(rank=3, alpha=5.0, targets=["q_proj", "v_proj", "down_proj"])
ALL = LoraConfig(rank=4)
LENGTHS = [7, 1, 20]


def logits(model: Transformer) -> torch.Tensor:
    ids = torch.randint(0, 131, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        return model.logits(model(ids, positions, causal_attend(LENGTHS)))


def adapted(config: LoraConfig, dtype: torch.dtype = torch.float32) -> tuple[Transformer, Transformer]:
    """A model whose adapters have learnt something, and the same model without any."""
    base, model = (new_model(SHAPE, seed=3, std=0.2).to(dtype) for _ in range(2))
    add_adapters(model, config, seed=1)
    generator = torch.Generator().manual_seed(9)
    for name, weight in model.named_parameters():
        if name.endswith(B):
            nn.init.normal_(weight, std=0.3, generator=generator)
    return model, base


def adapters(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def test_formula() -> None:
    base = nn.Linear(5, 4, dtype=torch.float64)
    layer = LoraLinear(base, 2, 1.5)
    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = layer.lora_A.weight, layer.lora_B.weight
    expected = x @ base.weight.T + base.bias + 1.5 * (x @ a.T) @ b.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-13, atol=1e-13)
    whole = merged(base.weight, a, b, 1.5)
    torch.testing.assert_close(x @ whole.T + base.bias, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("config", [SOME, ALL], ids=["some", "all"])
def test_new_adapters_change_nothing_and_only_they_learn(config: LoraConfig) -> None:
    base, model = (new_model(SHAPE, seed=3, std=0.2) for _ in range(2))
    add_adapters(model, config, seed=1)
    assert torch.equal(logits(model), logits(base))
    names = [name for name, _ in adapted_weights(SHAPE, config)]
    assert len(names) == len(config.targets) * SHAPE.num_layers
    expected = {f"{name.removesuffix('weight')}{kind}" for name in names for kind in (A, B)}
    assert adapters(model).keys() == expected
    assert dict(base.named_parameters()).keys() == dict(model.named_parameters()).keys() - expected
    for name, weight in adapters(model).items():
        if name.endswith(A):
            bound = weight.shape[1] ** -0.5
            assert 0.8 * bound < weight.abs().max() <= bound
        else:
            assert not weight.any()


def test_first_values_depend_on_seed_and_place_alone() -> None:
    first, again, other = (new_model(SHAPE, seed=3, std=0.2) for _ in range(3))
    add_adapters(first, ALL, seed=1)
    add_adapters(again, SOME.model_copy(update={"rank": 4}), seed=1)
    add_adapters(other, ALL, seed=2)
    firsts, others = adapters(first), adapters(other)
    for name, weight in adapters(again).items():
        assert torch.equal(weight, firsts[name])
    values = [weight for name, weight in firsts.items() if name.endswith(A)]
    assert all(not torch.equal(one, two) for one, two in pairwise(values) if one.shape == two.shape)
    assert all(not torch.equal(weight, others[name]) for name, weight in firsts.items() if name.endswith(A))


@pytest.mark.parametrize("config", [SOME, ALL], ids=["some", "all"])
def test_merged_logits_are_equal(config: LoraConfig) -> None:
    model, base = adapted(config, torch.float64)
    expected, learnt = logits(model), adapters(model)
    assert not torch.allclose(logits(base), expected, atol=1)
    for name, _ in adapted_weights(SHAPE, config):
        weight = base.get_parameter(name)
        weight.data = merged(weight.data, *adapter_of(learnt, name), config.scale)
    torch.testing.assert_close(logits(base), expected, rtol=1e-11, atol=1e-11)


def test_a_frozen_copy_in_bfloat16_computes_the_same_bits_under_autocast() -> None:
    base, kept, halved = (new_model(SHAPE, seed=3, std=0.2) for _ in range(3))
    add_adapters(kept, ALL, seed=1)
    add_adapters(halved, ALL, seed=1, dtype=torch.bfloat16)
    dtypes = {name: weight.dtype for name, weight in halved.named_parameters()}
    assert {dtypes[name] for name, _ in adapted_weights(SHAPE, ALL)} == {torch.bfloat16}
    assert {dtypes[name] for name in adapters(halved)} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(kept), logits(halved))
    assert (logits(halved) - logits(base)).norm() < 0.02 * logits(base).norm()


class TestPeft:
    @pytest.mark.parametrize("config", [SOME, ALL], ids=["some", "all"])
    def test_it_loads_what_is_saved(self, tmp_path: Path, config: LoraConfig) -> None:
        model, base = adapted(config)
        save_model(base, tmp_path / "base", None)
        save_adapters(adapters(model), config, str(tmp_path / "base"), tmp_path / "adapters")
        theirs: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        peft = PeftModel.from_pretrained(theirs, tmp_path / "adapters")
        for merge in (False, True):
            oracle = peft.merge_and_unload() if merge else peft
            ids = torch.randint(0, 131, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
            with torch.no_grad():
                found = torch.cat([oracle(one[None]).logits[0] for one in ids.split(LENGTHS)])
            torch.testing.assert_close(logits(model), found, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(logits(base), found, atol=0.5)

    def test_other_files_stay(self, tmp_path: Path) -> None:
        model, _ = adapted(SOME)
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match=r"also holds `notes.txt`"):
            save_adapters(adapters(model), SOME, "base", tmp_path)
        save_adapters(adapters(model), SOME, "base", tmp_path / "new")
        save_adapters(adapters(model), SOME, "base", tmp_path / "new")
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
            "adapter_config.json", "adapter_model.safetensors", "llamarl_base.json",
        ]  # fmt: skip
