"""The sum of `models/memory.py` against what the pretended GPU counts, at full size."""

from __future__ import annotations

from typing import Any

import pytest

from llamarl.config import RunConfig
from llamarl.models.shape import MoeShape
from tests.gpu import memories
from tests.gpu.conftest import Run
from tests.gpu.memories import Counted
from tests.nightly import NIGHTLY, also, nightly

SHORT = "1B, 5 layers"
STATE, STEP = ("weights", "gradients", "moments"), ("copies", "activations", "head")


def _check(found: Counted, tolerance: float = 0.05) -> None:
    state, step = (sum(found.parts[kind] for kind in kinds) for kinds in (STATE, STEP))
    assert state == pytest.approx(found.held, rel=0.01)
    assert step == pytest.approx(found.peak, rel=tolerance)


@nightly("large models without memory; models/test_memory.py and models/test_fit.py add up what they need")
@pytest.mark.parametrize(
    ("model", "num_groups", "lora_rank", "recompute"),
    [
        (SHORT, 4, 16, True), (SHORT, 2, 0, "selective"),
        *also((SHORT, 1, 0, False),
              ("1B", 1, 0, False), ("1B", 4, 16, True), ("1B", 1, 0, True), ("1B", 4, 0, True), ("1B", 4, 16, False),
              ("8B", 4, 0, True), ("8B", 2, 0, False),
              ("8B", 2, 16, True), ("qwen3 8B", 2, 0, False), ("8B", 2, 0, "selective"), ("1B", 4, 16, "selective")),
    ],
)  # fmt: skip
def test_a_trainer(on_gpu: Run, model: str, num_groups: int, lora_rank: int, recompute: Any) -> None:
    """State and what a step takes beside it; within 5 % each."""
    settings = {"dtype": "bfloat16", "lora_rank": lora_rank, "activation_checkpointing": recompute}
    _check(on_gpu(memories.trained, model, num_groups, settings))


@nightly("large models without memory; models/test_memory.py and models/test_fit.py add up what they need")
@pytest.mark.parametrize(("recompute", "most"), [("selective", 140), *also((True, 180), (False, 135))])
def test_launches_of_a_layer_in_training(on_gpu: Run, recompute: Any, most: int) -> None:
    """Of 8B; 282 without llamarl's kernels. Besides the layers, eight tiles of the head take most: 62 took 1,700."""
    of_layer, rest = on_gpu(memories.launches, {"activation_checkpointing": recompute})
    assert 50 < of_layer <= most
    assert rest <= 400


@nightly("parts of weights are counted by FSDP's below")
@pytest.mark.parametrize("model", ["1B", *also("8B")])
def test_a_tensor_parallel_rank(on_gpu: Run, model: str) -> None:
    _check(on_gpu(memories.trained, model, 2, {"dtype": "bfloat16"}, 4))


LIGHT = {"dtype": "bfloat16", "weights": "bfloat16", "moments": "8bit"}


@nightly("shards of one are counted below")
@pytest.mark.parametrize(
    ("model", "recompute"), [(SHORT, True), *also(("1B", True), ("1B", False), ("8B", True), ("qwen3 8B", True))]
)
def test_a_light_trainer(on_gpu: Run, model: str, recompute: bool) -> None:
    """Six bytes a weight."""
    found = on_gpu(memories.trained, model, 2, LIGHT | {"activation_checkpointing": recompute})
    _check(found)
    assert found.parts["gradients"] == found.parts["weights"] < found.parts["moments"]


@nightly("experts are counted by test_what_fsdp_gathers_of_a_mixture")
@pytest.mark.parametrize(
    ("model", "num_groups", "recompute"),
    [("1B with experts", 2, True), *also(("3B with experts", 2, True), ("3B with experts", 1, False))],
)
def test_a_mixture(on_gpu: Run, model: str, num_groups: int, recompute: bool) -> None:
    settings = LIGHT | {"activation_checkpointing": recompute}
    _check(on_gpu(memories.trained, model, num_groups, settings))


