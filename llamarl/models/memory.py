"""Device memory that models need, per rank and by kind. `plan`, the check at start and `--dry-run` all use this sum
(docs/planner.md). No torch.

It is plain arithmetic, so a layout's sizes may be numbers or arrays of many layouts. D model dim, Q and V query and
key/value widths, F feed-forward dim, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarl.config.roles import LoraConfig
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.sizes import DecoderSizes, adapted, adapter_parameters
from llamarl.sharding.tensor_parallel import cuts_by_expert, is_expert, is_quantizable, sharded_dim

Number = Any
"""A number, or an array with one number for each of many layouts."""
Parts = dict[str, Number]
"""Bytes by kind, to be summed."""

WIDTHS: dict[str, int] = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}
"""Bytes of a weight in a generator."""
TILE_LOGITS = 1 << 23
"""Logits in memory at once in training, in elements: 32 MiB of float32. Larger tiles are no faster
(`benchmarks/training.py`)."""
GPU_TILE_COLUMNS, GPU_TILE_LOGITS = 1 << 14, 1 << 26
"""Columns of a tile on a GPU, as long as the tile has at most this number of logits, 256 MiB of float32. A tile costs
five launches, and an addition to the gradient of the hidden states."""
BLOCK_COLUMNS = 256
"""Columns of a row of an 8-bit moment that share a scale."""
MOMENTS_BYTES = {"float32": 8.0, "8bit": 2 + 8 / BLOCK_COLUMNS}
"""Bytes per trained weight of both moments of AdamW, by `trainer.moments`."""


STATES_OF_ROLLOUT = 2
"""States of delta nets in a generator for each rollout that decodes: its own, and that behind its prompt."""
SHARED_STATES = 8
"""States of delta nets in a generator behind beginnings that prompts share."""
UNEVEN_EXPERTS = 1.3
"""Rows of the fullest of the ranks that share the experts of a mixture, over their mean. An assumption: routers were
trained to be even, over far more tokens than a microbatch has, and a rank has several experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLoad:
    """Everything that decides the memory of one rank of a trainer or critic."""

    tokens: Number
    """Tokens of the largest microbatch of a data-parallel rank."""
    targets: Number
    """Tokens among them whose log-probability is computed."""
    keys: Number
    """Keys that masked attention copies: each prompt once, and per response the prompt and as many keys as the longest
    response of the group has. Flash attention copies none."""
    half: bool
    """Whether it computes in bfloat16."""
    checkpointing: bool
    """Whether layers are computed again for backward."""
    flash: bool
    """Whether attention is on a GPU in bfloat16."""
    on_gpu: bool
    """Whether it computes on a GPU, where tiles of the head are wider."""
    fused: bool
    """Whether operations of `kernels/half.py` compute: on a GPU in bfloat16, without `torch.compile`."""
    tp: Number = 1
    cp: Number = 1
    pp: Number = 1
    shards: Number = 1
    """Ranks that share one tensor-parallel part of all weights (FSDP2)."""
    ep: Number = 1
    """Ranks among them that hold different experts of a mixture. `shards / ep` ranks share the rows of each."""
    is_critic: bool = False
    """Whether it has one output per token instead of a vocabulary."""
    weight: int = 4
    """Bytes of a trained weight, and of its gradient."""
    moments: float = MOMENTS_BYTES["float32"]
    """Bytes per trained weight of both moments."""
    lora: LoraConfig | None = None
    selective: bool = False
    """Whether fused norms and activations are computed again for backward, and products are not."""


def trainer_bytes(sizes: DecoderSizes, load: TrainerLoad) -> Parts:
    """Returns bytes of one rank in training, after its first step, at the peak of a later one. Includes moments on any
    device."""
    vocabulary = sizes.vocab_size * sizes.hidden_size
    whole = sizes.num_parameters - (vocabulary if load.is_critic and not sizes.tie_embeddings else 0)
    # Each stage has some layers. The first also has the embedding, the last the head.
    held = np.ceil(sizes.num_layers / load.pp) * sizes.layer_parameters
    rest = whole - sizes.num_layers * sizes.layer_parameters
    held = held + np.where(load.pp > 1, np.minimum(rest, vocabulary), rest)
    # The numbers of whole experts per rank may differ.
    held = held + sizes.expert_parameters / load.pp * (load.shards * expert_share(sizes, load.shards, load.ep) - 1)
    ranks, trained = load.tp * load.shards, held
    parts: Parts = {}
    if load.lora is None:
        parts["weights"] = load.weight * held / ranks
    else:
        inner = _frozen(sizes, load.lora) * sizes.num_layers
        trained = adapter_parameters(sizes, load.lora) / load.pp
        frozen = 4 * held - (
            2 * inner / load.pp if load.half else 0
        )  # adapted projections are kept in the type of compute
        parts["weights"] = (frozen + 4 * trained) / ranks
    parts["gradients"] = load.weight * trained / ranks
    parts["moments"] = load.moments * trained / ranks
    return parts | _peak(sizes, load)


