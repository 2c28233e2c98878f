"""Time and memory of one optimizer step. Columns: L layouts; every array is float64 or int64 [L]."""

from __future__ import annotations

import numpy as np

from llamarl.models.memory import UNEVEN_EXPERTS, TrainerLoad, expert_share, kv_token_bytes, trainer_bytes
from llamarl.parts.forecast.candidates import TrainerLayouts
from llamarl.parts.forecast.hardware import BF16, FP32, Pool
from llamarl.parts.forecast.links import collective_bandwidth, exchange_s
from llamarl.parts.forecast.request import PlanRequest

PASSES = 3
"""Weight gathers, activation reductions and exchanges per microbatch: forward, recomputed forward, backward."""


def step_flops(request: PlanRequest) -> float:
    """Returns the FLOPs of one optimizer step with recompute. A prompt counts once for its responses, logits only for
    responses, and causal attention over half of the squared lengths."""
    lengths, prompt = request.lengths, request.prompt_tokens
    squares = request.prompts_per_step * prompt**2
    squares += request.num_samples * (2 * prompt * lengths.mean_tokens + lengths.square_tokens)
    targets = request.num_samples * lengths.mean_tokens
    return request.model.step_flops(
        request.step_tokens, targets, squares / 2, request.lora, request.constants.recompute
    )


def routed_flops(request: PlanRequest) -> float:
    """Returns the FLOPs of one optimizer step, including recompute, in routed experts."""
    passes = 3 + request.constants.recompute - (request.lora is not None)
    return 2.0 * request.model.routed_scalars * request.step_tokens * passes


