"""Time and memory of generating one step's responses. Columns: L candidates, float64 or int64 [L]; C length cells."""

from __future__ import annotations

import numpy as np

from llamarl.models.memory import (
    UNEVEN_EXPERTS,
    GeneratorLoad,
    Number,
    generator_bytes,
    has_whole_experts,
    kv_token_bytes,
    served_bytes,
)
from llamarl.models.sizes import DecoderSizes
from llamarl.parts.forecast.candidates import Generators, sum_parts
from llamarl.parts.forecast.hardware import BF16, FP32, Pool
from llamarl.parts.forecast.links import collective_bandwidth, small_reduction_s
from llamarl.parts.forecast.request import PlanRequest, Rules


def token_flops(request: PlanRequest, context_tokens: float) -> float:
    """Returns the FLOPs of one token at a context of this length."""
    return request.model.forward_flops(1, 1, context_tokens)


def prompt_flops(request: PlanRequest) -> float:
    """Returns the FLOPs to prefill one prompt. No logits are needed, because its last token is decoded."""
    return request.model.forward_flops(request.prompt_tokens, 0, request.prompt_tokens**2 / 2)


def expert_flops(request: PlanRequest, tp: np.ndarray) -> np.ndarray:
    """Returns the additional FLOPs of the fullest rank of a replica for one token, summed over ranks, if each rank has
    whole experts of a mixture and not columns of all experts."""
    if request.model.moe is None:
        return np.zeros(len(tp))
    return 2.0 * (UNEVEN_EXPERTS - 1) * request.model.routed_scalars * has_whole_experts(request.model, tp)


def read_bytes(model: DecoderSizes, weight_bytes: Number, active: Number) -> Number:
    """Returns the bytes of weights that a decode step with `active` responses reads. They touch E (1 - (1 - k/E)^c) of
    E experts. The head is 16-bit if weights are 8-bit."""
    scalars: Number = model.layer_scalars
    if model.moe is not None:
        share = model.moe.experts_per_token / model.moe.num_experts
        scalars = scalars - model.routed_scalars + model.expert_parameters * (1 - (1 - share) ** active)
    return scalars * weight_bytes + model.vocab_size * model.hidden_size * BF16


def decode_parts(
    request: PlanRequest, pool: Pool, generators: Generators, *, active: np.ndarray, context_tokens: float
) -> dict[str, np.ndarray]:
    """Returns the seconds of one decode step of one replica with `active` responses, by cause. Reading and computing
    overlap.

    weights: bytes / memory bandwidth. kv: keys and values of the active responses, split at most `num_kv_heads` ways,
    and their states of delta nets.
    compute: matrix products beyond the reading time. tensor: two all-reduces per layer, latency plus bytes. overhead:
    host time per step. (Pope et al., arXiv 2211.05102, sections 2 and 3.)
    """
    model, constants, gpu = request.model, request.constants, pool.gpu
    tp, weight_bytes = generators.tp_L, generators.weight_bytes_L
    bandwidth = gpu.memory_bandwidth * constants.bandwidth_efficiency
    weights = read_bytes(model, weight_bytes, active) / tp / bandwidth
    kv = active * context_tokens * kv_token_bytes(model, tp, BF16) / bandwidth
    kv = kv + 2 * active * model.state_bytes / tp / bandwidth  # states of delta nets are read and written
    peak = np.where(weight_bytes == BF16, gpu.bf16_flops, gpu.fp8_flops or gpu.bf16_flops)
    flops = token_flops(request, context_tokens) + expert_flops(request, tp)
    compute = active * flops / tp / (peak * constants.prefill_efficiency)
    bytes_moved = 2 * (tp - 1) / tp * active * model.hidden_size * BF16
    reduction = small_reduction_s(gpu, constants, tp) + bytes_moved / collective_bandwidth(gpu, constants, tp, inner=1)
    return {
        "weights": weights,
        "kv": kv,
        "compute": np.maximum(0.0, compute - weights - kv),
        "tensor": 2 * model.num_layers * reduction,
        "overhead": np.broadcast_to(np.float64(constants.decode_overhead_s), np.shape(kv)),
    }


def steady_context_tokens(request: PlanRequest) -> float:
    """Returns the mean context of a busy slot: the prompt and E[L^2] / (2 E[L]) of the response (renewal theory)."""
    return request.prompt_tokens + request.lengths.square_tokens / (2 * request.lengths.mean_tokens)


def steady_parts(request: PlanRequest, pool: Pool, generators: Generators) -> dict[str, np.ndarray]:
    """Returns `decode_parts` of a step with every slot busy."""
    context_tokens = steady_context_tokens(request)
    return decode_parts(request, pool, generators, active=generators.slots_L, context_tokens=context_tokens)


