"""Mixtures of experts: transformers decides what is right, of files, outputs and gradients; a plain loop in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from llamarl.config import ConfigError
from llamarl.models import folder as folder_module
from llamarl.models.attention import causal_attend
from llamarl.models.experts import Experts, MoeFeedForward
from llamarl.models.hf import load_model, new_model, open_model, save_model
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.models.transformer import FeedForward, Transformer
from llamarl.sharding.box import Box
from tests.generation.mixtures import MIXTURES, mixture
from tests.models.conftest import SIZES, YARN_ROPE

GLM4: dict[str, Any] = {
    "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "attention_bias": True, "head_dim": 16,
}  # fmt: skip
QWEN3: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3 | {"norm_topk_prob": True, "head_dim": 24},
    "qwen3_moe_dense_between": QWEN3 | {"mlp_only_layers": [1], "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "glm4_moe": GLM4,
    "glm4_moe_yarn": GLM4 | {"use_qk_norm": True, "norm_topk_prob": False, "rope_parameters": YARN_ROPE},
}
LENGTH = 150


@pytest.fixture(scope="module", params=CASES)
def oracle(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model whose every tensor is random, biases and norms included, so that none can be forgotten unseen."""
    family = request.param if request.param == "mixtral" else "_".join(request.param.split("_")[:2])
    config = transformers.AutoConfig.for_model(family, **SIZES | {"num_hidden_layers": 3} | CASES[request.param])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            spread = 0.5 if ".mlp.gate." in name else 0.1
            noise = torch.empty_like(tensor).normal_(0.0, spread, generator=generator)
            tensor.copy_(noise if tensor.ndim > 1 else tensor + noise)
    return model


