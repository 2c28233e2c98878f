"""What data sheets do not say: shares of the peak that software reaches, latencies, bytes. A profile overrides any."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from llamarl.config import ConfigError
from llamarl.planner.hardware import Gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Defaults are typical of Hopper clusters; sources stand with each."""

    train_efficiency: float = 0.55
    """Share of peak FLOPs in the trainer's kernels, communication apart. Llama 3 405B reached 38-43 % with
    communication and bubbles (arXiv 2407.21783, table 4), which leaves about 55 % for the kernels alone."""
    prefill_efficiency: float = 0.5
    """Share of peak FLOPs in prefill and in compute-bound decode."""
    half_efficiency_tokens: float = 128.0
    """Tokens per GPU and microbatch at which matrix products reach half of `train_efficiency`: the ridge point of an
    H100 is 295 FLOPs per byte, so products of fewer tokens are bound by reading the weights."""
    bandwidth_efficiency: float = 0.75
    """Share of memory bandwidth that decode reaches: vLLM's CPU build was measured at 68-89 % of it with
    100M parameters; GPU kernels are assumed to do as well."""
    link_efficiency: float = 0.8
    """Share of link bandwidth in large collectives (NCCL tests: 360-370 of 450 GB/s on NVLink 4)."""
    node_latency_s: float = 10e-6
    """One small all-reduce inside a node (NCCL or custom one-shot kernels: 5-15 us)."""
    network_latency_s: float = 20e-6
    """One more level of a small all-reduce tree across nodes, each way."""
    decode_overhead_s: float = 2e-3
    """Host and launch time of one decode step: scheduler, sampler, CUDA graph replay."""
    microbatch_overhead_s: float = 20e-3
    """Host time of one microbatch: packing, copies, launches."""
    step_overhead_s: float = 0.5
    """Time of one optimizer step that does not grow with the model: last rewards, packing, metrics, barriers."""
    fsdp_overlap: float = 0.9
    """Share of the trainer's compute time behind which weight gathers can hide."""
    recompute: float = 1.0
    """Forward passes repeated in backward: 1 is full activation checkpointing."""
    state_bytes: float = 16.0
    """Trainer bytes per parameter: float32 master weight, gradient and two Adam moments (ZeRO, arXiv 1910.02054)."""
    optimizer_traffic_bytes: float = 28.0
    """Bytes read and written per parameter by AdamW: reads weight, gradient, two moments; writes three of them."""
    activation_bytes: float = 34.0
    """Working bytes per token and hidden unit of the one layer that is recomputed (arXiv 2205.05198, eq. 2, with fused
    attention)."""
    logit_chunk_tokens: int = 1024
    """Tokens whose logits exist at once: log-probs are chunked."""
    weight_copies: int = 2
    """Weight buffers of a generator: one serves while the other is written."""
    reserved_share: float = 0.08
    """Device memory kept for the CUDA context, communication buffers and fragmentation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measured numbers of one machine; whatever is missing keeps its default."""

    constants: Constants
    gpu: dict[str, Any]
    """Fields of `Gpu` to replace."""

    def device(self, gpu: Gpu) -> Gpu:
        """`gpu` with the measured fields."""
        return dataclasses.replace(gpu, **self.gpu)


def load_profile(path: str | Path | None) -> Profile:
    """The profile in a JSON file `{"constants": {...}, "gpu": {...}}`; None gives the defaults. Raises ConfigError.

    Its `costs` and `run` are for the simulator and for people.
    """
    if path is None:
        return Profile(constants=Constants(), gpu={})
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read profile {path}: {error}; give a JSON file with `constants` and `gpu`") from None
    if not isinstance(data, dict):
        raise ConfigError(f"profile {path} holds no JSON object; write {{'constants': {{...}}, 'gpu': {{...}}}}")
    _check(path, "profile", data, ("constants", "gpu", "costs", "run"))
    constants, gpu = data.get("constants", {}), data.get("gpu", {})
    _check_numbers(path, "constants", constants, Constants)
    _check_numbers(path, "gpu", gpu, Gpu)
    return Profile(constants=Constants(**constants), gpu=gpu)


def _check(path: str | Path, where: str, data: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in data:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{path}: `{key}` is not known in `{where}`; {hint}")


def _check_numbers(path: str | Path, where: str, data: Any, record: type[Constants] | type[Gpu]) -> None:
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: `{where}` = {data!r} is no JSON object; write names and numbers")
    _check(path, where, data, tuple(field.name for field in dataclasses.fields(record) if field.name != "name"))
    whole = {field.name for field in dataclasses.fields(record) if field.type == "int"}
    for key, value in data.items():
        if isinstance(value, bool) or not isinstance(value, int if key in whole else int | float):
            kind = "whole number" if key in whole else "number"
            raise ConfigError(f"{path}: `{where}.{key}` = {value!r}; give a {kind}")
        lowest, highest = 0 if _may_be_zero(key) else 1e-12, 1 - 1e-6 if key == "reserved_share" else 1e30
        if not lowest <= value <= highest:
            raise ConfigError(f"{path}: `{where}.{key}` = {value!r} is outside {lowest:g} to {highest:g}; correct it")


def _may_be_zero(key: str) -> bool:
    """Times may vanish, and so may what a device or a system does without."""
    return key.endswith("_s") or key in (
        "fp8_flops",
        "fsdp_overlap",
        "half_efficiency_tokens",
        "price",
        "recompute",
        "reserved_share",
    )