def expert_share(sizes: DecoderSizes, shards: Number, ep: Number) -> Number:
    """Returns the share of a mixture's experts that the fullest of `shards` ranks holds. FSDP2 distributes whole
    experts. With `ep` ranks share the rows of experts, which the check at start requires to be even."""
    if sizes.moe is None:
        return 1 / shards
    whole = np.ceil(sizes.moe.num_experts / shards) / sizes.moe.num_experts
    return np.where(np.asarray(ep) > 1, 1 / shards, whole)[()]


def _peak(sizes: DecoderSizes, load: TrainerLoad) -> Parts:
    """Returns bytes of a microbatch at the worst moment: the end of the layers' forward, or the backward of the head,
    of a layer, or of the embedding (with FSDP2, when the gradients of embedding and head are scattered)."""
    vocabulary = 0 if load.is_critic else sizes.vocab_size * sizes.hidden_size / load.tp
    width, hidden, is_cut = 2 if load.half else 4, sizes.hidden_size, np.asarray(load.shards) > 1
    rows, layer = load.tokens / (load.cp * load.tp), activation_bytes(sizes, load)
    table = 8 * sizes.head_dim * (sizes.max_position_embeddings + load.tokens / load.cp)
    ends = 2 * 4 * hidden * rows + table
    # A pipeline's first stage keeps its layers' activations of as many microbatches as there are stages.
    kept = sizes.num_layers * (4 * hidden * rows if load.checkpointing else layer)
    # Gradients of gate, up and their product, of experts' rows, and of the residual stream. With recomputation also the
    # layer. Fused operations have freed the product and normed rows by then.
    active = _active_width(sizes, load)
    copied = hidden * sizes.rows_per_token * _uneven(load)
    work = (width * ((_inner(sizes, load) - 1) * active + copied) + 12 * hidden * (not load.fused)) * rows
    work = work + (layer if load.checkpointing else 0)
    if sizes.delta is not None:
        # In addition to the layer's own activations, if these are kept.
        work = work + _rule_bytes(sizes.delta, load.on_gpu) * load.tokens / load.tp
    last = _inner(sizes, load) * width * active * rows if load.checkpointing else 0
    gradient = load.weight * vocabulary if load.lora is None else 0  # whole; a frozen head has none
    # The embedding's is whole too. If it is also the head, both gradients and their sum exist at once.
    is_one = sizes.tie_embeddings and not load.is_critic
    ends_gradient = (3 if is_one else 1) * load.weight * sizes.vocab_size * hidden / load.tp * (load.lora is None)
    # On a GPU in bfloat16 the gradient has 16 bits until all tiles are done.
    by_tiles = _logits(sizes, load) + gradient * (0.5 if load.on_gpu and load.half and load.weight == 4 else 1)
    logits = 0 if load.is_critic else np.maximum(by_tiles, gradient) + width * hidden * load.targets
    cast, one = _cast(sizes, load)
    after = cast if load.fused else np.where(load.checkpointing, one, cast)
    gathered, sent, outer = _gathered(sizes, load)
    moments: list[Parts] = [
        {"copies": np.where(is_cut, gathered, cast), "activations": kept + last + ends, "head": 0},
        {
            "copies": np.where(is_cut, gathered, 0 if load.checkpointing and not load.fused else cast)
            + (2 * vocabulary if load.half and load.weight == 4 else 0),
            "activations": kept + ends,
            "head": logits,
        },
        # The head's gradient stays until the embedding adds to it if both are one, with FSDP2 until the embedding's.
        {
            "copies": np.where(is_cut, gathered + sent, after),
            "activations": kept + table + work,
            "head": np.where(is_cut | is_one, gradient, 0),
        },
        {
            "copies": np.where(is_cut, outer, cast if load.fused else 0),
            "activations": table,
            "head": np.where(is_cut, 0, ends_gradient),
        },
    ]
    worst = np.argmax(np.broadcast_arrays(*map(total, moments)), axis=0)
    return {name: np.choose(worst, [moment[name] for moment in moments])[()] for name in moments[0]}


