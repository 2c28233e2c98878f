"""The generator's forward against the trainer's, in every precision, cut over ranks, with weights that come and go."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from llamarl.generation.model import GeneratorModel
from llamarl.kernels import build, linear, ops
from llamarl.models.attention import causal_attend
from llamarl.models.hf import new_model
from llamarl.models.quantize import NonFiniteWeights, dequantize_rows, quantize_rows
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.weight_sync.base import views
from llamarl.weight_sync.layout import lay_out

SHAPE = ModelShape(
    family="qwen3",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=130,
    max_position_embeddings=128,
)
SHAPES = {
    "llama": replace(SHAPE, family="llama"),
    "llama_tied": replace(SHAPE, family="llama", tie_embeddings=True),
    "qwen2": replace(SHAPE, family="qwen2", num_kv_heads=1),
    "qwen3_tied": replace(SHAPE, tie_embeddings=True),
    # Rows of 36 bytes in bfloat16 leave gaps between tensors, so that nothing can be joined.
    "odd": replace(
        SHAPE, family="qwen2", hidden_size=18, head_dim=6, intermediate_size=10, num_heads=2, num_kv_heads=1
    ),
}
PRECISIONS = ["float32", "bfloat16", "int8"]
LENGTHS = [7, 1, 40, 13]
Q = "model.layers.1.self_attn.q_proj.weight"


def trainer(shape: ModelShape, seed: int = 0) -> Transformer:
    """Every parameter random, biases and norms included."""
    model, generator = new_model(shape, seed, std=0.1), torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))
    return model


def loaded(model: Transformer, precision: str, **options) -> GeneratorModel:
    generator = GeneratorModel(model.shape, precision, "cpu", **options)
    generator.load(model)
    return generator


def slot(generator: GeneratorModel, model: Transformer) -> dict[str, Tensor]:
    """What a subscriber hands over: views of one flat buffer."""
    layout, named = lay_out(generator.specs()), dict(model.named_parameters())
    tensors = views(layout, torch.empty(layout.num_bytes, dtype=torch.uint8))
    for spec in layout.specs:
        source = named[spec.name].detach()
        if spec.dtype == "int8":
            quantize_rows(source, "int8", out=(tensors[spec.name], tensors[f"{spec.name}.scale"]))
        elif spec.part == "values":
            tensors[spec.key].copy_(source)
    return tensors


@torch.inference_mode()
def logits(model, lengths=LENGTHS, first: int = 0) -> Tensor:
    documents = [torch.arange(3 + i, 3 + i + n) * 7 % 130 for i, n in enumerate(lengths, first)]
    positions = torch.cat([torch.arange(n) for n in lengths])
    return model.logits(model(torch.cat(documents), positions, causal_attend(lengths)))


@pytest.fixture(params=["kernel", "torch"])
def computed_by(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setenv(build.DISABLE_VARIABLE, "1")
    caches = build.load, linear.kernels, linear.path, ops.kernels
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("name", SHAPES)
def test_float32_equals_the_trainer(computed_by, name):
    model = trainer(SHAPES[name])
    ours, theirs = logits(loaded(model, "float32")), logits(model)
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_lower_precisions_compute_with_the_rounded_weights(computed_by, name):
    """Against float32 with the weights that the values stand for: what is left is the rounding of activations."""
    model = trainer(SHAPES[name])
    for precision in ("bfloat16", "int8"):
        rounded = Transformer(model.shape)
        with torch.no_grad():
            for parameter, (key, source) in zip(rounded.parameters(), model.named_parameters(), strict=True):
                if precision == "int8" and key.endswith("_proj.weight"):
                    parameter.copy_(dequantize_rows(*quantize_rows(source, "int8")))
                else:
                    parameter.copy_(source.bfloat16() if source.ndim == 2 else source)
        ours, exact = logits(loaded(model, precision)), logits(rounded)
        assert ours.dtype == torch.float32
        assert (ours - exact).norm() < 0.02 * exact.norm(), precision
        assert (ours - logits(model)).norm() < 0.1 * exact.norm(), precision


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_sequence_has_the_same_bits_whatever_lies_beside_it(precision):
    if linear.kernels().library is None:
        pytest.skip("torch's matmul depends on the number of rows")
    model = loaded(trainer(SHAPE), precision)
    together = logits(model).split(LENGTHS)
    for i, length in enumerate(LENGTHS):
        assert torch.equal(logits(model, [length], first=i), together[i])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_use_changes_pointers_only(precision):
    first, second = trainer(SHAPE, 0), trainer(SHAPE, 1)
    model = GeneratorModel(SHAPE, precision, "cpu")
    slots = [slot(model, first), slot(model, second)]
    expected = [logits(loaded(one, precision)) for one in (first, second)]
    for index in (0, 1, 0):
        model.use(slots[index])
        assert torch.equal(logits(model), expected[index])
    key = f"{Q}.scale" if precision == "int8" else Q
    slots[0][key].zero_()
    assert not torch.equal(logits(model), expected[0]), "it reads the tensors that it was given"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_joined_and_single_projections_agree(precision):
    model = GeneratorModel(SHAPES["qwen2"], precision, "cpu")
    tensors = slot(model, trainer(SHAPES["qwen2"]))
    model.use(tensors)
    layer, expected = model._layers[0], logits(model)
    assert (len(layer.qkv), len(layer.gate_up)) == (1, 1)
    model.use({key: tensor.clone() for key, tensor in tensors.items()})
    assert (len(model._layers[0].qkv), len(model._layers[0].gate_up)) == (3, 2)
    assert (logits(model) - expected).abs().max() < 1e-5


def test_specs_name_every_parameter_once():
    model = trainer(SHAPES["qwen2"])
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for precision, projections in (("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8")):
        generator = GeneratorModel(model.shape, precision, "cpu")
        specs = generator.specs()
        assert {spec.name: spec.global_shape for spec in specs} == shapes
        assert len({spec.key for spec in specs}) == len(specs)
        dtypes = {spec.key: spec.dtype for spec in specs}
        assert dtypes[Q] == projections
        assert (dtypes.get(f"{Q}.scale") == "float32") == (precision == "int8")
        assert (
            dtypes["lm_head.weight"] == dtypes["model.embed_tokens.weight"] == projections.replace("int8", "bfloat16")
        )
        assert dtypes["model.norm.weight"] == dtypes["model.layers.0.self_attn.q_proj.bias"] == "float32"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nan_weights_never_give_finite_logits(computed_by, precision):
    """Not through queries and keys: torch's attention gives zeros, not NaN, for NaN scores over a few keys."""
    model = trainer(SHAPE)
    generator = GeneratorModel(SHAPE, precision, "cpu")
    for name in ("self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"):
        weight = f"model.layers.1.{name}"
        tensors = slot(generator, model)
        tensors[f"{weight}.scale" if precision == "int8" else weight].view(-1)[5] = float("nan")
        generator.use(tensors)
        assert logits(generator).isnan().all(), name
    with torch.no_grad():
        model.get_parameter(weight)[3, 3] = float("nan")
    if precision == "int8":
        with pytest.raises(NonFiniteWeights):
            generator.load(model)
    else:
        generator.load(model)
        assert logits(generator).isnan().all()


