"""Hybrids of attention and delta nets: transformers decides what is right, of files, outputs and gradients."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from llamarl.config import ConfigError
from llamarl.kernels.delta import convolved, heads, step
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.attention import causal_attend, packed_attend
from llamarl.models.delta_rule import ROOT, Branches, Packed, RecurrentForm
from llamarl.models.folder import load_shape
from llamarl.models.hf import load_model, open_model, save_model
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.sharding.box import Box
from tests.models.conftest import SIZES
from tests.nightly import some

DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24,
}  # fmt: skip
KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
CASES: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS | {"head_dim": 16},
    "qwen3_next_dense": DELTA | {"num_experts": 0, "head_dim": 24, "layer_types": KINDS},
    "qwen3_next_dense_between": DELTA | EXPERTS | {"mlp_only_layers": [1], "head_dim": 16, "norm_topk_prob": False},
    "qwen3_5_text": DELTA | {"head_dim": 16, "tie_word_embeddings": True},
    # One value head for each key head, odd sizes, a window of three tokens.
    "qwen3_5_text_odd": DELTA
    | {
        "head_dim": 16, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 7,
        "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3, "layer_types": KINDS,
    },
    "qwen3_5_moe_text": DELTA | EXPERTS | {"head_dim": 16},
}  # fmt: skip
LENGTH = 150


@pytest.fixture(scope="module", params=CASES)
def oracle(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model whose every tensor is random, norms and decays included, so that none can be forgotten unseen."""
    family = next(one for one in ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text") if request.param.startswith(one))
    config = transformers.AutoConfig.for_model(family, **SIZES | {"num_hidden_layers": 4} | CASES[request.param])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            spread = 0.5 if ".mlp.gate." in name else 0.1
            noise = torch.empty_like(tensor).normal_(0.0, spread, generator=generator)
            tensor.copy_(noise if tensor.ndim > 1 else tensor + noise)
            if name.endswith("A_log"):  # slow decays, so that states matter
                tensor.copy_(noise * 10 - 2)
            if "conv1d" in name:
                tensor.mul_(3)
    return model


@pytest.fixture(scope="module")
def files(oracle: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    oracle.save_pretrained(folder, max_shard_size="200KB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def tokens() -> Tensor:
    return torch.randint(0, 131, (LENGTH,), generator=torch.Generator().manual_seed(2))


def logits(model: Transformer) -> Tensor:
    return model.logits(model(tokens(), torch.arange(LENGTH), causal_attend([LENGTH])))


def as_here(model: Transformer, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers by the names of ours, read from files in which they were saved as weights."""
    found = dict[str, Tensor]()
    for name, own in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if ".experts." in name and kind in ("gate_proj", "up_proj"):
            found[name] = theirs[f"{owner}.gate_up_proj"].chunk(2, 1)[kind == "up_proj"]
        else:
            found[name] = theirs.get(name.replace(".shared_experts.", ".shared_expert."), own)
    delta = model.shape.delta
    assert delta is not None
    each, groups = delta.num_value_heads // delta.num_key_heads, delta.num_key_heads
    for layer in delta.layers:
        own = f"model.layers.{layer}.linear_attn"
        sizes = [delta.key_size, delta.key_size, delta.value_size]
        for kind, part in zip("qkv", theirs[f"{own}.conv1d.weight"].squeeze(1).split(sizes), strict=True):
            found[f"{own}.conv_{kind}.weight"] = part
        if model.shape.family != "qwen3_next":
            for kind, part in zip("qkv", theirs[f"{own}.in_proj_qkv.weight"].split(sizes), strict=True):
                found[f"{own}.in_proj_{kind}.weight"] = part
            continue
        values = each * delta.value_dim
        widths = {"qkvz": [delta.key_dim, delta.key_dim, values, values], "ba": [each, each]}
        for kinds, split in widths.items():
            whole = theirs[f"{own}.in_proj_{kinds}.weight"].unflatten(0, (groups, -1)).split(split, 1)
            found |= {f"{own}.in_proj_{kind}.weight": one.flatten(0, 1) for kind, one in zip(kinds, whole, strict=True)}
    return found


def test_logits_and_all_gradients_are_those_of_transformers(oracle: PreTrainedModel, files: Path) -> None:
    model = load_model(files, torch.float32, "cpu")
    assert model.shape.num_parameters == sum(one.numel() for one in oracle.state_dict().values()) - (
        model.head_weight_V_D.numel() if model.shape.tie_embeddings else 0
    )
    assert model.shape.weights() == {name: tuple(one.shape) for name, one in model.state_dict().items()}
    direction = torch.randn(LENGTH, 131, generator=torch.Generator().manual_seed(3))
    ours, theirs = logits(model), oracle(tokens()[None]).logits[0]
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm() and theirs.abs().max() > 1
    oracle.zero_grad()
    ours.backward(direction)
    theirs.backward(direction)
    gradients = as_here(model, {name: one.grad for name, one in oracle.named_parameters()})
    weights = as_here(model, dict(oracle.named_parameters()))
    exact = load_model(files, torch.float32, "cpu").double()
    logits(exact).backward(direction.double())
    for (name, parameter), wide in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(parameter, weights[name]), name
        assert parameter.grad is not None and wide.grad is not None, name
        own, other = ((one - wide.grad).norm() / wide.grad.norm() for one in (parameter.grad, gradients[name]))
        assert other <= 3e-4, name  # what float32 leaves of fast decays
        assert own <= max(3e-5, 2 * other), name


@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float32], 1))
def test_transformers_reads_what_is_written(oracle: PreTrainedModel, files: Path, tmp_path: Path, dtype) -> None:
    save_model(load_model(files, dtype, "cpu"), tmp_path / "ours", None)
    written = load_file(tmp_path / "ours/model.safetensors")
    theirs = {name for path in files.glob("*.safetensors") for name in load_file(path)}
    assert {*written} == theirs - ({"lm_head.weight"} if oracle.config.tie_word_embeddings else set())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto", attn_implementation="sdpa")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor.to(dtype), oracle.state_dict()[name].to(dtype)), name
    assert load_shape(tmp_path / "ours") == load_shape(files)


def test_a_rank_reads_its_heads(files: Path) -> None:
    model, weights = open_model(files)
    whole, delta = load_model(files, torch.float32, "cpu").state_dict(), model.shape.delta
    assert delta is not None
    for kind in ("in_proj_q", "in_proj_v", "in_proj_a", "conv_k", "conv_v", "out_proj"):
        name = f"model.layers.{delta.layers[-1]}.linear_attn.{kind}.weight"
        rows, columns = whole[name].shape
        box = Box((rows // 3, 1), (rows, columns - 1))
        assert torch.equal(weights.read(name, box), whole[name][rows // 3 :, 1:-1]), name


def nested(files: Path, to: Path) -> None:
    """The same decoder as published: inside of a model that also reads images, with joined experts."""
    config = json.loads((files / "config.json").read_text())
    tensors = {name: one for path in files.glob("*.safetensors") for name, one in load_file(path).items()}
    outer = config["model_type"].removesuffix("_text")
    kind = "Qwen3_5MoeForConditionalGeneration" if "moe" in outer else "Qwen3_5ForConditionalGeneration"
    layers = config["num_hidden_layers"] if "moe" in outer else 0
    for owner in (f"model.layers.{layer}.mlp.experts" for layer in range(layers)):
        each = [[tensors.pop(f"{owner}.{e}.{p}_proj.weight") for e in range(8)] for p in ("gate", "up", "down")]
        gate, up, down = map(torch.stack, each)
        tensors |= {f"{owner}.gate_up_proj": torch.cat((gate, up), 1), f"{owner}.down_proj": down}
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: one
        for name, one in tensors.items()
    }
    others = {"mtp.fc.weight": torch.ones(2), "model.visual.blocks.0.norm1.weight": torch.ones(2)}
    to.mkdir()
    save_file(renamed | others, to / "model.safetensors")
    around = {"model_type": outer, "architectures": [kind], "vision_config": {"depth": 2}, "image_token_id": 7}
    more = {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    more["rope_parameters"] = config["rope_parameters"] | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    tied = config["tie_word_embeddings"]
    inner = {key: one for key, one in config.items() if key != "architectures"} | more
    (to / "config.json").write_text(json.dumps(around | {"tie_word_embeddings": tied, "text_config": inner}))


def test_the_text_part_of_a_model_with_images_is_loaded(oracle: PreTrainedModel, files: Path, tmp_path: Path) -> None:
    if oracle.config.model_type == "qwen3_next":
        pytest.skip("it has no encoder")
    nested(files, tmp_path / "nested")
    ours, theirs = (load_model(folder, torch.float32, "cpu") for folder in (tmp_path / "nested", files))
    assert ours.shape == theirs.shape
    own, expected = ours.state_dict(), theirs.state_dict()
    assert own.keys() == expected.keys() and all(torch.equal(own[name], one) for name, one in expected.items())
    save_model(ours, tmp_path / "written", None)
    assert load_shape(tmp_path / "written") == theirs.shape


DELTA_SHAPE = DeltaShape(layers=(0,), num_key_heads=2, num_value_heads=6, key_dim=5, value_dim=7, conv_width=4)


def inputs(num_tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Mixed channels, convolution, log decays of which some are fast, and strengths, float64."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_tokens, DELTA_SHAPE.mixed_size, generator=generator, dtype=torch.float64)
    conv = torch.randn(DELTA_SHAPE.mixed_size, 4, generator=generator, dtype=torch.float64)
    decay = -torch.rand(num_tokens, 6, generator=generator, dtype=torch.float64).pow(8) * 20
    return mixed, conv, decay, torch.rand(num_tokens, 6, generator=generator, dtype=torch.float64)


def one_by_one(given: tuple[Tensor, ...], shape: DeltaShape = DELTA_SHAPE) -> Tensor:
    """One sequence by the recurrent form, token by token."""
    mixed, conv, decay, strength = given
    width = shape.conv_width
    windows = torch.nn.functional.pad(mixed, (0, 0, width - 1, 0)).unfold(0, width, 1)
    q, k, v = heads(convolved(windows.unbind(-1), conv), shape)
    state = mixed.new_zeros(1, shape.num_value_heads, shape.key_dim, shape.value_dim)
    outputs = list[Tensor]()
    for t in range(len(mixed)):
        now = slice(t, t + 1)
        output, state = step(q[now], k[now], v[now], decay[now], strength[now], state)
        outputs.append(output)
    return torch.cat(outputs)


@pytest.mark.parametrize("most", [16, 64])
@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 65, 200])
def test_the_chunked_form_is_the_recurrent_form(length: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all gradients, in float64; in chunks as on CPUs and as on GPUs."""
    monkeypatch.setattr(DeltaShape, "chunk_tokens", lambda *_: most)
    results = list[list[Tensor]]()
    direction = torch.randn(length, 6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    packed = Packed(lambda: Branches([0], [length], [ROOT]), length, torch.device("cpu"))
    for compute in (one_by_one, lambda given: packed(0, DELTA_SHAPE, *given)):
        given = tuple(one.requires_grad_() for one in inputs(length))
        output = compute(given)
        results.append([output.detach(), *torch.autograd.grad(output, given, direction)])
    for ours, theirs in zip(*results, strict=True):
        assert theirs.abs().max() > 0 or length == 1
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11 * theirs.abs().max().item())


@pytest.mark.parametrize(
    ("shared", "prompts", "responses"),
    [
        (0, [70, 1, 3], [(5, 66, 1), (), (2, 0, 4)]),
        (0, [6, 3], [(0,), (0, 0)]),
        (0, [0, 4], [(3, 80), (130,)]),
        (20, [2, 0, 66], [(7, 1), (3,), (65, 2)]),
    ],
    ids=str,
)
def test_states_reset_at_borders_and_fork_behind_prompts(
    shared: int, prompts: list[int], responses: list[tuple[int, ...]]
) -> None:
    """Each sequence of a microbatch alone, against all of them packed, with gradients, in float64."""
    starts, sequences = shared, list[list[int]]()
    for prompt, of_group in zip(prompts, responses, strict=True):
        beginning = [*range(shared), *range(starts, starts + prompt)]
        starts += prompt
        sequences += [beginning] * (not of_group)
        for length in of_group:
            sequences.append([*beginning, *range(starts, starts + length)])
            starts += length
    attend = packed_attend(prompts, responses, shared=shared)
    results, num_tokens = list[list[Tensor]](), starts
    direction = torch.randn(num_tokens, 6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def alone(given: tuple[Tensor, ...]) -> Tensor:
        mixed, conv, decay, strength = given
        outputs = [mixed.new_zeros(6, 7)] * num_tokens
        for sequence in sequences:
            found = one_by_one((mixed[sequence], conv, decay[sequence], strength[sequence]))
            for place, token in enumerate(sequence):
                outputs[token] = found[place]
        return torch.stack(outputs)

    for compute in (alone, lambda given: attend.recur(0, DELTA_SHAPE, *given)):
        given = tuple(one.requires_grad_() for one in inputs(num_tokens))
        output = compute(given)
        results.append([output.detach(), *torch.autograd.grad(output, given, direction)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11 * theirs.abs().max().item())


def test_the_trainer_can_compute_in_the_form_of_generators() -> None:
    """A prompt with two responses, one of them in its last chunk, in float64 and by the C++ kernel."""
    branches = Branches.of_groups([20, 0], [(70, 0), (3,)])
    given = inputs(93)
    chunked = Packed(lambda: branches, 93, torch.device("cpu"))(0, DELTA_SHAPE, *given)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        own = [one.to(dtype).requires_grad_() for one in given]
        recurrent = RecurrentForm(lambda: branches.levels)(0, DELTA_SHAPE, *own)
        assert recurrent.dtype == dtype and not recurrent.requires_grad
        assert (recurrent - chunked).abs().max() <= tolerance * chunked.abs().max()


def test_padding_and_empty_batches_are_computed() -> None:
    attend = packed_attend([4], [()])
    mixed, conv, decay, strength = inputs(4)
    assert attend.recur(0, DELTA_SHAPE, mixed, conv, decay, strength).shape == (4, 6, 7)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["full_attention"]}, r"`layer_types` = \['full_attention'\]; a list with one entry"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"`layer_types` = \['sliding_attention'\]"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3 is no multiple of linear_num_key_heads = 2"),
        ({"attn_output_gate": False}, "`attn_output_gate` = False; only True is supported"),
        ({"attention_bias": True}, "`attention_bias` = True; only False is supported"),
        ({"linear_key_head_dim": 0}, "`linear_key_head_dim` = 0; a whole number"),
        ({"output_gate_type": "swish"}, "`output_gate_type` = 'swish'; no such key is known"),
    ],
)
def test_other_hybrids_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    kinds = ["linear_attention", "full_attention"]
    sizes = SIZES | DELTA | {"model_type": "qwen3_5_text", "head_dim": 16, "layer_types": kinds}
    ModelShape.from_hf(sizes)
    with pytest.raises(ConfigError, match=named):
        ModelShape.from_hf(sizes | change)


def test_a_text_part_of_another_family_is_refused() -> None:
    text = SIZES | DELTA | {"model_type": "qwen3_text"}
    with pytest.raises(ConfigError, match=r"`text_config.model_type` = 'qwen3_text'; the text part of qwen3_5 is"):
        ModelShape.from_hf({"model_type": "qwen3_5", "text_config": text})
    with pytest.raises(ConfigError, match="`text_config` is missing"):
        ModelShape.from_hf({"model_type": "qwen3_5"})
    with pytest.raises(ConfigError, match=r"`audio_config` = \{\}; qwen3_5 has no such key"):
        ModelShape.from_hf({"model_type": "qwen3_5", "text_config": text, "audio_config": {}})


def test_a_config_is_written_as_it_was_read() -> None:
    for case, sizes in CASES.items():
        family = next(one for one in ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text") if case.startswith(one))
        shape = ModelShape.from_hf(SIZES | {"num_hidden_layers": 4, "model_type": family} | sizes)
        assert ModelShape.from_hf(shape.to_hf()) == shape
        assert replace(shape, delta=None).state_bytes == 0 < shape.state_bytes
