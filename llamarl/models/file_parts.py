"""Where the files of a checkpoint hold the tensors of a model.

Most tensors have their own name in the files. A stack of experts is one tensor for each expert, or, in mixtures of Qwen
3.5, one for all with gate and up joined. A delta net here has a matrix for each kind of head, so that ranks can share
heads; files join some of these matrices. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.hybrid import LEFT_OUT, TEXT_PREFIX
from llamarl.models.shape import ModelShape
from llamarl.models.sizes import HYBRIDS
from llamarl.sharding.tensor_parallel import is_expert

_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names of an expert's projections in Mixtral's files."""


@dataclass(frozen=True, slots=True, eq=False)
class JoinedRows:
    """Rows of a tensor in the files that are a tensor of the model."""

    name: str
    """Name in the files."""
    rows_N: np.ndarray
    """Row in the file of each row of the tensor, int64."""
    sizes: tuple[int, ...]
    """Shape of the tensor in the files."""


class FileLayout:
    """Names and places of the tensors of one model in its files."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._joined = {} if shape.delta is None else _joined(shape.delta, shape.family, shape.hidden_size)

    def names(self, name: str, sizes: Sequence[int]) -> list[str]:
        """Returns the names in files of a tensor of the model: one, or, for a stack of experts, one for each
        expert."""
        family = self._shape.family
        name = name.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else name
        name = name.replace(".shared_experts.", ".shared_expert.") if family in HYBRIDS else name
        if not is_expert(name):
            joined = self.joined(name)
            return [name if joined is None else joined.name]
        owner, _, kind = name.rpartition(".")
        kind = _MIXTRAL[kind] if family == "mixtral" else kind
        return [f"{owner}.{expert}.{kind}.weight" for expert in range(sizes[0])]

    def joined(self, name: str) -> JoinedRows | None:
        """Returns the rows of a file's tensor that are this tensor. None means that the file's tensor is this one."""
        owner, found, kind = name.partition(".linear_attn.")
        if not found or (place := self._joined.get(kind)) is None:
            return None
        return JoinedRows(f"{owner}.linear_attn.{place.name}", place.rows_N, place.sizes)

    def all_experts(self, name: str, sizes: Sequence[int]) -> tuple[str, int, tuple[int, ...]] | None:
        """Returns the name in files of one tensor with all experts, the first row of each expert in it, and its shape.
        None means that files of this family have none."""
        if self._shape.family != "qwen3_5_moe_text":
            return None
        (num, rows, columns), (owner, _, kind) = sizes, name.rpartition(".")
        if kind == "down_proj":
            return name, 0, (num, rows, columns)
        return f"{owner}.gate_up_proj", rows * (kind == "up_proj"), (num, 2 * rows, columns)

    def plain(self, name: str) -> str:
        """Returns a name in files without the prefix of models that also read images."""
        is_inner = self._shape.family in HYBRIDS and name.startswith(TEXT_PREFIX)
        return f"model.{name.removeprefix(TEXT_PREFIX)}" if is_inner else name

    def is_left_out(self, name: str) -> bool:
        """Returns whether no model has this tensor of the files: a constant in old checkpoints, a tensor of layers that
        predict further tokens, or of an image encoder."""
        if self._shape.family in HYBRIDS and name.startswith(LEFT_OUT):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", name) if self._shape.family == "glm4_moe" else None
        return name.endswith(".rotary_emb.inv_freq") or (layer is not None and int(layer[1]) >= self._shape.num_layers)


def _joined(delta: DeltaShape, family: str, hidden_size: int) -> dict[str, JoinedRows]:
    """Returns the places of the matrices of a delta net that files join, by name in the layer's delta net."""
    sizes = {"q": delta.key_size, "k": delta.key_size, "v": delta.value_size}
    starts = {"q": 0, "k": delta.key_size, "v": 2 * delta.key_size}
    mixed, one = delta.mixed_size, (delta.conv_width,)
    plain = {kind: starts[kind] + np.arange(size) for kind, size in sizes.items()}
    places = {
        f"conv_{kind}.weight": JoinedRows("conv1d.weight", rows_N, (mixed, 1, *one)) for kind, rows_N in plain.items()
    }
    if family != "qwen3_next":
        name, whole = "in_proj_qkv.weight", (mixed, hidden_size)
        return places | {f"in_proj_{kind}.weight": JoinedRows(name, rows_N, whole) for kind, rows_N in plain.items()}
    # Key head after key head: its query, its key, then values and gates of its value heads.
    heads, each = delta.num_key_heads, delta.num_value_heads // delta.num_key_heads
    values = each * delta.value_dim
    qkvz = {"q": delta.key_dim, "k": delta.key_dim, "v": values, "z": values}
    for name, widths in (("in_proj_qkvz.weight", qkvz), ("in_proj_ba.weight", {"b": each, "a": each})):
        unit, start = sum(widths.values()), 0
        for kind, width in widths.items():
            rows_N = (np.arange(heads)[:, None] * unit + start + np.arange(width)).reshape(-1)
            places[f"in_proj_{kind}.weight"] = JoinedRows(name, rows_N, (heads * unit, hidden_size))
            start += width
    return places
