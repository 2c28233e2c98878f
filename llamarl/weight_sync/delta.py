"""What changed between two versions of a tensor: places and new values, bit for bit.

Places are written as 16-bit offsets within blocks of 65,536 elements, and a count per block: two bytes per change,
whatever the share of changes. One optimizer step at a learning rate of 1e-6 changes few bfloat16 values and fewer
8-bit codes, as most updates are smaller than a rounding step; then a delta is a small part of the dense bytes.

Shape suffixes: E elements of a tensor, C changed elements, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 16
"""Elements that a 16-bit offset can name."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer type of each element size: bits are compared, so NaN equals itself and -0 differs from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDelta:
    """Changes of one tensor. All three are plain CPU tensors of numbers."""

    counts_B: Tensor
    """Changes in each block, int32."""
    offsets_C: Tensor
    """Place of each change within its block, ascending, uint16 kept as int16 bits."""
    values_C: Tensor
    """New elements as integer words of their own size."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.counts_B, self.offsets_C, self.values_C))

    @property
    def num_changes(self) -> int:
        return len(self.offsets_C)


def encode(base: Tensor, new: Tensor) -> TensorDelta | None:
    """What turns `base` into `new`; None when that takes as many bytes as `new`.

    Both are contiguous and of one shape and type.
    """
    assert (base.shape, base.dtype) == (new.shape, new.dtype), "a delta needs two versions of one tensor"
    base_E, new_E = _words(base), _words(new)
    differs_E = base_E != new_E
    num_changes, size = int(differs_E.count_nonzero()), new.element_size()
    num_blocks = -(-len(new_E) // BLOCK_ELEMENTS)
    if num_changes * (2 + size) + 4 * num_blocks >= len(new_E) * size:
        return None
    places_C = differs_E.nonzero().squeeze(1)
    return TensorDelta(
        counts_B=torch.bincount(places_C >> 16, minlength=num_blocks).int().cpu(),
        offsets_C=(places_C & 0xFFFF).to(torch.int16).cpu(),
        values_C=new_E[places_C].cpu(),
    )


def apply(delta: TensorDelta, target: Tensor) -> None:
    """Turns `target`, which holds the base version, into the new one, in place.

    Raises:
        ValueError: the delta does not fit the tensor; nothing was changed.
    """
    target_E = _words(target)
    num_blocks = -(-len(target_E) // BLOCK_ELEMENTS)
    counts_B, device = delta.counts_B.long(), target.device
    fits = (
        len(counts_B) == num_blocks
        and int(counts_B.sum()) == delta.num_changes == len(delta.values_C)
        and delta.values_C.dtype == target_E.dtype
        and bool((counts_B >= 0).all())
    )
    if fits and delta.num_changes:
        blocks_C = torch.repeat_interleave(torch.arange(num_blocks), counts_B)
        places_C = (blocks_C << 16) + (delta.offsets_C.long() & 0xFFFF)
        fits = int(places_C.max()) < len(target_E)
        if fits:
            target_E.index_copy_(0, places_C.to(device), delta.values_C.to(device))
    if not fits:
        raise ValueError(f"a delta of {delta.num_changes} changes does not fit a tensor of {len(target_E)} elements")


def to_message(base: Tensor, new: Tensor) -> tuple[int, list[Tensor]]:
    """What to send to someone who holds `base`: the number of changes, and pieces of a message of bytes.

    All elements: the tensor itself, as its changes would take as many bytes.
    """
    delta = encode(base, new)
    pieces = (new,) if delta is None else (delta.counts_B, delta.offsets_C, delta.values_C)
    number = new.numel() if delta is None else delta.num_changes
    return number, [piece.view(-1).view(torch.uint8) for piece in pieces]


def message_bytes(num_changes: int, num_elements: int, element_bytes: int) -> int:
    """How long the message is."""
    if num_changes == num_elements:
        return num_elements * element_bytes
    return num_changes * (2 + element_bytes) + 4 * -(-num_elements // BLOCK_ELEMENTS)


def from_message(base: Tensor, num_changes: int, message: Tensor) -> Tensor:
    """The new tensor, contiguous. Raises ValueError: the changes do not fit."""
    if num_changes == base.numel():
        return message.clone().view(base.dtype).view(base.shape)  # pieces of a message are not aligned
    new = base.clone(memory_format=torch.contiguous_format)
    sizes = [len(message) - num_changes * (2 + new.element_size()), 2 * num_changes, num_changes * new.element_size()]
    counts, offsets, values = (piece.clone() for piece in message.cpu().split_with_sizes(sizes))
    apply(
        TensorDelta(
            counts_B=counts.view(torch.int32),
            offsets_C=offsets.view(torch.int16),
            values_C=values.view(_WORDS[new.element_size()]),
        ),
        new,
    )
    return new


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bits as a flat tensor of integers, sharing its memory."""
    return tensor.view(-1).view(_WORDS[tensor.element_size()])
