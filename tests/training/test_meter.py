"""What a machine is taken to have: its peak by numbers that are not all alike, and memory that is counted once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llamarl.config import ConfigError, RunConfig
from llamarl.config.trainer import TrainerConfig
from llamarl.models.shape import ModelShape
from llamarl.training import meter
from tests.kernels.test_products import serving

GPU, GIB = torch.device("cuda", 0), 2**30
SHAPE = ModelShape(
    family="llama", hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=14_336, vocab_size=128_256, max_position_embeddings=4096,
)  # fmt: skip
NUM_WEIGHTS = SHAPE.num_parameters


class Products(TorchDispatchMode):
    """Keeps what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[torch.Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.append(args[0])
        return func(*args, **(kwargs or {}))


def test_a_peak_is_that_of_random_numbers() -> None:
    """Of ones a GPU makes 894 TFLOP/s, of numbers 788: fewer bits change."""
    with Products() as products, serving("torch"):
        assert meter.peak_flops(TrainerConfig(), torch.device("cpu")) > 0
    assert products.seen
    assert all(float(one.std()) > 0.5 and len(one.unique()) > 1000 for one in products.seen)
    before = torch.get_rng_state()
    meter.peak_flops(TrainerConfig(), torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state()), "a measurement changes what is drawn later"


def memory(monkeypatch: pytest.MonkeyPatch, free: float, reserved: float, allocated: float) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free), 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: int(reserved))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: int(allocated))


def test_memory_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's blocks count where no tensor lies in them."""
    memory(monkeypatch, 76 * GIB, 64 * GIB, 60 * GIB)
    assert meter.free_memory_bytes(GPU) == 80 * GIB


def checked() -> None:
    """`check_memory` for a trainer of 8B that holds weights and gradients."""
    weights = {"all": torch.empty(NUM_WEIGHTS, device="meta")}
    held = SimpleNamespace(device=GPU, sharding=SimpleNamespace(weights=weights))
    config = RunConfig.model_validate({
        "name": "x", "model": {"path": "m"}, "data": {"train": "t", "max_prompt_tokens": 512},
        "reward": {"parts": ["gsm8k"]},
        "rollout": {"max_new_tokens": 512, "group_size": 4},
        "trainer": {"dtype": "bfloat16", "activation_checkpointing": True, "microbatch_tokens": 4096},
    })  # fmt: skip
    meter.check_memory(held, SHAPE, config)  # pyrefly: ignore


def test_8b_takes_22_bytes_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and gradients, 8 bytes, lie there; moments, autocast's copy and the slots of weight sync are to come."""
    held = 8 * NUM_WEIGHTS
    for per_weight, fits in ((22.0, False), (23.0, True)):
        memory(monkeypatch, per_weight * NUM_WEIGHTS - held, held + GIB, held + GIB)
        if fits:
            checked()
        else:
            with pytest.raises(ConfigError, match=r"trainer\.microbatch_tokens = 4096 takes about"):
                checked()
