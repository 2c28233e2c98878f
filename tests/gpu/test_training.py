"""Optimizer steps on a pretended GPU, backward included: what they compute, and how often the host waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import trainers
from tests.gpu.conftest import Run
from tests.nightly import also, nightly


@nightly("a whole trainer; kernels and losses are beside the CPU in parts/cuda and tests/training by day")
@pytest.mark.parametrize(
    ("what", "family", "config"),
    [
        ("trainer", "qwen2", {"dtype": "bfloat16", "lora": True}),
        *also(
            ("critic", "qwen3", {"dtype": "bfloat16"}),
            ("trainer", "llama", {"dtype": "float32"}),
            ("trainer", "qwen3", {"dtype": "bfloat16"}),
            ("trainer", "qwen3", {"dtype": "bfloat16", "activation_checkpointing": True}),
            ("trainer", "glm4_moe", {"dtype": "bfloat16"}),
            ("critic", "llama", {"dtype": "float32"}),
        ),
    ],
)
def test_steps_are_those_of_the_cpu(on_gpu: Run, what: str, family: str, config: dict[str, Any]) -> None:
    found = on_gpu(trainers.train, what, family, config)
    tolerances = (1e-5, 1e-5) if config["dtype"] == "float32" else (0.02, 0.1)
    for (cpu, gpu), tolerance in zip(found.norms, tolerances, strict=True):
        assert gpu == pytest.approx(cpu, rel=tolerance)
    assert found.apart < (1e-3 if config["dtype"] == "float32" else 0.2), "Adam's first steps go by signs"
    assert found.step.syncs == {
        "training/optimization.py:read: a copy to the host": 1,
        "training/parallel.py:clip_gradients: a number is read": 1,
    }


@nightly("a whole trainer; kernels and losses are beside the CPU in parts/cuda and tests/training by day")
def test_the_head_multiplies_halves_and_sums_in_float32(on_gpu: Run) -> None:
    found = on_gpu(trainers.head)
    assert found.apart < 1e-4, "rounded logits would be off by 0.02"
    assert found.gradient_apart < 0.01
    assert found.factors == {"torch.bfloat16 torch.bfloat16"}, "float32 factors take several times as long"


@nightly("a pretended GPU of its own; test_memory.py has one by day")
def test_weights_of_norms_are_not_rounded(on_gpu: Run) -> None:
    assert on_gpu(trainers.norm_of_heads) == pytest.approx(2**-9, rel=0.01)
