from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from llamarl.models.attention import causal_attend
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Attend, Transformer, rope_frequencies

LENGTH = 200
"""Over 64, the original context of the scaled case, so that every band of its wavelengths counts."""
SHAPE = ModelShape(
    family="qwen3",
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=131,
    max_position_embeddings=64,
)


def twin(oracle: PreTrainedModel) -> Transformer:
    """Our model with the oracle's weights."""
    model = Transformer(ModelShape.from_hf(oracle.config.to_dict()))
    weights = {name: value.clone() for name, value in oracle.state_dict().items()}
    if model.shape.tie_embeddings:
        del weights["lm_head.weight"]
    model.load_state_dict(weights)
    return model


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(2))


def test_logits_equal_transformers_bit_for_bit(oracle: PreTrainedModel) -> None:
    model, ids = twin(oracle), tokens()
    with torch.no_grad():
        ours = model.logits(model(ids, torch.arange(LENGTH), causal_attend([LENGTH])))
        theirs = oracle(ids[None]).logits[0]
    assert ours.abs().max() > 1
    assert torch.equal(ours, theirs)


def test_gradients_equal_transformers(oracle: PreTrainedModel) -> None:
    model, ids = twin(oracle), tokens()
    direction = torch.randn(LENGTH, 131, generator=torch.Generator().manual_seed(3))
    model.logits(model(ids, torch.arange(LENGTH), causal_attend([LENGTH]))).backward(direction)
    oracle.zero_grad()
    oracle(ids[None]).logits[0].backward(direction)
    theirs, ours = dict(oracle.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        gradient, expected = parameter.grad, theirs[name].grad
        assert gradient is not None and expected is not None
        assert (gradient - expected).norm() <= 1e-6 * expected.norm(), name


def test_bfloat16_logits_stay_near_transformers(oracle: PreTrainedModel) -> None:
    model, ids = twin(oracle).to(torch.bfloat16), tokens()
    with torch.no_grad():
        exact = oracle(ids[None]).logits[0]
        ours = model.logits(model(ids, torch.arange(LENGTH), causal_attend([LENGTH])))
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() < 0.02 * exact.norm()


def test_packed_documents_equal_separate_ones(oracle: PreTrainedModel) -> None:
    model, lengths = twin(oracle), [7, 1, 40, 13]
    ids, positions = tokens(sum(lengths)), torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        packed = model.logits(model(ids, positions, causal_attend(lengths))).split(lengths)
        for document, logits in zip(ids.split(lengths), packed, strict=True):
            separate = oracle(document[None]).logits[0]
            torch.testing.assert_close(logits, separate, rtol=0, atol=1e-5)


def test_attend_sees_layers_in_order_and_grouped_heads() -> None:
    model = new_model(SHAPE, seed=0, std=0.1)
    seen = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((layer, q.shape, k.shape, v.shape))
        return q

    model(tokens(3), torch.arange(3), attend)
    assert seen == [(layer, (3, 4, 8), (3, 2, 8), (3, 2, 8)) for layer in range(2)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_num_parameters_counts_what_is_built(family: str, tied: bool) -> None:
    sizes = replace(SHAPE, family=family, tie_embeddings=tied)
    with torch.device("meta"):
        model = Transformer(sizes)
    assert sizes.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_tied_head_is_the_embedding_and_has_no_other_name() -> None:
    model = new_model(replace(SHAPE, tie_embeddings=True), seed=0, std=0.1)
    assert model.head_weight_V_D is model.model.embed_tokens.weight
    assert "lm_head.weight" not in model.state_dict()


def test_initialize_repeats_by_seed_and_sets_biases_and_norms() -> None:
    first, again, other = (new_model(replace(SHAPE, family="qwen2"), seed, 0.1).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert not first["model.layers.0.self_attn.q_proj.bias"].any()
    assert (first["model.norm.weight"] == 1).all()
    assert first["lm_head.weight"].std().item() == pytest.approx(0.1, rel=0.05)


def forward(model: Transformer, attend: Attend, length: int = 5) -> torch.Tensor:
    return model(tokens(length), torch.arange(length), attend)


def test_rope_table_first_made_in_inference_serves_a_backward() -> None:
    model = new_model(SHAPE, seed=0, std=0.1)
    with torch.inference_mode():
        forward(model, causal_attend([5]))
    forward(model, causal_attend([5])).sum().backward()
    assert model.get_parameter("model.layers.0.self_attn.q_proj.weight").grad is not None


def test_rope_is_the_same_on_a_meta_built_model_and_no_state() -> None:
    plain = Transformer(SHAPE)
    with torch.device("meta"):
        built = Transformer(SHAPE)
    assert not any("rope" in name for name in built.state_dict())
    built.load_state_dict(plain.state_dict(), assign=True)
    assert torch.equal(forward(plain, causal_attend([5])), forward(built, causal_attend([5])))


def test_position_outside_the_context_is_an_error() -> None:
    model = new_model(replace(SHAPE, max_position_embeddings=4), seed=0, std=0.1)
    with pytest.raises(IndexError):
        forward(model, causal_attend([5]))


def test_rope_frequencies_fall_from_one() -> None:
    frequencies = rope_frequencies(replace(SHAPE, rope_theta=10_000.0))
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))
