"""Constants that no data sheet has: shares of the peak in software, latencies, bytes. A profile overrides any."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from llamarl.config import make_record, read_json
from llamarl.parts.forecast.hardware import GPUS, Count, Gpu, Positive, ZeroOrMore


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Defaults are typical of Hopper clusters; sources stand with each."""

    train_efficiency: Positive = 0.55
    """Share of peak FLOPs in the trainer's kernels, communication apart. Llama 3 405B reached 38-43 % with
    communication and bubbles (arXiv 2407.21783, table 4), which leaves about 55 % for the kernels alone."""
    prefill_efficiency: Positive = 0.5
    """Share of peak FLOPs in prefill and in compute-bound decode."""
    half_efficiency_tokens: ZeroOrMore = 128.0
    """Tokens per GPU and microbatch at which matrix products reach half of `train_efficiency`: the ridge point of an
    H100 is 295 FLOPs per byte, so products of fewer tokens are bound by reading the weights."""
    half_efficiency_rows: ZeroOrMore = 128.0
    """Rows of one expert in a microbatch at which a mixture's grouped products reach half of `train_efficiency`:
    assumed to be as with tokens above, as an expert's weights are read for its rows alone."""
    bandwidth_efficiency: Positive = 0.75
    """Share of memory bandwidth that decode reaches: vLLM's CPU build was measured at 68-89 % of it with
    100M parameters; GPU kernels are assumed to do as well."""
    link_efficiency: Positive = 0.8
    """Share of link bandwidth in large collectives (NCCL tests: 360-370 of 450 GB/s on NVLink 4)."""
    node_latency_s: ZeroOrMore = 10e-6
    """One small all-reduce inside a node (NCCL or custom one-shot kernels: 5-15 us)."""
    network_latency_s: ZeroOrMore = 20e-6
    """One more level of a small all-reduce tree across nodes, each way."""
    decode_overhead_s: ZeroOrMore = 2e-3
    """Host and launch time of one decode step: scheduler, sampler, CUDA graph replay."""
    microbatch_overhead_s: ZeroOrMore = 20e-3
    """Host time of one microbatch: packing, copies, launches."""
    step_overhead_s: ZeroOrMore = 0.5
    """Time of one optimizer step that does not grow with the model: last rewards, packing, metrics, barriers."""
    fsdp_overlap: ZeroOrMore = 0.9
    """Share of the trainer's compute time behind which weight gathers can hide."""
    recompute: ZeroOrMore = 1.0
    """Forward passes repeated in backward: 1 is full activation checkpointing."""
    optimizer_traffic_bytes: Positive = 28.0
    """Bytes read and written per parameter by AdamW: reads weight, gradient, two moments; writes three of them."""
    weight_copies: Count = 2
    """Weight buffers of a generator: one serves while the other is written."""
    reserved_share: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.08
    """Device memory kept for the CUDA context, communication buffers and fragmentation."""


OF_CORES = Constants(step_overhead_s=0.02, microbatch_overhead_s=1e-3, decode_overhead_s=1e-3)
"""Constants of CPU cores, which launch nothing; from the profile of the demo: 9 ms a call, 0.9 ms a decode step."""


def of_these_cores(dtype: str) -> Constants:
    """Returns constants of this machine's cores for a trainer that computes in `dtype`.

    Products of a few hundred tokens reach nine tenths of a core's float32 peak. Where a processor multiplies bfloat16,
    training in it is a multiple of that (measured with a model of 135M parameters on two server processors). Without
    such instructions products are computed in float32, and the factors are converted.
    """
    speed = 1.0
    if dtype == "bfloat16":
        flags = cpu_flags()
        speed = 4.0 if "amx_bf16" in flags else 2.0 if "avx512_bf16" in flags else 0.9
    return replace(
        OF_CORES, train_efficiency=0.85 * speed, prefill_efficiency=0.9, half_efficiency_tokens=16.0, recompute=0.0
    )


def cpu_flags() -> frozenset[str]:
    """Returns the instructions of this machine's processor, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measured numbers of one machine; whatever is missing keeps its default."""

    constants: Constants = field(default_factory=Constants)
    gpu: dict[str, Any] = field(default_factory=dict)
    """Fields of `Gpu` to replace."""
    costs: dict[str, Any] = field(default_factory=dict)
    """Fields of `Costs` to replace, for the simulator."""
    run: dict[str, Any] = field(default_factory=dict)
    """Run that was measured, for people."""

    def device(self, gpu: Gpu) -> Gpu:
        """`gpu` with the measured fields."""
        return replace(gpu, **self.gpu)


def load_profile(path: str | Path | None) -> Profile:
    """The profile in a JSON file `{"constants": {...}, "gpu": {...}}`; None gives the defaults. Raises ConfigError."""
    if path is None:
        return Profile()
    data = read_json(path, "give a profile, {'constants': {...}, 'gpu': {...}}")
    given = data.get("constants", {})
    constants = make_record(Constants, given, "constants", str(path)) if isinstance(given, dict) else given
    profile = make_record(Profile, data | {"constants": constants}, "profile", str(path))
    make_record(Gpu, asdict(GPUS["cpu-core"]) | profile.gpu, "gpu", str(path))  # checks names and ranges
    return profile