def drain_s(request: PlanRequest, pool: Pool, generators: Generators) -> np.ndarray:
    """Returns the seconds until `slots` new responses, including the longest of the step, have ended.

    Integral of the decode time over t, with slots x S(t) responses active (at least one) up to E[max of B0].
    """
    lengths = request.lengths
    longest = lengths.longest_tokens(request.num_samples)
    span_C = np.clip(longest / lengths.cell_tokens - np.arange(len(lengths.middles_C)), 0, 1) * lengths.cell_tokens
    total = np.zeros(len(generators.slots_L))
    for middle, survival, span in zip(lengths.middles_C, lengths.survival_C, span_C, strict=True):
        if span > 0:
            active, context_tokens = np.maximum(1.0, generators.slots_L * survival), request.prompt_tokens + middle
            parts = decode_parts(request, pool, generators, active=active, context_tokens=context_tokens)
            total += span * sum_parts(parts)
    return total


def generation_parts(request: PlanRequest, pool: Pool, generators: Generators, rules: Rules) -> dict[str, np.ndarray]:
    """Returns the seconds for one step's responses, by cause. They add up.

    decode: (samples per replica / slots) x mean length x decode step. stragglers: without partial rollouts the phase
    ends with its longest response: (n/c - 1) x mean x step + drain, minus the decode time. prefill: each prompt once
    per group. sync: adopting new weights, one shard per GPU over its network link, as on the receiving side of
    `sync.priced`. Without direct sync all of them go through one node first.
    """
    constants, gpu = request.constants, pool.gpu
    slots, replicas, tp = generators.slots_L, generators.replicas_L, generators.tp_L
    step = sum_parts(steady_parts(request, pool, generators))
    mean = request.lengths.mean_tokens
    if rules.partial_rollouts:
        decode = request.num_samples / replicas / slots * mean * step
        stragglers = np.zeros_like(decode)
    else:
        per_replica = np.ceil(request.num_samples / replicas)
        decode = per_replica / slots * mean * step
        drain = _by_state(request, pool, generators)
        stragglers = np.maximum(0.0, (per_replica / slots - 1) * mean * step + drain - decode)
    peak = np.where(generators.weight_bytes_L == BF16, gpu.bf16_flops, gpu.fp8_flops or gpu.bf16_flops)
    prompts = (
        request.prompts_per_step / replicas if rules.partial_rollouts else np.ceil(request.prompts_per_step / replicas)
    )
    prompt = prompt_flops(request) + request.prompt_tokens * expert_flops(request, tp)
    network = gpu.network_bandwidth * constants.link_efficiency
    through_node = 0.0 if rules.direct_sync else 1 / (network * gpu.node_gpus)
    weights, merge = served_bytes(request.model, generators.weight_bytes_L), 0.0
    if request.lora:  # float32 adapters go to each rank, which reads frozen matrices and writes merged ones
        merged = request.model.num_parameters * (BF16 + generators.weight_bytes_L) / tp
        merge = merged / (gpu.memory_bandwidth * constants.bandwidth_efficiency)
        weights = FP32 * request.trained_parameters * tp
    return {
        "decode": decode,
        "stragglers": stragglers,
        "prefill": prompts * prompt / tp / (peak * constants.prefill_efficiency),
        "sync": weights * (1 / (tp * network) + through_node) + merge,
    }


def _by_state(request: PlanRequest, pool: Pool, generators: Generators) -> np.ndarray:
    """Returns `drain_s`, computed once per distinct (tp, slots, weight bytes), because it does not depend on
    replicas."""
    key = (generators.tp_L * 4 + generators.weight_bytes_L) * 10**9 + generators.slots_L
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    return drain_s(request, pool, generators.take(first))[back]


def generation_memory(request: PlanRequest, generators: Generators, *, resident_weights: bool) -> dict[str, np.ndarray]:
    """Returns the bytes per GPU, by part. weights: `weight_copies` buffers (none if the trainer's weights serve). kv:
    prompt and held tokens of every slot; beyond `num_kv_heads` ranks, key/value heads are duplicated. Both follow
    `models/memory.py`. Prompts shared by a group are counted once per response, as an upper bound.
    """
    # Three standard deviations of the mean over slots, and at least the longest response.
    held, spread = request.lengths.held_tokens, np.sqrt(max(0.0, request.lengths.square_tokens) / generators.slots_L)
    response = np.minimum(request.lengths.limit_tokens, held + 3 * spread)
    load = GeneratorLoad(
        width=generators.weight_bytes_L, kv_width=BF16, tp=generators.tp_L,
        kv_tokens=generators.slots_L * (request.prompt_tokens + response),
        copies=0 if resident_weights else request.constants.weight_copies, lora=request.lora,
    )  # fmt: skip
    parts = generator_bytes(request.model, load)
    return {"weights": parts["weights"] + parts.get("frozen", 0), "kv": parts["keys and values"]}
