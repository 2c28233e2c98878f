"""Network that a `GeneratorModel` computes with: matrices over its tensors, joined where they lie side by side.

Shape suffixes: N outputs, K inputs, D model dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from llamarl.kernels.linear import Linear, Room

_ARGUMENTS = {"weight": "values_N_K", "weight.scale": "scales_N", "bias": "bias_N"}
"""Arguments of `Linear`, by the names of a module's tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorLayer:
    input_norm_D: Tensor
    qkv: tuple[Linear, ...]
    """One for all three, or three."""
    qk_norms: tuple[Tensor, Tensor] | None
    o: Linear
    post_norm_D: Tensor
    gate_up: tuple[Linear, ...]
    """One for both, or two."""
    down: Linear


class Network(dict[str, Tensor]):
    """Tensors, and what computes with them."""

    layers: list[GeneratorLayer]
    head: Linear
    room: Room
    """Holds the packed copies."""
    built: int
    """Number of the use of `room`, as `room.begin` gave it."""

    def linears(self) -> list[Linear]:
        found = [one for layer in self.layers for one in (*layer.qkv, layer.o, *layer.gate_up, layer.down)]
        return [*found, self.head]


def linears_of(tensors: Mapping[str, Tensor], modules: Sequence[str], room: Room) -> tuple[Linear, ...]:
    """One where the weights of the modules, and what belongs to them, lie side by side; else one for each."""
    kinds = [kind for kind in _ARGUMENTS if f"{modules[0]}.{kind}" in tensors]
    parts = {_ARGUMENTS[kind]: [tensors[f"{module}.{kind}"] for module in modules] for kind in kinds}
    joined = {argument: whole for argument, each in parts.items() if (whole := _joined(each)) is not None}
    if len(joined) == len(parts):
        return (Linear(**joined, room=room),)
    return tuple(Linear(**dict(zip(parts, one, strict=True)), room=room) for one in zip(*parts.values(), strict=True))


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """One view over tensors that follow each other in one buffer; None where they do not."""
    first = parts[0]
    if len(parts) == 1:
        return first
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return None
        end += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