def inverse_efficiency(request: PlanRequest, ep: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns the duration of matrix products with `tokens` tokens per microbatch on a rank, relative to peak.

    Few tokens reach half of `train_efficiency`, and a mixture's experts do with few rows per expert. If ranks share
    experts by number, a rank processes the rows of all ranks for its experts, and all wait for the fullest rank.
    """
    model, constants = request.model, request.constants
    dense = 1 + constants.half_efficiency_tokens / tokens
    if model.moe is None:
        return dense / constants.train_efficiency
    rows = tokens * ep * model.moe.experts_per_token / model.moe.num_experts
    grouped = np.where(ep > 1, UNEVEN_EXPERTS, 1) * (1 + constants.half_efficiency_rows / rows)
    share = routed_flops(request) / step_flops(request)
    return ((1 - share) * dense + share * grouped) / constants.train_efficiency


def exchanged_bytes(request: PlanRequest, ep: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns the mean bytes that a rank sends in one pass through a layer with experts: rows of its tokens to the
    ranks of their experts, and results back, in bfloat16. 1 / ep of them stays on the rank."""
    per_token = request.model.rows_per_token * request.model.hidden_size * BF16
    return tokens * per_token * (ep - 1) / ep


def training_parts(
    request: PlanRequest, pool: Pool, layouts: TrainerLayouts, *, publishes: bool = False
) -> dict[str, np.ndarray]:
    """Returns the seconds of one optimizer step on `pool`, by cause. They add up.

    compute: FLOPs / (GPUs x peak x efficiency), efficiency falling with few tokens per GPU, for the rank with the most
    groups; of a mixture's experts by the rows of each, on the fullest rank. tensor: `PASSES` x 2 reductions of the
    activations per layer, ring cost 2 (tp-1)/tp (arXiv 1909.08053). fsdp: gathers in forward and backward and a
    reduce-scatter, (s-1)/s of the weights each plus one network hop per node and layer; what `fsdp_overlap` of compute
    cannot hide counts (arXiv 2304.11277); experts come from the ranks with the same ones alone. context: keys and
    values of the other ranks, `PASSES` + 1 times. exchange: rows to their experts and back, in each pass, to and from
    the fullest rank. pipeline: bubble (pp-1)/microbatches of the work (arXiv 2104.04473), and activations between
    stages.
    overhead: host time per microbatch and per step. optimizer: bytes of AdamW / memory bandwidth. publish: the rank's
    own shard is copied to where generators fetch it from.
    """
    model, constants, gpu = request.model, request.constants, pool.gpu
    tp, cp, pp, dp, ep = layouts.tp_L, layouts.cp_L, layouts.pp_L, layouts.dp_L, layouts.ep_L
    rank_samples = request.rank_samples(dp)
    rank_tokens = rank_samples / request.num_samples * request.step_tokens
    microbatches = np.ceil(rank_tokens / layouts.microbatch_tokens_L)
    tokens = rank_tokens / microbatches / cp
    stage_layers = np.ceil(model.num_layers / pp)
    flops = step_flops(request) * rank_samples / request.num_samples * (stage_layers * pp / model.num_layers)
    compute = flops / (tp * cp * pp) / gpu.bf16_flops * inverse_efficiency(request, ep, tokens)
    activation_bytes = rank_tokens / cp * model.hidden_size * BF16
    fsdp = _gathering_s(request, pool, layouts, microbatches)
    sent = UNEVEN_EXPERTS * exchanged_bytes(request, ep, rank_tokens / cp) * model.num_sparse_layers / pp
    tensor = PASSES * 2 * stage_layers * 2 * (tp - 1) / tp * activation_bytes
    tensor = tensor / collective_bandwidth(gpu, constants, tp, inner=1)
    kv_bytes = rank_tokens * kv_token_bytes(model, tp, BF16)
    context = (PASSES + 1) * stage_layers / model.num_layers * kv_bytes * (cp - 1) / cp
    context = context / collective_bandwidth(gpu, constants, cp, inner=tp)
    between_stages = 2 * (pp > 1) * activation_bytes / tp / (gpu.network_bandwidth * constants.link_efficiency)
    overhead = constants.step_overhead_s + microbatches * constants.microbatch_overhead_s
    trained = 0 if request.lora else model.expert_parameters
    state = (request.trained_parameters - trained) / layouts.shards_L
    state = (state + trained * expert_share(model, layouts.shards_L, ep)) / (tp * pp)
    memory_bandwidth = gpu.memory_bandwidth * constants.bandwidth_efficiency
    parts = {
        "compute": compute,
        "fsdp": np.maximum(0.0, fsdp - constants.fsdp_overlap * compute),
        "tensor": tensor,
        "context": context,
        "exchange": PASSES * exchange_s(gpu, constants, ep, sent),
        "pipeline": (pp - 1) / microbatches * (compute + tensor + context) + between_stages,
        "overhead": overhead,
        "optimizer": constants.optimizer_traffic_bytes * state / memory_bandwidth,
    }
    published = {"publish": request.trained_parameters * (FP32 + BF16) / layouts.gpus_L / memory_bandwidth}
    return parts | (published if publishes else {})


def _gathering_s(request: PlanRequest, pool: Pool, layouts: TrainerLayouts, microbatches: np.ndarray) -> np.ndarray:
    """Returns the seconds to gather weights and scatter gradients, hidden or not. With several shards this repeats for
    each microbatch. Plain replicas reduce gradients once per step."""
    model, constants, gpu = request.model, request.constants, pool.gpu
    tp, ep, shards, copies = layouts.tp_L, layouts.ep_L, layouts.shards_L, layouts.dp_L * layouts.cp_L
    trained = 0 if request.lora else model.expert_parameters
    others = (PASSES - 1) * (model.num_parameters - model.expert_parameters) + request.trained_parameters - trained
    gathered = BF16 * others / (tp * layouts.pp_L) * (shards - 1) / shards * microbatches
    reduced = 0.0
    if not layouts.sharded:
        reduced = 2 * BF16 * request.trained_parameters / (tp * layouts.pp_L) * (copies - 1) / copies
    outer = collective_bandwidth(gpu, constants, shards if layouts.sharded else copies, inner=tp)
    fewer = shards / ep  # ranks that share the experts of the same numbers
    held = ((PASSES - 1) * model.expert_parameters + trained) * expert_share(model, shards, ep) / (tp * layouts.pp_L)
    of_experts = BF16 * held * (fewer - 1) * microbatches / collective_bandwidth(gpu, constants, fewer, inner=tp * ep)
    hops = ((shards > 1) + 1.0 * ((ep > 1) & (fewer > 1))) * np.ceil(shards * tp / gpu.node_gpus)
    latency = PASSES * np.ceil(model.num_layers / layouts.pp_L) * microbatches * hops * constants.network_latency_s
    return (gathered + reduced) / outer + of_experts + latency


def training_memory(request: PlanRequest, layouts: TrainerLayouts) -> dict[str, np.ndarray]:
    """Returns the bytes per GPU, by part, as in `models/memory.py`, with recomputed activations in bfloat16. They add
    up.

    state: weights, gradients and moments. gathered: full copies of weights during computation, and gathered layers if
    state is sharded. activations: of the largest microbatch, including its log-probabilities.
    """
    longest = request.rank_samples(layouts.dp_L) * request.longest_tokens
    tokens = np.minimum(layouts.microbatch_tokens_L, longest)
    load = TrainerLoad(
        tokens=tokens, targets=tokens * request.lengths.limit_tokens / request.longest_tokens, keys=0 * tokens,
        half=True, checkpointing=request.constants.recompute > 0, flash=True, on_gpu=True, fused=True, tp=layouts.tp_L,
        cp=layouts.cp_L, pp=layouts.pp_L, shards=layouts.shards_L, ep=layouts.ep_L, lora=request.lora,
        weight=request.weight_bytes, moments=request.moment_bytes * request.keeps_moments,
    )  # fmt: skip
    parts = trainer_bytes(request.model, load)
    return {
        "state": parts["weights"] + parts["gradients"] + parts["moments"],
        "gathered": parts["copies"],
        "activations": parts["activations"] + parts["head"],
    }