@pytest.fixture(scope="module")
def files(oracle: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers writes them: a matrix for each expert, in several files."""
    folder = tmp_path_factory.mktemp("theirs")
    oracle.save_pretrained(folder, max_shard_size="200KB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def tokens() -> Tensor:
    return torch.randint(0, 131, (LENGTH,), generator=torch.Generator().manual_seed(2))


def logits(model: Transformer) -> Tensor:
    return model.logits(model(tokens(), torch.arange(LENGTH), causal_attend([LENGTH])))


def stacked(name: str, gradients: dict[str, Tensor]) -> Tensor:
    """A gradient of transformers, which keeps gate and up of an expert in one matrix."""
    if not name.endswith(("experts.gate_proj", "experts.up_proj")):
        return gradients[name]
    owner, _, kind = name.rpartition(".")
    return gradients[f"{owner}.gate_up_proj"].chunk(2, 1)[kind == "up_proj"]


def test_logits_and_all_gradients_are_those_of_transformers(oracle: PreTrainedModel, files: Path) -> None:
    model = load_model(files, torch.float32, "cpu")
    assert model.shape.num_parameters == sum(one.numel() for one in model.state_dict().values())
    direction = torch.randn(LENGTH, 131, generator=torch.Generator().manual_seed(3))
    ours, theirs = logits(model), oracle(tokens()[None]).logits[0]
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max() and theirs.abs().max() > 1
    oracle.zero_grad()
    ours.backward(direction)
    theirs.backward(direction)
    gradients = {name: one.grad for name, one in oracle.named_parameters()}
    own = dict(model.named_parameters())
    assert {name.replace("gate_proj", "gate_up_proj") if ".experts.gate" in name else name for name in own} >= {
        *gradients
    }
    for name, parameter in own.items():
        expected = stacked(name, gradients)
        assert parameter.grad is not None and expected.norm() > 0
        assert (parameter.grad - expected).norm() <= 1e-5 * expected.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_what_is_written(oracle: PreTrainedModel, files: Path, tmp_path: Path, dtype) -> None:
    model = load_model(files, dtype, "cpu")
    routers = {name: one.dtype for name, one in model.state_dict().items() if ".mlp.gate." in name}
    assert set(routers.values()) == {torch.float32}
    save_model(model, tmp_path / "ours", None)
    written = load_file(tmp_path / "ours/model.safetensors")
    theirs = {name for path in files.glob("*.safetensors") for name in load_file(path)}
    assert {*written} == theirs - ({"lm_head.weight"} if model.shape.tie_embeddings else set())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto", attn_implementation="sdpa")
    assert loaded.dtype == dtype
    for name, tensor in loaded.state_dict().items():
        wanted = oracle.state_dict()[name].to(dtype)
        assert torch.equal(tensor.to(dtype), wanted), name
    assert folder_module.load_shape(tmp_path / "ours") == folder_module.load_shape(files)


def test_a_rank_reads_the_bytes_of_its_experts_alone(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = open_model(files)
    whole, read = load_model(files, torch.float32, "cpu").state_dict(), list[str]()

    class Recorded:
        def __init__(self, path: Path) -> None:
            self._file = safe_open(path, framework="pt")

        def __enter__(self) -> Recorded:
            return self

        def __exit__(self, *_: object) -> None: ...

        def get_slice(self, name: str) -> Any:
            read.append(name)
            return self._file.get_slice(name)

    monkeypatch.setattr("llamarl.models.hf.opened", Recorded)
    assert model.shape.moe is not None
    layer = model.shape.moe.sparse_layers[-1]
    name = f"model.layers.{layer}.mlp.experts.down_proj"
    box = Box((2, 8, 4), (5, 40, 20))
    assert torch.equal(weights.read(name, box), whole[name][2:5, 8:40, 4:20])
    assert [one.split("experts.")[1].partition(".")[0] for one in read] == ["2", "3", "4"]


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = mixture("glm4_moe")
    save_model(model, tmp_path / "model", None)
    tensors = load_file(tmp_path / "model/model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model/model.safetensors")
    loaded = load_model(tmp_path / "model", torch.float32, "cpu").state_dict()
    assert all(torch.equal(one, loaded[name]) for name, one in model.state_dict().items())
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model/model.safetensors")
    with pytest.raises(ConfigError, match=r"unknown tensor `model\.layers\.2\.eh_proj"):
        open_model(tmp_path / "model")


@pytest.mark.parametrize("name", MIXTURES)
def test_missing_experts_are_named(tmp_path: Path, name: str) -> None:
    save_model(mixture(name), tmp_path / "model", None)
    tensors = load_file(tmp_path / "model/model.safetensors")
    lost = next(one for one in tensors if ".experts.7." in one)
    del tensors[lost]
    save_file(tensors, tmp_path / "model/model.safetensors")
    with pytest.raises(ConfigError, match=f"1 tensors are missing, first `{lost}`"):
        open_model(tmp_path / "model")


def reference(block: MoeFeedForward, x_N_D: Tensor) -> Tensor:
    """A token at a time, by the formulas (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), in the type of `x`."""
    moe, found = block.gate.moe, list[Tensor]()
    for x_D in x_N_D:
        logits_E = block.gate.weight.to(x_D.dtype) @ x_D
        scores_E = logits_E.sigmoid() if moe.scoring == "sigmoid" else logits_E.softmax(0)
        bias_E = block.gate.e_score_correction_bias
        biased = (scores_E.detach() if bias_E is None else scores_E.detach() + bias_E).tolist()
        size = moe.num_experts // moe.num_groups
        groups = [range(first, first + size) for first in range(0, moe.num_experts, size)]
        groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
        allowed = [e for group in groups[: moe.groups_per_token] for e in group]
        chosen = sorted(allowed, key=lambda e: (-biased[e], e))[: moe.experts_per_token]
        total = sum(scores_E[e] for e in chosen) if moe.normalized else 1.0
        y_D = torch.zeros_like(x_D)
        for e in chosen:
            gate, up, down = (
                stack[e].to(x_D.dtype)
                for stack in (block.experts.gate_proj, block.experts.up_proj, block.experts.down_proj)
            )
            y_D = y_D + scores_E[e] / total * moe.scaling * (down @ (F.silu(gate @ x_D) * (up @ x_D)))
        found.append(y_D if block.shared_experts is None else y_D + block.shared_experts(x_D))
    return torch.stack(found)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_loop_over_tokens_in_float64_agrees(name: str) -> None:
    model = mixture(name).double()
    block = model.model.layers[2].mlp
    assert isinstance(block, MoeFeedForward) and block.gate.weight.dtype == torch.float64
    x = torch.randn(40, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    direction, results = torch.randn_like(x), list[tuple[Tensor, ...]]()
    for compute in (block, lambda x: reference(block, x)):
        given = x.clone().requires_grad_()
        output = compute(given)
        results.append((output, *torch.autograd.grad(output, [given, *block.parameters()], direction)))
    for ours, theirs in zip(*([one.detach() for one in each] for each in results), strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11 * theirs.abs().max().item())


COUNTS = {"ragged": [5, 0, 1, 9, 0, 3], "all to one": [0, 0, 18, 0, 0, 0], "none": [0] * 6}


def segments(dtype: torch.dtype, counts: list[int], width: int = 8, *, one_by_one: bool = False) -> list[Tensor]:
    """Output, and gradients of rows and stacks, of the same numbers whatever their type."""
    moe = MoeShape(num_experts=6, experts_per_token=2, expert_size=width, sparse_layers=(0,))
    experts, generator = Experts(replace(MIXTURES["mixtral"], hidden_size=16), moe), torch.Generator().manual_seed(0)
    for weight in experts.parameters():
        weight.data = torch.randn(weight.shape, generator=generator).to(dtype)
    x = torch.randn(sum(counts), 16, generator=generator).to(dtype).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        if one_by_one:
            patch.setattr("llamarl.models.experts._is_grouped", lambda _: False)
        y = experts.segments(x, torch.tensor(counts))
    y.backward(torch.ones(()).to(dtype).expand(y.shape))
    return [y.detach(), x.grad, *(weight.grad for weight in experts.parameters())]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_experts_at_once_give_what_one_after_the_other_does(dtype: torch.dtype, counts: list[int]) -> None:
    exact = segments(torch.float64, counts)
    for found in (segments(dtype, counts), segments(dtype, counts, one_by_one=True)):
        for ours, theirs in zip(found, exact, strict=True):
            assert ours.dtype == dtype and ours.shape == theirs.shape
            tolerance = (1e-5 if dtype == torch.float32 else 0.05) * theirs.abs().max().item() if ours.numel() else 0.0
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance)


def test_which_stacks_are_multiplied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 16 bytes or multiples, of the types that torch knows."""
    used, multiply = list[torch.dtype](), F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda x, *rest, **more: used.append(x.dtype) or multiply(x, *rest, **more))
    for dtype, width, is_used in (
        (torch.float32, 8, True), (torch.float32, 6, False), (torch.bfloat16, 8, True), (torch.bfloat16, 12, False),
        (torch.float64, 8, False),
    ):  # fmt: skip
        used.clear()
        segments(dtype, COUNTS["ragged"], width)
        assert set(used) == ({dtype} if is_used else set()), (dtype, width)


