"""The generator's forward against the trainer's, in every precision, cut over ranks, with weights that come and go."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from llamarl.generation.model import GeneratorModel, Precision, load_generator_model
from llamarl.kernels import linear
from llamarl.models.attention import causal_attend
from llamarl.models.hf import Weights, new_model, save_model
from llamarl.models.quantize import NonFiniteWeights, dequantize_rows, quantize_rows
from llamarl.models.shape import ModelShape, YarnScaling
from llamarl.models.transformer import Transformer
from llamarl.sharding.box import Box
from llamarl.weight_sync.base import views
from llamarl.weight_sync.layout import lay_out
from tests.kernels.engines import rounded
from tests.nightly import some

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
    # Of 16 tokens at first: `LENGTHS` go beyond them.
    "mistral_yarn": replace(
        SHAPE, family="mistral", rope_scaling=YarnScaling(factor=2.0, original_max_position_embeddings=16)
    ),
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


@pytest.mark.parametrize("name", SHAPES)
def test_float32_equals_the_trainer(computed_by, name):
    model = trainer(SHAPES[name])
    ours, theirs = logits(loaded(model, "float32")), logits(model)
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def reference(generator: GeneratorModel, model: Transformer) -> Transformer:
    """In float32, with the weights that the values stand for and the activations that the paths multiply."""
    exact, given = Transformer(model.shape), dict(model.named_parameters())
    head = Rounding(generator._network.head.path)
    layer = generator._network.layers[0]
    paths = {"q_proj": layer.qkv[0], "k_proj": layer.qkv[-1], "v_proj": layer.qkv[-1], "o_proj": layer.o}
    paths |= {"gate_proj": layer.mlp.gate_up[0], "up_proj": layer.mlp.gate_up[-1], "down_proj": layer.mlp.down}
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            if generator.precision == "int8" and name.endswith("_proj.weight"):
                parameter.copy_(dequantize_rows(*quantize_rows(given[name], "int8")))
            else:
                parameter.copy_(given[name].bfloat16() if parameter.ndim == 2 else given[name])
    for name, module in exact.named_modules():
        if name.split(".")[-1] in paths:
            module.register_forward_pre_hook(Rounding(paths[name.split(".")[-1]].path))
    unrounded = exact.logits
    exact.logits = lambda hidden: unrounded(head(None, (hidden,))[0])
    return exact


class Rounding:
    """Of a projection's input."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, _module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (rounded(self.path, inputs[0]).float(),)


@pytest.mark.parametrize("name", some(SHAPES, 3))
def test_lower_precisions_compute_with_the_rounded_weights(computed_by, name):
    """And with activations as the paths round them. What is left are sums in float32, and what follows from them where
    an activation lies between two roundings: it goes the other way, by 2^-8 of itself (bfloat16) or 1 / 127 of its
    row's largest (int8: about 3 times the mean magnitude, so 0.3 % of a row of 64); such a row changes all later ones
    of its sequence a little. Against the weights that were not rounded, rounding to 8 bits adds noise of a step /
    sqrt(12), which is 0.7 to 1 % for each of the 9 products on the way and 3 % for all, as much as that of the weights;
    half of the variance is theirs."""
    model = trainer(SHAPES[name])
    for precision, tolerance in (("bfloat16", 2e-3), ("int8", 5e-3)):
        generator = loaded(model, precision)
        ours, exact = logits(generator), logits(reference(generator, model))
        assert ours.dtype == torch.float32
        assert (ours - exact).norm() < tolerance * exact.norm(), precision
        assert (ours - logits(model)).norm() < 0.1 * exact.norm(), precision


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_sequence_has_the_same_bits_whatever_lies_beside_it(computed_by, precision):
    if computed_by == "torch" or linear.kernels().library is None:
        pytest.skip("torch's matmul depends on the number of rows")
    model = loaded(trainer(SHAPE), precision)
    together = logits(model).split(LENGTHS)
    for i, length in enumerate(LENGTHS):
        assert torch.equal(logits(model, [length], first=i), together[i])