def _logits(sizes: DecoderSizes, load: TrainerLoad) -> Number:
    """Returns bytes of tiles of logits.

    The peak is a tile with its gradient and the gradient
    of the hidden states, which is summed in float32, with its addend; or a tile with its gradient and the next tile.
    """
    if not load.on_gpu:
        return 3 * 4 * TILE_LOGITS
    hidden, width = sizes.hidden_size * load.targets, 2 if load.half else 4
    tile = gpu_tile_logits(load.targets, sizes.hidden_size)
    return np.maximum((4 + width) * tile + 8 * hidden, (8 + width) * tile + 4 * hidden)


def gpu_tile_logits(num_rows: Number, width: int) -> Number:
    """Returns the largest number of logits of a tile on a GPU.

    A tile has at least as many columns as there are hidden channels: adding up their gradient then takes less time than
    products, and as much memory as a tile.
    """
    columns = np.minimum(GPU_TILE_COLUMNS * num_rows, GPU_TILE_LOGITS)
    return np.maximum(np.maximum(TILE_LOGITS, num_rows * width), columns)


def _inner(sizes: DecoderSizes, load: TrainerLoad) -> int:
    """Returns the number of feed-forward activations: gate, up and their product, and silu of gate if that is a
    separate operation."""
    return 3 if load.fused and sizes.moe is None else 4


def _uneven(load: TrainerLoad) -> Number:
    """Returns rows of a rank's experts over the rank's rows."""
    return np.where(np.asarray(load.ep) > 1, UNEVEN_EXPERTS, 1)[()]


def _active_width(sizes: DecoderSizes, load: TrainerLoad) -> Number:
    """Returns the columns of feed-forward that a layer computes for each of a rank's tokens."""
    return sizes.active_width + (_uneven(load) - 1) * sizes.routed_width


def _cast(sizes: DecoderSizes, load: TrainerLoad) -> tuple[Number, Number]:
    """Returns bytes of the bfloat16 copies of all layers' matrices, and of one layer's.

    Autocast keeps its copies until the forward ends, and longer if activations are kept. Fused products keep theirs
    until the step ends.
    """
    one = 2 * (sizes.layer_parameters - _frozen(sizes, load.lora)) / load.tp if load.half and load.weight == 4 else 0
    return one * np.ceil(sizes.num_layers / load.pp), one


def _gathered(sizes: DecoderSizes, load: TrainerLoad) -> tuple[Number, Number, Number]:
    """Returns bytes of tensors that FSDP2 holds whole, at three moments.

    First: a layer in use and the next one, with embedding and head in float32. Second: a layer's gradients as they are
    computed and, in float32, as they are sent. Third: embedding and head, with their gradients (three of them if both
    are one matrix), and the last layer's.
    """
    width, experts = 2 if load.half else 4, sizes.layer_expert_parameters
    # A rank gathers its experts, padded to the largest share. With `ep` ranks a layer's experts are gathered alone,
    # without those of the next layer.
    local_experts = experts * expert_share(sizes, load.shards, load.ep) * load.shards / load.ep / load.tp
    layer = (sizes.layer_parameters - experts) / load.tp + local_experts
    two = 2 * layer - local_experts * (np.asarray(load.ep) > 1)
    ends = (1 if load.is_critic else 2 - sizes.tie_embeddings) * sizes.vocab_size * sizes.hidden_size / load.tp
    gathered = width * two + load.weight * ends
    if load.lora:
        return gathered, 0, 4 * ends
    is_one = sizes.tie_embeddings and not load.is_critic
    outer = load.weight * ((4 if is_one else 2) + (load.weight == 2)) * ends  # bfloat16 gradients also have their sum
    return gathered, (width + 4) * layer, outer + width * two


def _frozen(sizes: DecoderSizes, lora: LoraConfig | None) -> int:
    """Returns scalars in the projections of a layer that have an adapter; in a hybrid model the mean of all layers."""
    return sum(num * math.prod(shape) for num, shape in adapted(sizes, lora)) // sizes.num_layers if lora else 0


