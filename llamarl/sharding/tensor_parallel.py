"""Tensor parallelism: cuts of the parameters of a decoder (Megatron-LM, arXiv 1909.08053, section 3).

Projections into heads and into the feed-forward dim are cut by output rows, the projections back by input columns. Each
rank then computes its own heads, and one all-reduce follows each block. Embedding and head are cut by vocabulary. Norms
and routers are whole on every rank. The experts of a mixture are each cut like a dense feed-forward. If the cut experts
would be too small, whole experts are assigned to ranks by their numbers. Heads of a delta net are cut like those of
attention, with their convolution and decays. Of an adapter (`models/lora.py`), the matrix
is cut that has the dim along which its projection is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.sharding.box import Box

_IN = frozenset(f"in_proj_{kind}" for kind in "qkvzba")
_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"}) | _IN
_COLUMNS = frozenset({"o_proj", "down_proj", "out_proj"})
_OF_HEADS = frozenset({"linear_attn", "conv_q", "conv_k", "conv_v"})
"""Modules of a delta net whose own tensors have a row for each channel or head."""
_QUANTIZABLE = tuple(f".in_proj_{kind}.weight" for kind in "qkvz")
_KV = frozenset({"k_proj", "v_proj"})
_EXPERTS = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}
"""Dims of the stacked matrices [E, F, D], [E, F, D] and [E, D, F] with the feed-forward columns."""
LEAST_COLUMNS = 256
"""Fewest columns of an expert for which a product outweighs its start-up cost."""


def sharded_dim(name: str) -> int | None:
    """Returns the dim along which the parameter `name` (Hugging Face names) is cut. None means that every rank holds
    all of it."""
    module, kind = _projection(name)
    if is_expert(name):
        return _EXPERTS[kind]
    if module in _OF_HEADS:
        return 0
    if module in _ROWS:
        return None if kind == "lora_A.weight" else 0
    return 1 if module in _COLUMNS and kind in ("weight", "lora_A.weight") else None


def tensor_parallel_box(name: str, shape: Sequence[int], num_ranks: int, rank: int, num_kv_heads: int) -> Box:
    """Returns the part of a parameter that `rank` of `num_ranks` holds.

    With more ranks than kv heads, `num_ranks / num_kv_heads` consecutive ranks hold each kv head.

    Raises:
        ValueError: the dim cannot be cut evenly; names parameter, size and number of ranks.
    """
    whole, dim = Box.whole(shape), sharded_dim(name)
    if dim is None or num_ranks == 1:
        return whole
    parts = num_ranks
    if _projection(name)[0] in _KV and num_ranks > num_kv_heads:
        if num_ranks % num_kv_heads:
            raise ValueError(f"{num_kv_heads} kv heads cannot be shared evenly by {num_ranks} tensor-parallel ranks")
        parts, rank = num_kv_heads, rank * num_kv_heads // num_ranks
    if shape[dim] % parts:
        raise ValueError(f"{name} has {shape[dim]} rows or columns, which {parts} tensor-parallel ranks cannot share")
    size = shape[dim] // parts
    return whole.cut(dim, rank * size, (rank + 1) * size)


def is_expert(name: str) -> bool:
    """Returns whether the name is a projection of all experts of a layer: `...mlp.experts.gate_proj`."""
    *_, module, kind = ("", "", *name.split("."))
    return module == "experts" and kind in _EXPERTS


def is_router(name: str) -> bool:
    """Returns whether the name is the weight or the selection bias of a mixture's router."""
    return name.endswith((".mlp.gate.weight", ".mlp.gate.e_score_correction_bias"))


def is_quantizable(name: str) -> bool:
    """Returns whether the name is a projection of a layer. Embedding, head, norms, routers, biases, and a delta net's
    decays and strengths stay floats."""
    return name.endswith(("_proj.weight", *_QUANTIZABLE)) or is_expert(name)


def is_decay(name: str) -> bool:
    """Returns whether the name is a parameter of a delta net's decays, which are always computed in float32."""
    return name.endswith((".A_log", ".dt_bias"))


def cuts_by_expert(num_experts: int, expert_size: int, num_ranks: int) -> bool:
    """Returns whether each rank of a generator holds some experts whole instead of columns of all experts."""
    return num_ranks > 1 and num_experts % num_ranks == 0 and expert_size < num_ranks * LEAST_COLUMNS


def expert_box(shape: Sequence[int], num_ranks: int, rank: int) -> Box:
    """Returns the experts that `rank` holds whole."""
    size = shape[0] // num_ranks
    return Box.whole(shape).cut(0, rank * size, (rank + 1) * size)


def _projection(name: str) -> tuple[str, str]:
    """Returns the module and its part: a weight, a bias, or a matrix of its adapter."""
    *_, outer, module, kind = ("", "", *name.split("."))
    return (outer, f"{module}.{kind}") if module.startswith("lora_") else (module, kind)
