"""GPUs and their links. Peaks are dense (no sparsity) and from the makers' data sheets; bandwidths go one way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from llamarl.config import ConfigError, did_you_mean

FP32, BF16, FP8 = 4, 2, 1
"""Bytes of one scalar."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
ZeroOrMore = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
"""Numbers that a file may set, with their range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator in a node of equal ones."""

    name: str
    memory_bytes: Positive
    memory_bandwidth: Positive
    """Bytes per second."""
    bf16_flops: Positive
    """Peak FLOPs per second."""
    fp8_flops: ZeroOrMore
    """Peak FLOPs per second; 0 when the device has no 8-bit floating point."""
    node_gpus: Count
    """GPUs that `node_bandwidth` joins."""
    node_bandwidth: Positive
    """Bytes per second between GPUs of a node: NVLink, or PCIe where there is none."""
    network_bandwidth: Positive
    """Bytes per second per GPU between nodes: InfiniBand or RoCE."""
    price: ZeroOrMore
    """US dollars per GPU-hour, a round on-demand figure; override it with your own."""

    @property
    def scalar_bytes(self) -> tuple[int, ...]:
        """Weight sizes that the device multiplies natively."""
        return (BF16, FP8) if self.fp8_flops else (BF16,)


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA H100 SXM5 data sheet; NVLink 4: 900 GB/s both ways; ConnectX-7: 400 Gb/s per GPU.
        Gpu(
            name="h100-80g", memory_bytes=80e9, memory_bandwidth=3.35e12, bf16_flops=989e12, fp8_flops=1979e12,
            node_gpus=8, node_bandwidth=450e9, network_bandwidth=50e9, price=3.0,
        ),
        # NVIDIA H200 SXM data sheet.
        Gpu(
            name="h200-141g", memory_bytes=141e9, memory_bandwidth=4.8e12, bf16_flops=989e12, fp8_flops=1979e12,
            node_gpus=8, node_bandwidth=450e9, network_bandwidth=50e9, price=3.8,
        ),
        # NVIDIA A100 SXM4 80GB data sheet; NVLink 3: 600 GB/s both ways; ConnectX-6: 200 Gb/s per GPU.
        Gpu(
            name="a100-80g", memory_bytes=80e9, memory_bandwidth=2.039e12, bf16_flops=312e12, fp8_flops=0.0,
            node_gpus=8, node_bandwidth=300e9, network_bandwidth=25e9, price=1.8,
        ),
        # NVIDIA L40S data sheet; PCIe 4.0 x16: 64 GB/s both ways; two 200 Gb/s adapters per eight GPUs.
        Gpu(
            name="l40s-48g", memory_bytes=48e9, memory_bandwidth=0.864e12, bf16_flops=362e12, fp8_flops=733e12,
            node_gpus=8, node_bandwidth=32e9, network_bandwidth=6.25e9, price=1.0,
        ),
        # NVIDIA DGX B200 data sheet (per GPU); NVLink 5: 1.8 TB/s both ways; ConnectX-7: 400 Gb/s per GPU.
        Gpu(
            name="b200", memory_bytes=180e9, memory_bandwidth=8.0e12, bf16_flops=2250e12, fp8_flops=4500e12,
            node_gpus=8, node_bandwidth=900e9, network_bandwidth=50e9, price=5.5,
        ),
        # One core of a server CPU with AVX2 and its share of the memory: orders of magnitude, for a profile to replace.
        Gpu(
            name="cpu-core", memory_bytes=4e9, memory_bandwidth=10e9, bf16_flops=50e9, fp8_flops=0.0,
            node_gpus=8, node_bandwidth=5e9, network_bandwidth=5e9, price=0.05,
        ),
    )
}  # fmt: skip
"""Known devices."""
CPU = "cpu-core"
"""The one of them that is no GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """GPUs of one kind that may be used together."""

    gpu: Gpu
    count: int


def find_gpu(name: str) -> Gpu:
    """A device of the table. Raises ConfigError."""
    if name not in GPUS:
        hint = did_you_mean(name, GPUS, f"known: {', '.join(GPUS)}; a profile can override its numbers")
        raise ConfigError(f"`--gpu {name}` is not in the table; {hint}")
    return GPUS[name]