def activation_bytes(sizes: DecoderSizes, load: TrainerLoad) -> Number:
    """Returns bytes of a microbatch that a layer keeps between forward and backward, without recomputation."""
    query, kv, tokens = sizes.query_size, sizes.kv_size, load.tokens / load.cp
    hidden, inner = sizes.hidden_size, _active_width(sizes, load)
    width, lora = (2 if load.half else 4), load.lora
    # The residual stream at two places, and both normed before their weights are applied (frozen weights need neither).
    # Each tensor rank has its rows there. Inputs of blocks are gathered, and cast for each product.
    residual = 4 * hidden * (2 + 2 * (lora is None and not load.fused))
    if load.fused:  # cast once
        targets = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"} if lora is None else {*lora.targets}
        blocks = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}
        is_kept = not load.selective or np.asarray(load.tp) > 1  # rows of other ranks are gathered, not computed
        gathered = 2 * hidden * sum(bool(block & targets) for block in blocks) * is_kept
    elif load.half:
        casts = 5 if lora is None else len({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"} & {*lora.targets})
        gathered = 2 * hidden * casts
    else:
        gathered = 4 * hidden * 2
    # In a mixture also the experts' rows.
    is_again = load.selective and load.fused and sizes.moe is None
    heads = width * ((_inner(sizes, load) - is_again) * inner + hidden * sizes.rows_per_token * _uneven(load))
    # Queries, keys, values, outputs, and the logarithm of each query's sum. Without flash attention queries and outputs
    # twice, because attention needs them in another order.
    with_attention = sizes.num_attention_layers / sizes.num_layers
    mixer = width * (2 * query + 2 * kv) + 4 * sizes.num_heads if load.flash else width * 4 * query
    if sizes.qk_norm:
        mixer += (2 if lora is None else 1) * 4 * (query + kv)
    if sizes.is_hybrid:  # gates, their sigmoids, and outputs before them
        mixer += 3 * width * query
    if sizes.delta is not None:
        mixer = with_attention * mixer + (1 - with_attention) * _delta_bytes(sizes.delta, width)
    heads += mixer
    # Flash attention keeps the keys and values of all context ranks.
    gathered_kv = width * 2 * kv * (load.tokens - tokens) / load.tp
    copied = gathered_kv if load.flash else width * 2 * query * load.keys / (load.cp * load.tp)
    return (residual / load.tp + gathered + heads / load.tp) * tokens + copied * with_attention


def _delta_bytes(delta: DeltaShape, width: int) -> int:
    """Returns bytes per token that a delta net keeps for backward: mixed channels; log decays and strengths with what
    they come from; outputs, their norms, gates and their activations; and the input of the last projection. What is
    inside of the chunks is computed again."""
    of_values = 26 if width == 2 else 20
    return width * delta.mixed_size + 20 * delta.num_value_heads + of_values * delta.value_size


def _rule_bytes(delta: DeltaShape, on_gpu: bool) -> int:
    """Returns bytes per token of one layer's chunks while they are computed again, with their gradients."""
    chunk = delta.chunk_tokens(on_gpu)
    within = 5 * chunk + 8 * delta.key_dim + 8 * delta.value_dim
    states = 4 * delta.key_dim * delta.value_dim // chunk
    return 4 * ((delta.conv_width + 4) * delta.mixed_size + delta.num_value_heads * (within + states))


def kv_token_bytes(sizes: DecoderSizes, tp: Number, width: int) -> Number:
    """Returns bytes of a token's keys and values on one rank. Heads are not split: more ranks than heads repeat
    them."""
    return 2 * sizes.num_attention_layers * sizes.head_dim * width * np.maximum(np.ceil(sizes.num_kv_heads / tp), 1)


def served_bytes(sizes: DecoderSizes, width: Number, tp: Number = 1) -> Number:
    """Returns bytes of one copy of a generator's weights on a rank: projections in `width` bytes each (8-bit ones with
    a float32 scale per row), embedding and head in 16 bits unless projections have 32, norms, biases and routers in 32
    bits."""
    vocabulary = sizes.vocab_size * sizes.hidden_size
    layers = sum(
        count * _served(sizes, name, shape, width, tp)
        for count, weights in sizes.layer_kinds()
        for name, shape in weights.items()
    )
    ends = (2 - sizes.tie_embeddings) * vocabulary / tp * np.maximum(width, 2)
    return layers + ends + 4 * sizes.hidden_size


def _served(sizes: DecoderSizes, name: str, shape: tuple[int, ...], width: Number, tp: Number) -> Number:
    """Returns bytes of one weight of a layer. More ranks than key/value heads repeat these."""
    dim, of_heads = sharded_dim(name), name.startswith(("self_attn.k_proj", "self_attn.v_proj"))
    ranks = 1 if dim is None else np.minimum(tp, sizes.num_kv_heads) if of_heads else tp
    if dim is None or not is_quantizable(name):
        return 4 * math.prod(shape) / ranks
    cuts_rows = dim < len(shape) - 1 or (is_expert(name) and has_whole_experts(sizes, tp))
    rows = math.prod(shape[:-1]) / np.where(cuts_rows, ranks, 1)[()]
    return math.prod(shape) / ranks * width + np.where(np.asarray(width) == 1, 4 * rows, 0)[()]


def has_whole_experts(sizes: DecoderSizes, tp: Number) -> Number:
    """Returns whether each of `tp` ranks of a generator has some whole experts of a mixture instead of columns of
    all."""
    assert sizes.moe is not None
    return np.vectorize(cuts_by_expert, otypes=[bool])(sizes.moe.num_experts, sizes.moe.expert_size, tp)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorLoad:
    """Everything that decides the memory of one rank of a generator."""

    width: Number
    """Bytes of a weight."""
    kv_width: int
    """Bytes of a cached scalar."""
    kv_tokens: Number
    """Tokens in the cache."""
    tp: Number = 1
    copies: int = 2
    """Copies of the weights: in use, and being written; on CPUs also packed for kernels."""
    rows: int = 0
    """Rollouts that are sampled at once."""
    prefill_tokens: int = 0
    lora: LoraConfig | None = None
    """Settings of adapters, whose frozen matrices are kept next to the merged ones. None means no adapters."""


def generator_bytes(sizes: DecoderSizes, load: GeneratorLoad) -> Parts:
    """Returns bytes of one rank that generates, or (one copy, no cache) scores with frozen weights."""
    parts: Parts = {"weights": load.copies * served_bytes(sizes, load.width, load.tp)}
    if load.lora:
        frozen = 2 * _frozen(sizes, load.lora) * sizes.num_layers
        parts["frozen"] = (frozen + 4 * adapter_parameters(sizes, load.lora)) / load.tp
    parts["keys and values"] = load.kv_tokens * kv_token_bytes(sizes, load.tp, load.kv_width)
    if sizes.delta is not None and load.kv_width:
        parts["states"] = (STATES_OF_ROLLOUT * load.rows + SHARED_STATES) * sizes.state_bytes / load.tp
    inner = 3 * sizes.active_width + 2 * (sizes.query_size + 2 * sizes.kv_size)
    copied = 2 * sizes.hidden_size * sizes.rows_per_token
    work = np.maximum(load.rows, load.prefill_tokens) * (2 * inner / load.tp + 3 * 4 * sizes.hidden_size + copied)
    # Logits, their probabilities, and the running sum.
    parts["work"] = work + 3 * 4 * load.rows * sizes.vocab_size + 8 * sizes.head_dim * sizes.max_position_embeddings
    return parts


_TRUNCATED = 44
"""Bytes per logit while rows are sampled with truncation: logits over the temperature, probabilities, sorted ones with
their ids, and sums of these."""
_GRAPHS_BYTES, _NCCL_BYTES = 512 << 20, 1 << 30
"""Of CUDA graphs and libraries' workspaces; and of the buffers of two communicators, if ranks share a model."""


def gpu_work_bytes(sizes: DecoderSizes, rows: Number, prefill_tokens: Number, tp: Number = 1) -> Number:
    """Returns bytes of a GPU that a generator rank needs next to weights, keys and values, with truncated sampling."""
    load = GeneratorLoad(width=2, kv_width=0, kv_tokens=0, copies=0, prefill_tokens=prefill_tokens, tp=tp)
    gathered = np.where(np.asarray(tp) > 1, 8, 0)  # logits of all ranks, and side by side
    logits = (_TRUNCATED + gathered) * rows * sizes.vocab_size
    shared = np.where(np.asarray(tp) > 1, _NCCL_BYTES, 0)
    return (generator_bytes(sizes, load)["work"] + logits + _GRAPHS_BYTES + shared)[()]


def total(parts: Mapping[str, Number]) -> Number:
    """Returns the sum over all kinds."""
    return sum(parts.values())
