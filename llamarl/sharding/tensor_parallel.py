"""Tensor parallelism: cuts of the parameters of a decoder (Megatron-LM, arXiv 1909.08053, section 3).

Projections into heads and into the feed-forward dim are cut by output rows, those back by input columns, so each rank
computes its own heads and one all-reduce follows each block. Embedding and head are cut by vocabulary. Norms are whole
on every rank. The experts of a mixture are cut as a dense feed-forward is, each of them alike, or, where too little of
each would be left, go to the ranks by their numbers; the router is whole. Of an adapter (`models/lora.py`) the matrix
is cut that has the dim along which its projection is.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.sharding.box import Box

_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"})
_COLUMNS = frozenset({"o_proj", "down_proj"})
_KV = frozenset({"k_proj", "v_proj"})
_EXPERTS = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}
"""Dims of the stacked matrices [E, F, D], [E, F, D] and [E, D, F] that have the feed-forward columns."""
LEAST_COLUMNS = 256
"""Columns of an expert below which a product is too thin for what it costs to begin one."""


def sharded_dim(name: str) -> int | None:
    """The dim along which the parameter `name` (Hugging Face names) is cut; None: every rank holds all of it."""
    module, kind = _projection(name)
    if is_expert(name):
        return _EXPERTS[kind]
    if module in _ROWS:
        return None if kind == "lora_A.weight" else 0
    return 1 if module in _COLUMNS and kind in ("weight", "lora_A.weight") else None


def tensor_parallel_box(name: str, shape: Sequence[int], num_ranks: int, rank: int, num_kv_heads: int) -> Box:
    """Part of a parameter that `rank` of `num_ranks` holds.

    With more ranks than kv heads, each kv head is held by `num_ranks / num_kv_heads` consecutive ranks.

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
    """A projection of all experts of a layer: `...mlp.experts.gate_proj`."""
    *_, module, kind = ("", "", *name.split("."))
    return module == "experts" and kind in _EXPERTS


def is_router(name: str) -> bool:
    """The weight or the selection bias of a mixture's router."""
    return name.endswith((".mlp.gate.weight", ".mlp.gate.e_score_correction_bias"))


def is_quantizable(name: str) -> bool:
    """A projection of a layer; embedding, head, norms, routers and biases stay floats."""
    return name.endswith("_proj.weight") or is_expert(name)


def cuts_by_expert(num_experts: int, expert_size: int, num_ranks: int) -> bool:
    """Whether each of so many ranks of a generator holds some experts whole, not columns of all."""
    return num_ranks > 1 and num_experts % num_ranks == 0 and expert_size < num_ranks * LEAST_COLUMNS


def expert_box(shape: Sequence[int], num_ranks: int, rank: int) -> Box:
    """Experts that `rank` holds whole."""
    size = shape[0] // num_ranks
    return Box.whole(shape).cut(0, rank * size, (rank + 1) * size)


def _projection(name: str) -> tuple[str, str]:
    """Module and what of it: a weight, a bias, or a matrix of its adapter."""
    *_, outer, module, kind = ("", "", *name.split("."))
    return (outer, f"{module}.{kind}") if module.startswith("lora_") else (module, kind)
