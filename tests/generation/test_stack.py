"""Dense layers in one call: bit for bit what their kernels give one by one, in whole engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.generation.attention import KernelAttention, KVCache
from llamarl.generation.model import GeneratorModel
from llamarl.generation.rows import Rows
from llamarl.kernels import linear, stack
from llamarl.kernels.stack import LayerStack
from llamarl.types import GenerationRequest, Rollout, SamplingParams
from tests.generation.native import make_engine, run
from tests.generation.references import by_key
from tests.generation.test_model import PRECISIONS, SHAPE, SHAPES, loaded, trainer
from tests.nightly import crossed, some

MORE = {"partial_rotary": replace(SHAPE, partial_rotary_factor=0.5), "one_layer": replace(SHAPE, num_layers=1)}
STACKED = {name: SHAPES[name] for name in ("llama", "qwen2", "qwen3_tied", "mistral_yarn")} | MORE


def requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(1)
    return [
        GenerationRequest(
            group_id=number, prompt_token_ids_T=rng.integers(0, 130, size).astype(np.int32), group_size=3,
            sampling=SamplingParams(max_new_tokens=20, seed=3),
        )
        for number, size in enumerate((1, 40, 17, 33))
    ]  # fmt: skip


def drawn(generator: GeneratorModel, **options: Any) -> dict[Any, tuple[bytes, bytes]]:
    """Tokens and log-probabilities of rollouts that share prompts, join late and are prefilled in chunks."""
    return bits(run(make_engine(generator, max_running=5, prefill_tokens=24, **options), requests()))  # type: ignore[arg-type]


def bits(rollouts: dict[Any, Rollout]) -> dict[Any, tuple[bytes, bytes]]:
    return {key: (one.token_ids_T.tobytes(), one.behavior_logprobs_T.tobytes()) for key, one in rollouts.items()}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call."""
    rows, call = list[int](), LayerStack.__call__

    def counting(self: LayerStack, x_N_D: torch.Tensor, *rest: Any) -> None:
        rows.append(len(x_N_D))
        call(self, x_N_D, *rest)

    monkeypatch.setattr(LayerStack, "__call__", counting)
    return rows


@pytest.mark.parametrize(("name", "precision"), some(crossed(STACKED, PRECISIONS), 3))
def test_bits_are_those_of_kernels_one_by_one(
    monkeypatch: pytest.MonkeyPatch, computed_by: str, name: str, precision: str
) -> None:
    generator, rows = loaded(trainer(STACKED[name]), precision), counted(monkeypatch)
    in_one = drawn(generator)
    if computed_by == "torch" or stack.kernel().library is None:
        assert generator._network.stack is None and not rows
        return
    assert len(rows) > 20 and max(rows) > 24, "decode steps, and prompts beside them"
    del rows[:]
    generator._network.stack = None
    assert drawn(generator) == in_one
    assert not rows


def test_what_it_keeps_is_where_kernels_one_by_one_look_for_it() -> None:
    """Keys and values of each layer have their place in the cache, whoever computes a step."""
    generator = loaded(trainer(SHAPE), "float32")
    if (in_one := generator._network.stack) is None:
        pytest.skip(stack.kernel().reason)
    expected, started = drawn(generator), make_engine(generator, max_running=5, prefill_tokens=24)  # type: ignore[arg-type]
    started.submit(requests())
    found, number = list[Rollout](), 0
    while started.has_work:
        generator._network.stack = in_one if number % 3 else None
        found, number = [*found, *started.step()], number + 1
    assert bits(by_key(found)) == expected


def test_weights_that_change_in_place_are_packed_again() -> None:
    generator = loaded(trainer(SHAPE), "float32")
    if generator._network.stack is None:
        pytest.skip(stack.kernel().reason)
    before = drawn(generator)
    with torch.no_grad():
        for name, tensor in generator._used.items():
            if name.endswith("_proj.weight"):
                tensor.mul_(0.5)
    after = drawn(generator)
    assert after != before
    generator._network.stack = None
    assert drawn(generator) == after


def test_new_weights_have_a_stack_of_their_own() -> None:
    generator = loaded(trainer(SHAPE), "bfloat16")
    if generator._network.stack is None:
        pytest.skip(stack.kernel().reason)
    first = drawn(generator)
    for seed in (1, 0):
        generator.load(trainer(SHAPE, seed))
        assert (drawn(generator) == first) == (seed == 0)


def test_who_asks_for_exact_products_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, rows = loaded(trainer(SHAPE), "bfloat16"), counted(monkeypatch)
    with linear.exactly():
        drawn(generator)
    assert not rows


def test_layers_of_one_rank_of_several_go_one_by_one() -> None:
    class Two:
        size, rank = 2, 0

    half = GeneratorModel(SHAPE, "float32", "cpu", Two())  # type: ignore[arg-type]
    half.use(half.spare())
    assert half._network.stack is None


def test_shapes_that_do_not_fit_are_refused() -> None:
    generator = loaded(trainer(SHAPE), "float32")
    if generator._network.stack is None:
        pytest.skip(stack.kernel().reason)
    layers = [(layer.norms(), tuple(layer.linears())) for layer in generator._network.layers]
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rotary_dim": 16, "eps": 1e-6}
    LayerStack(layers, **sizes)
    for wrong in ({"num_heads": 2}, {"num_kv_heads": 4}, {"head_dim": 8}):
        with pytest.raises(AssertionError):
            LayerStack(layers, **sizes | wrong)
    norms, (qkv, _, gate_up, down) = layers[0]
    with pytest.raises(AssertionError):
        LayerStack([(norms, (qkv, down, gate_up, down))], **sizes)
    with pytest.raises(AssertionError):
        LayerStack([((norms[1], norms[0], *norms[2:]), layers[0][1])], **sizes)  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [{"num_layers": 3}, {"num_kv_heads": 4}, {"head_dim": 32}])
def test_a_cache_of_another_model_is_refused(wrong: dict[str, int]) -> None:
    """C++ would write beside it, or read what is of other tokens."""
    generator = loaded(trainer(SHAPE), "float32")
    if generator._network.stack is None:
        pytest.skip(stack.kernel().reason)
    sizes: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16} | wrong
    cache = KVCache(**sizes, num_blocks=2, dtype=torch.float32, device=torch.device("cpu"))
    attend = KernelAttention(cache, Rows(1, 1), [], np.zeros(0, np.int64), np.zeros(0, np.int64))
    with pytest.raises(AssertionError):
        generator(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), attend)
