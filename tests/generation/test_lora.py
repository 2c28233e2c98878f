"""A generator that merges adapters serves the bits of one that is given merged weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from llamarl.config.roles import LoraConfig
from llamarl.generation.model import AdapterMerger, GeneratorModel
from llamarl.models.lora import A, B, adapted_weights, adapter_of, merged
from llamarl.models.transformer import Transformer
from llamarl.sharding.box import Box
from tests.generation.test_model import SHAPES, trainer
from tests.nightly import crossed

CONFIG = LoraConfig(rank=4, alpha=6.0)


@dataclass(frozen=True)
class Rank:
    """Of two that share a model; no collectives."""

    rank: int
    size: int = 2

    def all_reduce(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def all_gather_vocab(self, logits_N_V: Tensor) -> Tensor:
        raise NotImplementedError


def adapters(base: Transformer, config: LoraConfig, seed: int) -> dict[str, Tensor]:
    generator, found = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, (outputs, inputs) in adapted_weights(base.shape, config):
        module = name.removesuffix("weight")
        for kind, shape in ((A, (config.rank, inputs)), (B, (outputs, config.rank))):
            found[f"{module}{kind}"] = torch.empty(shape).normal_(0.0, 0.3, generator=generator)
    return found


def part(merger: AdapterMerger, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """What one rank receives."""
    return {
        spec.key: whole[spec.name][spec.box.within(Box.whole(spec.global_shape))].clone() for spec in merger.specs()
    }


def expected(base: Transformer, config: LoraConfig, learnt: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = {name: weight.detach() for name, weight in base.named_parameters()}
    for name, _ in adapted_weights(base.shape, config):
        weights[name] = merged(weights[name], *adapter_of(learnt, name), config.scale)
    return weights


def served(model: GeneratorModel) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in model._used.items()}


@pytest.mark.parametrize(
    ("family", "precision", "ranks"),
    crossed(["llama", "qwen2", "qwen3_tied"], ["float32", "bfloat16", "int8"], [1, 2]),
)
def test_it_serves_the_merged_weights(family: str, precision: str, ranks: int) -> None:
    """Version after version: nothing of an older one stays."""
    base = trainer(replace(SHAPES[family], num_kv_heads=2))
    for rank in range(ranks):
        parallel = Rank(rank) if ranks > 1 else None
        model, oracle = (GeneratorModel(base.shape, precision, "cpu", parallel) for _ in range(2))
        model.load(base)
        merger = AdapterMerger(model, base, CONFIG)
        for seed in range(3):
            learnt = adapters(base, CONFIG, seed)
            before, kept = served(model), model.weights_at
            held = merger.hold(part(merger, learnt))
            assert all(torch.equal(tensor, before[key]) for key, tensor in served(model).items())
            model.use(held)
            assert model.weights_at != kept
            oracle.load(expected(base, CONFIG, learnt))
            wanted = served(oracle)
            assert wanted.keys() == served(model).keys()
            for key, tensor in served(model).items():
                assert torch.equal(tensor, wanted[key]), key


def test_what_is_not_adapted_is_not_asked_for() -> None:
    base, config = trainer(SHAPES["qwen2"]), LoraConfig(rank=2, targets=["o_proj"])
    model = GeneratorModel(base.shape, "float32", "cpu")
    model.load(base)
    before, merger = served(model), AdapterMerger(model, base, config)
    assert {spec.name.split(".", 3)[3] for spec in merger.specs()} == {f"self_attn.o_proj.{kind}" for kind in (A, B)}
    model.use(merger.hold(part(merger, adapters(base, config, 0))))
    changed = {key for key, tensor in served(model).items() if not torch.equal(tensor, before[key])}
    assert changed == {name for name, _ in adapted_weights(base.shape, config)}


def test_a_frozen_model_that_is_bfloat16_takes_no_more() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        base = trainer(SHAPES["llama"]).to(dtype).float()
        model = GeneratorModel(base.shape, "bfloat16", "cpu")
        model.load(base)
        frozen = AdapterMerger(model, base, CONFIG)._frozen
        assert {tensor.dtype for tensor in frozen.values()} == {dtype}
        assert all(torch.equal(tensor.float(), base.get_parameter(name)) for name, tensor in frozen.items())