@nightly("large models without memory; models/test_memory.py and models/test_fit.py add up what they need")
def test_a_float32_trainer_has_no_second_copy(on_gpu: Run) -> None:
    """16 bytes a weight; attention, which has no kernel on the pretended device, is not compared."""
    found = on_gpu(memories.trained, SHORT, 1, {"dtype": "float32"})
    assert found.parts["copies"] == 0
    assert sum(found.parts[kind] for kind in STATE) == pytest.approx(found.held, rel=0.01)


@pytest.mark.parametrize("model", [SHORT, *also("1B", "8B")])
def test_a_generator(on_gpu: Run, model: str) -> None:
    found = on_gpu(memories.generating, model, 64, 4096)
    assert found.parts["weights"] + found.parts["keys and values"] == pytest.approx(found.held, rel=0.01)


CUT = [{"dtype": "bfloat16"}, LIGHT, {}, {"dtype": "bfloat16", "activation_checkpointing": True}]
VOCABULARIES = [(True, 4096), (False, 32_768), (False, 4096), (True, 32_768)]


@nightly("large models without memory; models/test_memory.py and models/test_fit.py add up what they need")
@pytest.mark.parametrize(
    ("config", "tied", "vocab_size"),
    [(config, *vocabulary) for config in CUT for vocabulary in VOCABULARIES] if NIGHTLY
    else [(LIGHT, False, 32_768)],
)  # fmt: skip
def test_what_fsdp_gathers(elsewhere: Run, config: dict[str, Any], tied: bool, vocab_size: int) -> None:
    """Within a fifth: weights gathered and gradients sent, of few tokens; of a large vocabulary the most at the end."""
    found = elsewhere(memories.sharded, 4, config, tied, vocab_size)
    assert sum(found.parts[kind] for kind in STATE) == pytest.approx(found.held, rel=0.01)
    assert 0.97 < sum(found.parts[kind] for kind in STEP) / found.peak < 1.2


@nightly("large models without memory; models/test_memory.py and models/test_fit.py add up what they need")
@pytest.mark.parametrize(
    ("num_experts", "ep", "config"),
    [(16, 4, LIGHT), *also((6, 1, CUT[0])),
     *also((16, 1, LIGHT), (16, 1, CUT[0]), (6, 1, LIGHT), (16, 2, CUT[0]), (16, 2, LIGHT), (16, 4, CUT[0]))],
)  # fmt: skip
def test_what_fsdp_gathers_of_a_mixture(elsewhere: Run, config: dict[str, Any], num_experts: int, ep: int) -> None:
    """Experts are cut by number; of six, the first of four ranks has two. Where ranks share them, each gathers less;
    then the sum is within a quarter."""
    moe = MoeShape(num_experts=num_experts, experts_per_token=2, expert_size=256, sparse_layers=tuple(range(8)))
    found = elsewhere(memories.sharded, 4, config, False, 4096, moe, ep)
    assert sum(found.parts[kind] for kind in STATE) == pytest.approx(found.held, rel=0.01)
    assert 0.97 < sum(found.parts[kind] for kind in STEP) / found.peak < (1.2 if ep == 1 else 1.25)


ONE_CARD = {
    "model": {"path": "m"}, "data": {"train": "running_total", "max_prompt_tokens": 512},
    "rollout": {"max_staleness": 0, "window": 1, "max_new_tokens": 512, "group_size": 7, "prompts_per_step": 32},
    "trainer": LIGHT | {"device": "cuda:0", "activation_checkpointing": True, "microbatch_tokens": 4096},
    "generator": {"dtype": "bfloat16", "device": "cuda:0", "max_running": 32, "kv_cache_bytes": 1 << 32},
    "cluster": {"placement": "colocated"},
}  # fmt: skip


@nightly("what sleeps is in tests/generation")
@pytest.mark.parametrize("model", [SHORT, *also("1B", "8B", "qwen3 8B")])
def test_in_turns(on_gpu: Run, model: str) -> None:
    """A sleeping generator holds nothing, and one that is awake no weights of its own beside a resting trainer."""
    found = on_gpu(memories.in_turns, memories.SHAPES[model], RunConfig.model_validate(ONE_CARD))
    assert found.asleep == 0
    assert sum(found.of_training.values()) == pytest.approx(found.training, rel=0.05)
    assert sum(found.of_generating.values()) == pytest.approx(found.generating, rel=0.02)
    assert found.of_generating["keys and values"] == 1 << 32