@pytest.mark.parametrize("precision", some(PRECISIONS, 1))
def test_held_weights_serve_when_they_are_used(computed_by, precision):
    """Packed beside those in use, in memory that is used again; those that others replaced cannot be used."""
    models = [trainer(SHAPE, seed) for seed in range(3)]
    generator = loaded(models[0], precision)
    expected, slots = [logits(loaded(one, precision)) for one in models], [slot(generator, one) for one in models]
    for index in (1, 2, 0, 1):
        before, dropped = logits(generator), generator.hold(slots[index - 1])
        held = generator.hold(slots[index])
        assert torch.equal(logits(generator), before)
        with pytest.raises(AssertionError, match="later weights"):
            generator.use(dropped)
        generator.use(held)
        assert torch.equal(logits(generator), expected[index])
    sizes = {workspace.num_bytes for workspace in generator._workspaces}
    packs = any(one._packed is not None for one in generator._network.linears())
    assert sizes == {generator.packed_bytes} and bool(generator.packed_bytes) == packs
    assert generator._network.head.path in generator.multiplies_by


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_in_use_are_those_that_were_given(computed_by, precision):
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
    layer, expected = model._network.layers[0], logits(model)
    assert (len(layer.qkv), len(layer.mlp.gate_up)) == (1, 1)
    model.use({key: tensor.clone() for key, tensor in tensors.items()})
    layer = model._network.layers[0]
    assert (len(layer.qkv), len(layer.mlp.gate_up)) == (3, 2)
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
        self.barrier = threading.Barrier(self.size, timeout=240)

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
@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3_tied", "mistral_yarn"])
def test_two_ranks_equal_one(name, precision):
    """With one kv head for both ranks, cut biases, and either head.

    Int8 scales are those of each rank's columns: 2 % for other weights. Where activations get 8 bits, those of the four
    cut inputs (o, down) are rounded to other steps on either side: eight times noise of 0.7 to 1 % (a step / sqrt(12)),
    2.6 % together. Where they are rounded to bfloat16, sums in another order round a few of them the other way.
    """
    model, meeting = trainer(SHAPES[name]), Meeting(2)
    ranks = [loaded(model, precision, tensor_parallel=Rank(meeting, rank)) for rank in range(2)]
    assert ranks[0].shape.num_heads == 2 and ranks[0].shape.num_kv_heads == 1
    found: dict[int, Tensor] = {}
    threads = [threading.Thread(target=lambda r=r: found.update({r: logits(ranks[r])})) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    expected = logits(loaded(model, precision))
    assert torch.equal(found[0], found[1])
    path = ranks[0]._network.layers[0].o.path
    has_8_bits, rounds = path.endswith(("-int8", "-vnni")), path.endswith("-bf16")
    few = 1e-4 if rounds else 1e-6
    tolerance = {"float32": 1e-6, "bfloat16": few, "int8": math.hypot(0.02, 0.026 * has_8_bits)}[precision]
    assert (found[0] - expected).norm() <= tolerance * expected.norm()


def test_ranks_that_cannot_share_the_model_are_refused():
    with pytest.raises(ValueError, match="cannot share"):
        GeneratorModel(replace(SHAPE, vocab_size=131), "float32", "cpu", tensor_parallel=Rank(Meeting(2), 0))


def test_nobody_writes_into_weights_that_a_gpu_still_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is handed out, for adapters or for a transport, when steps launched before the swap are done."""
    base = trainer(SHAPES["llama"])
    model = loaded(base, "float32")
    spare, log = model.spare(), list[str]()
    event = SimpleNamespace(synchronize=lambda: log.append("synchronize"))
    stream = SimpleNamespace(record_event=lambda: log.append("record") or event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    for tensor in spare.values():
        tensor.fill_(1)
    model.use(spare)
    assert log == ["record"]
    before = model.room(model.specs())()
    assert log == ["record", "synchronize"]
    assert all(torch.equal(before[name], p) for name, p in base.named_parameters()), "weights of before"
    assert model.spare(whole=True) is before, "not copied again"


def test_the_spare_is_filled_for_who_does_not_fill_it() -> None:
    base = trainer(SHAPES["llama"])
    model = loaded(base, "float32")
    for tensor in model.spare().values():
        tensor.fill_(0)
    assert not any(tensor.any() for tensor in model.room(model.specs())().values()), "left alone"
    assert all(torch.equal(model.spare(whole=True)[name], p) for name, p in base.named_parameters())


@dataclass
class Alone:
    """Computes nothing with the others."""

    size: int
    rank: int

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_vocab(self, logits_N_V: Tensor) -> Tensor:
        return logits_N_V


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_rank_reads_its_part_alone(precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, read, elements = trainer(SHAPES["qwen3_tied"]), Weights.read, list[int]()
    save_model(whole, tmp_path / "model", None)

    def counted(weights: Weights, name: str, box: Box) -> Tensor:
        elements.append(box.num_elements)
        return read(weights, name, box)

    monkeypatch.setattr(Weights, "read", counted)
    monkeypatch.delattr(Weights, "read_all")
    model = load_generator_model(tmp_path / "model", precision, "cpu", Alone(2, 1))
    own = [math.prod(spec.box.shape) for spec in model.specs() if spec.part == "values"]
    assert sum(elements) == sum(own) < 0.6 * sum(weight.numel() for weight in whole.parameters())
    given = GeneratorModel(whole.shape, precision, "cpu", Alone(2, 1))
    given.load(whole)
    for key, tensor in given._used.items():
        assert torch.equal(model._used[key], tensor), key
