"""GPUs and their links. Peaks are dense (no sparsity) and from the makers' data sheets; bandwidths go one way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

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
    node_bandwidth: Positive
    """Bytes per second between GPUs of a node: NVLink, or PCIe where there is none."""
    network_bandwidth: Positive
    """Bytes per second per GPU between nodes: InfiniBand or RoCE."""
    price: ZeroOrMore
    """US dollars per GPU-hour, a round on-demand figure; override it with your own."""
    node_gpus: Count = 8
    """GPUs that `node_bandwidth` joins."""

    @property
    def scalar_bytes(self) -> tuple[int, ...]:
        """Weight sizes that the device multiplies natively."""
        return (BF16, FP8) if self.fp8_flops else (BF16,)


_COLUMNS = (
    *("name", "memory_bytes", "memory_bandwidth", "bf16_flops", "fp8_flops"),
    *("node_bandwidth", "network_bandwidth", "price"),
)
_TABLE: tuple[tuple[Any, ...], ...] = (
    # NVIDIA H100 SXM5 data sheet; NVLink 4: 900 GB/s both ways; ConnectX-7: 400 Gb/s per GPU.
    ("h100-80g", 80e9, 3.35e12, 989e12, 1979e12, 450e9, 50e9, 3.0),
    # NVIDIA H200 SXM data sheet.
    ("h200-141g", 141e9, 4.8e12, 989e12, 1979e12, 450e9, 50e9, 3.8),
    # NVIDIA A100 SXM4 80GB data sheet; NVLink 3: 600 GB/s both ways; ConnectX-6: 200 Gb/s per GPU.
    ("a100-80g", 80e9, 2.039e12, 312e12, 0.0, 300e9, 25e9, 1.8),
    # NVIDIA L40S data sheet; PCIe 4.0 x16: 64 GB/s both ways; two 200 Gb/s adapters per eight GPUs.
    ("l40s-48g", 48e9, 0.864e12, 362e12, 733e12, 32e9, 6.25e9, 1.0),
    # NVIDIA DGX B200 data sheet (per GPU); NVLink 5: 1.8 TB/s both ways; ConnectX-7: 400 Gb/s per GPU.
    ("b200", 180e9, 8.0e12, 2250e12, 4500e12, 900e9, 50e9, 5.5),
    # NVIDIA A100 SXM4 40GB data sheet; the rest as with 80 GB.
    ("a100-40g", 40e9, 1.555e12, 312e12, 0.0, 300e9, 25e9, 1.3),
    # NVIDIA RTX A6000 data sheet (bfloat16 without sparsity: 154.8); PCIe 4.0 x16; 100 Gb/s per eight GPUs.
    ("a6000-48g", 48e9, 0.768e12, 154.8e12, 0.0, 32e9, 1.56e9, 0.6),
    # NVIDIA Ada GPU architecture white paper, appendix A (float32 accumulation, without sparsity); half of PCIe 4.0, as
    # there is no peer access and copies go through the memory of the host; 100 Gb/s per eight GPUs.
    ("rtx4090-24g", 24e9, 1.008e12, 165.2e12, 330.3e12, 16e9, 1.56e9, 0.4),
    # NVIDIA A10 data sheet; PCIe 4.0 x16; 100 Gb/s per eight GPUs, as AWS g5.48xlarge.
    ("a10-24g", 24e9, 0.6e12, 125e12, 0.0, 32e9, 1.56e9, 0.75),
    # NVIDIA L4 data sheet (half of it, which is with sparsity); PCIe 4.0 x16; the rest as AWS g6.48xlarge.
    ("l4-24g", 24e9, 0.3e12, 121e12, 242.5e12, 32e9, 1.56e9, 0.7),
    # One core of a server CPU with AVX2 (two units of 8 lanes, 3 GHz) and its share of the memory: orders of magnitude,
    # for a profile to replace.
    ("cpu-core", 4e9, 10e9, 96e9, 0.0, 5e9, 5e9, 0.05),
)
GPUS = {row[0]: Gpu(**dict(zip(_COLUMNS, row, strict=True))) for row in _TABLE}
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
