"""Decoding and scoring on a pretended GPU: what they compute, and how often the host waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import engines, rounding
from tests.gpu.conftest import Run
from tests.gpu.engines import Generated
from tests.nightly import also, nightly

GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0}
TRUNCATED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
APART = 1e-4
"""Of log-probs that the same weights say while decoding and while scoring; sums are in float32."""


@nightly("a pretended GPU beside the CPU, for each claim; by day each kernel is beside torch in parts/cuda")
@pytest.mark.parametrize(
    ("family", "precision"),
    [("qwen3", "bfloat16"), *also(("qwen2", "int8"), ("llama", "float32"), ("llama", "fp8"))],
)
def test_graphs_and_eager_steps_draw_alike(on_gpu: Run, family: str, precision: str) -> None:
    eager, graphed = (on_gpu(engines.generate, family, precision, graphs, SAMPLED) for graphs in (False, True))
    assert eager.tokens == graphed.tokens and len(eager.tokens) == 6
    for one in (eager, graphed):
        assert one.finite and one.apart < APART
        assert sum(one.scoring.syncs.values()) == 1
    check_waits(eager, graphed, 1)
    # The graph and its inputs; and zeros into new blocks, which have to be named.
    assert max(step.kernels for step in graphed.steps[1:]) <= 6 < min(step.kernels for step in eager.steps)


def check_waits(eager: Generated, graphed: Generated, num_results: int) -> None:
    """The host waits once a step: without graphs for this step, with graphs while the next one is on its way."""
    for step in eager.steps:
        assert sum(step.syncs.values()) == 1 and sum(step.downloads.values()) == num_results
    for step in graphed.steps[1:]:
        assert step.syncs == {"generation/launched.py:read: an event is waited for": 1}
        assert sum(step.downloads.values()) in (0, num_results), "of the step after; none behind the last"
        assert sum(step.uploads.values()) <= 2
    assert sum(sum(step.downloads.values()) for step in graphed.steps[1:]) > 10 * num_results


@nightly("a pretended GPU beside the CPU, for each claim; by day each kernel is beside torch in parts/cuda")
def test_queries_are_rotated_as_the_trainer_rotates(on_gpu: Run) -> None:
    """By float32 angles, rounded once; else scoring would be off by what no sync can mend."""
    assert on_gpu(engines.rotations) == [("torch.float32", True)]


@nightly("a pretended GPU beside the CPU, for each claim; by day each kernel is beside torch in parts/cuda")
@pytest.mark.parametrize("kv_dtype", ["auto", *also("fp8")])
def test_chunks_of_prompts_go_by_flash_attention(on_gpu: Run, kv_dtype: str) -> None:
    """Two prompts of 17 and 18 tokens in chunks of at most 7, by one call a layer for each. The second begins with the
    first 16 tokens of the first, whose block it shares."""
    whole, chunked = (on_gpu(engines.generate, "qwen3", "bfloat16", False, SAMPLED, kv_dtype, n) for n in (64, 7))
    assert whole.flash_calls == 2 * 2 and chunked.flash_calls == 2 * 4
    assert chunked.tokens.keys() == whole.tokens.keys() and chunked.finite
    assert chunked.apart < (APART if kv_dtype == "auto" else 2)


@nightly("a pretended GPU beside the CPU, for each claim; by day each kernel is beside torch in parts/cuda")
def test_a_cache_in_float8_costs_no_wait(on_gpu: Run) -> None:
    """Its rounding is all that is between behavior log-probs and those of scoring, which has no cache."""
    eager, graphed = (on_gpu(engines.generate, "qwen3", "bfloat16", graphs, SAMPLED, "fp8") for graphs in (False, True))
    assert eager.tokens == graphed.tokens and len(eager.tokens) == 6
    for one in (eager, graphed):
        assert one.finite and 10 * APART < one.apart < 2
    check_waits(eager, graphed, 1)


@nightly("a pretended GPU; by day kernels are beside torch in parts/cuda")
@pytest.mark.parametrize("sampling", [GREEDY, TRUNCATED], ids=["greedy", "truncated"])
def test_the_host_waits_once_per_step(on_gpu: Run, sampling: dict[str, Any]) -> None:
    found = on_gpu(engines.generate, "qwen3", "bfloat16", False, sampling)
    assert found.finite and len(found.steps) > 10
    assert all(sum(step.syncs.values()) == 1 for step in found.steps), found.steps[0].syncs


@nightly("a pretended GPU; by day kernels are beside torch in parts/cuda")
@pytest.mark.parametrize("num_tokens", [2048, 8192, 32768])
def test_attention_is_exact_over_long_contexts(on_gpu: Run, num_tokens: int) -> None:
    assert on_gpu(rounding.of_attention, num_tokens) < 0.004, "one rounding to bfloat16"


@nightly("a pretended GPU beside the CPU, for each claim; by day each kernel is beside torch in parts/cuda")
def test_a_sum_by_atomics_would_not_be(on_gpu: Run) -> None:
    """It rounds once per token: on a CPU it does not, so no test there would tell."""
    assert on_gpu(rounding.of_atomics, 8192) > 0.02


@nightly("a pretended GPU beside the CPU, for each claim; by day each kernel is beside torch in parts/cuda")
@pytest.mark.parametrize("family", ["glm4_moe", *also("qwen3_moe")])
def test_graphs_of_a_mixture_ask_the_host_nothing(on_gpu: Run, family: str) -> None:
    """bfloat16 experts go by torch's grouped product, whose offsets stay on the device."""
    eager, graphed = (on_gpu(engines.generate, family, "bfloat16", graphs, SAMPLED) for graphs in (False, None))
    assert eager.tokens == graphed.tokens and len(eager.tokens) == 6
    assert "grouped product" in eager.described
    assert "without CUDA graphs" not in graphed.described
    for one in (eager, graphed):
        assert one.finite and one.apart < APART
    check_waits(eager, graphed, 2)  # tokens, and experts on record


@nightly("experts with graphs are, above")
@pytest.mark.parametrize("precision", ["fp8", "int8", "float32"])
def test_experts_that_are_multiplied_one_by_one_take_no_graphs(on_gpu: Run, precision: str) -> None:
    """The host reads how many rows each expert has, once per layer of experts, and the log says so."""
    found = on_gpu(engines.generate, "qwen3_moe", precision, None, SAMPLED)
    assert found.finite and len(found.tokens) == 6 and found.apart < (APART if precision == "float32" else 0.05)
    assert f"without CUDA graphs ({precision} experts" in found.described
    assert {sum(step.syncs.values()) for step in found.steps} == {1 + 2}