def test_under_autocast_experts_are_bfloat16_and_gradients_float32() -> None:
    model, x = mixture("qwen3_moe"), torch.randn(30, 64, generator=torch.Generator().manual_seed(0))
    block = model.model.layers[0].mlp
    with torch.autocast("cpu", torch.bfloat16):
        half = block(x)
    assert half.dtype == torch.bfloat16
    exact = block(x)
    assert 0 < (half - exact).norm() < 0.02 * exact.norm()
    half.float().sum().backward()
    assert all(one.grad.dtype == torch.float32 and one.grad.any() for one in block.parameters())


def test_a_router_stays_float32_whatever_the_model_becomes() -> None:
    model = mixture("glm4_moe").to(torch.bfloat16)
    routers = {name: one for name, one in model.state_dict().items() if ".mlp.gate." in name}
    exact = mixture("glm4_moe").state_dict()
    assert len(routers) == 4
    assert all(one.dtype == torch.float32 and torch.equal(one, exact[name]) for name, one in routers.items())
    assert model.model.layers[1].mlp.experts.gate_proj.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "`router_jitter_noise` = 0.1; only 0 is supported"),
        ("mixtral", {"sliding_window": 128}, "`sliding_window` = 128; only full attention is supported"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 128}, "`sliding_window` = 128; only full"),
        ("qwen3_moe", {"attention_bias": True}, "`attention_bias` = True; only False is supported"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "`norm_topk_prob` = 1; true or false is needed"),
        ("qwen3_moe", {"num_experts": None}, "`num_experts` is missing"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts of a token; it can choose among 8"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "without a layer that has experts; use the dense family"),
        ("qwen3_moe", {"mlp_only_layers": "1"}, "`mlp_only_layers` = '1'; a list of numbers of layers is needed"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` = 0.5; only 1 is supported"),
        ("qwen3_moe", {"num_experts": 100_000}, "200000 experts, 100000 in a layer; a model may have 131072"),
        ("glm4_moe", {"n_group": 3}, "2 of 3 groups of 8 experts; the groups must divide the experts"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "`first_k_dense_replace` = -1; a whole number from 0"),
        ("glm4_moe", {"partial_rotary_factor": 0.2}, "partial_rotary_factor = 0.2 of head_dim = 16 cannot be rotated"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "`routed_scaling_factor` = 0; a positive number is needed"),
        ("llama", {"num_experts": 4}, "`num_experts` = 4; only None is supported"),
        ("olmoe", {}, "'olmoe' is OLMoE: its norms over all heads together are not computed here; the nearest"),
        ("qwen3_vl_moe", {}, "is Qwen3-VL with experts: its image encoder is not computed here; the nearest"),
        ("deepseek_v3", {}, "is DeepSeek V3 or R1: its latent attention is not computed here"),
        ("gpt_oss", {}, "is gpt-oss: its attention sinks, clamped experts with biases and 4-bit weights are not"),
        ("jetmoe", {}, "`model_type` = 'jetmoe' is none of the families llama, mistral, qwen2, qwen3, qwen3_moe,"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(family: str, change: dict[str, Any], named: str) -> None:
    own = {"qwen3_moe": QWEN3, "mixtral": CASES["mixtral"], "glm4_moe": GLM4}.get(family, {})
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_hf({"model_type": family, **SIZES, **own, **change})
    assert named in str(caught.value)


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    for family, own in (("qwen3_moe", QWEN3), ("mixtral", CASES["mixtral"]), ("glm4_moe", GLM4)):
        config = {"model_type": family, **SIZES, **own}
        theirs = transformers.AutoConfig.for_model(**config)
        assert ModelShape.from_hf(config) == ModelShape.from_hf(theirs.to_dict())
    assert not ModelShape.from_hf({"model_type": "qwen3_moe", **SIZES, **QWEN3}).moe.normalized
    every_other = ModelShape.from_hf({"model_type": "qwen3_moe", **SIZES, **QWEN3, "decoder_sparse_step": 2})
    assert every_other.moe.sparse_layers == (1,)


@pytest.mark.parametrize("name", MIXTURES)
def test_shapes_survive_a_config(name: str) -> None:
    shape = replace(MIXTURES[name], stop_token_ids=(2,), rope_theta=5e5)
    assert ModelShape.from_hf(shape.to_hf()) == shape
    theirs = transformers.AutoConfig.for_model(**shape.to_hf())
    assert ModelShape.from_hf(theirs.to_dict()) == shape


def test_a_new_mixture_repeats_by_seed_and_its_biases_are_zero() -> None:
    first, again = (new_model(MIXTURES["glm4_moe"], 3, 0.1) for _ in range(2))
    assert all(torch.equal(one, again.state_dict()[name]) for name, one in first.state_dict().items())
    layer = first.model.layers[1]
    assert layer.mlp.experts.gate_proj.std().item() == pytest.approx(0.1, rel=0.05)
    assert not layer.mlp.gate.e_score_correction_bias.any() and isinstance(first.model.layers[0].mlp, FeedForward)
