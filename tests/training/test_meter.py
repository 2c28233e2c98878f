"""What a machine is taken to have: its peak by numbers that are not all alike, and memory that is counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llamarl.config import ConfigError, RunConfig
from llamarl.config.roles import TrainerConfig
from llamarl.models import fit
from llamarl.models.fit import holdings
from llamarl.models.memory import total
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
    meter._measured_peak_flops.cache_clear()
    with Products() as products, serving("torch"):
        assert meter.peak_flops(TrainerConfig(), torch.device("cpu")) > 0
    assert products.seen
    assert all(float(one.std()) > 0.5 and len(one.unique()) > 1000 for one in products.seen)
    before = torch.get_rng_state()
    meter._measured_peak_flops.cache_clear()
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


def checked(dtype: str) -> None:
    """`check_memory` of a trainer of 8B that holds weights and gradients."""
    config = RunConfig.model_validate({
        "name": "x", "model": {"path": "m"}, "data": {"train": "t", "max_prompt_tokens": 512},
        "reward": {"parts": ["gsm8k"]},
        "rollout": {"max_new_tokens": 512, "group_size": 4},
        "trainer": {
            "dtype": dtype, "device": "cuda", "activation_checkpointing": True, "microbatch_tokens": 2048,
        },
        "weight_sync": {"transport": "shared_memory"},
    })  # fmt: skip
    meter.check_memory(SHAPE, config, GPU)


@pytest.mark.parametrize(("dtype", "per_weight"), [("float32", 16.0), ("bfloat16", 17.7)])
def test_8b_takes_so_many_bytes_a_weight(monkeypatch: pytest.MonkeyPatch, dtype: str, per_weight: float) -> None:
    """Weights and gradients, 8 bytes, lie there; moments, and autocast's copy, are to come. Versions for generators lie
    in the host's memory."""
    held = 8 * NUM_WEIGHTS
    for more, fits in ((0.0, False), (0.6, True)):  # activations of 2,048 tokens, and the head's gradient
        memory(monkeypatch, (per_weight + more) * NUM_WEIGHTS - held, held + GIB, held + GIB)
        if fits:
            checked(dtype)
        else:
            said = (
                r"the trainer needs \d+\.\d+ GiB \(moments 59\.83, weights 29\.92, gradients 29\.92, .* of cuda:0, but "
            )
            with pytest.raises(ConfigError, match=said):
                checked(dtype)


def test_ranks_on_cpus_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.model_validate({
        "model": {"path": "m"}, "data": {"train": "t"}, "trainer": {"parallelism": {"fsdp": 2}},
    })  # fmt: skip
    needed = float(total(next(holdings(config, SHAPE, {})).parts)) - 4 * NUM_WEIGHTS / 2  # its own weights lie there
    for free, fits in ((2.01 * needed, True), (1.99 * needed, False)):
        monkeypatch.setattr(meter, "available_bytes", lambda free=free: free)
        if fits:
            meter.check_memory(SHAPE, config, torch.device("cpu"))
        else:
            with pytest.raises(ConfigError, match="GiB are available; "):
                meter.check_memory(SHAPE, config, torch.device("cpu"))


@pytest.mark.parametrize(("free_gb", "is_alone", "fits"), [(80, True, True), (80, False, False), (2, True, False)])
def test_versions_for_generators_are_on_the_gpu_if_they_fit(
    monkeypatch: pytest.MonkeyPatch, free_gb: int, is_alone: bool, fits: bool
) -> None:
    """Next to moments and activations; never where other executors take memory later. Pinned transports count them."""
    monkeypatch.setattr(meter, "free_memory_bytes", lambda device: free_gb * 1e9)
    monkeypatch.setenv("LLAMARL_ALONE", "1" if is_alone else "")
    data = {
        "model": {"path": "m"}, "data": {"train": "running_total"}, "trainer": {"dtype": "bfloat16", "device": "cuda"},
        "generator": {"dtype": "bfloat16", "device": "cuda"},
    }  # fmt: skip
    small = replace(SHAPE, num_layers=2)
    config = RunConfig.model_validate(data | {"weight_sync": {"transport": "auto"}})
    monkeypatch.setattr(fit, "find_spec", lambda name: None)  # NIXL
    assert meter.slots_fit(small, config, GPU) is fits
    assert meter.slots_fit(small, config, torch.device("cpu"))
    pinned = RunConfig.model_validate(data | {"weight_sync": {"transport": "cuda_ipc"}})
    assert meter.slots_fit(small, pinned, GPU)