def test_fp8_is_refused_without_a_gpu():
    with pytest.raises(ValueError, match="fp8 weights need a GPU"):
        GeneratorModel(SHAPE, "fp8", "cpu")


@dataclass
class Meeting:
    """Where the threads that play the ranks exchange tensors."""

    size: int
    parts: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.barrier = threading.Barrier(self.size, timeout=20)

    def gather(self, rank: int, x: Tensor) -> list[Tensor]:
        self.parts[rank] = x.clone()
        self.barrier.wait()
        parts = [self.parts[rank] for rank in range(self.size)]
        self.barrier.wait()
        return parts


@dataclass
class Rank:
    meeting: Meeting
    rank: int

    @property
    def size(self) -> int:
        return self.meeting.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.gather(self.rank, x)).sum(0)

    def all_gather_vocab(self, logits_N_V: Tensor) -> Tensor:
        return torch.cat(self.meeting.gather(self.rank, logits_N_V), -1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3_tied"])
def test_two_ranks_equal_one(name, precision):
    """With one kv head for both ranks, cut biases, and either head. Int8 scales are those of each rank's columns."""
    model, meeting = trainer(SHAPES[name]), Meeting(2)
    ranks = [loaded(model, precision, tensor_parallel=Rank(meeting, rank)) for rank in range(2)]
    assert ranks[0].shape.num_heads == 2 and ranks[0].shape.num_kv_heads == 1
    found: dict[int, Tensor] = {}
    threads = [threading.Thread(target=lambda r=r: found.update({r: logits(ranks[r])})) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    expected = logits(loaded(model, precision))
    assert torch.equal(found[0], found[1])
    tolerance = {"float32": 1e-6, "bfloat16": 1e-6, "int8": 0.02}[precision]
    assert (found[0] - expected).norm() <= tolerance * expected.norm()


def test_ranks_that_cannot_share_the_model_are_refused():
    with pytest.raises(ValueError, match="cannot share"):
        GeneratorModel(replace(SHAPE, vocab_size=131), "float32", "cpu", tensor_parallel=Rank(Meeting(2), 0))
