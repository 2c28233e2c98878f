"""Changes between two versions of a tensor: positions and new values, bit for bit.

A message has a count per block of 65,536 elements and a 16-bit offset within the block per change. A position thus
takes two bytes, whatever the share of changes. One optimizer step at a learning rate of 1e-6 changes few bfloat16
values and even fewer 8-bit codes, because most updates are smaller than a rounding step. A delta is then a small part
of the dense bytes.

Shape suffixes: E elements of a tensor, C changed elements, B blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 16
"""Elements that a 16-bit offset can address."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer type of each element size. Bits are compared, so NaN equals itself and -0 differs from 0."""


def encode(base: Tensor, new: Tensor) -> tuple[int, list[Tensor]]:
    """Encodes the changes for a receiver that holds `base`. Both tensors are contiguous, with equal shape and type.

    Returns:
        The number of changes and the pieces of a message of bytes: the counts per block, the offset of each change
            within its block, and the new elements. If the changes would take as many bytes as the tensor, the message
            is the tensor and the number is that of its elements.
    """
    assert (base.shape, base.dtype) == (new.shape, new.dtype), "a delta needs two versions of one tensor"
    base_E, new_E = _words(base), _words(new)
    differs_E = base_E != new_E
    number, pieces = int(differs_E.count_nonzero()), (new_E,)
    if message_bytes(number, len(new_E), new.itemsize) < new.nbytes:
        places_C = differs_E.nonzero().squeeze(1)
        counts_B = torch.bincount(places_C >> 16, minlength=_num_blocks(len(new_E))).int()
        pieces = counts_B, (places_C & 0xFFFF).to(torch.int16), new_E[places_C]
    else:
        number = len(new_E)
    return number, [piece.view(torch.uint8) for piece in pieces]


def message_bytes(num_changes: int, num_elements: int, element_bytes: int) -> int:
    """Returns the length in bytes of a message with `num_changes` changes."""
    if num_changes == num_elements:
        return num_elements * element_bytes
    return num_changes * (2 + element_bytes) + 4 * _num_blocks(num_elements)


def decode(base: Tensor, num_changes: int, message: Tensor) -> Tensor:
    """Returns the new tensor, contiguous. Raises ValueError if the changes do not fit `base`."""
    if num_changes == base.numel():
        return message.clone().view(base.dtype).view(base.shape)  # pieces of a message are not aligned
    new = base.clone(memory_format=torch.contiguous_format)
    new_E, num_blocks = _words(new), _num_blocks(new.numel())
    sizes = [4 * num_blocks, 2 * num_changes, new.itemsize * num_changes]
    if sum(sizes) == len(message):
        counts, offsets, values = (piece.clone() for piece in message.split_with_sizes(sizes))
        counts_B = counts.view(torch.int32).long()
        if int(counts_B.min()) >= 0 and int(counts_B.sum()) == num_changes:
            blocks_C = torch.repeat_interleave(torch.arange(num_blocks, device=base.device), counts_B)
            places_C = (blocks_C << 16) + (offsets.view(torch.int16).long() & 0xFFFF)
            if not num_changes or int(places_C.max()) < len(new_E):
                new_E[places_C] = values.view(new_E.dtype)
                return new
    raise ValueError(f"a delta of {num_changes} changes does not fit a tensor of {len(new_E)} elements")


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK_ELEMENTS)


def _words(tensor: Tensor) -> Tensor:
    """Returns the tensor's bits as a flat tensor of integers that shares its memory."""
    return tensor.view(-1).view(_WORDS[tensor.element_size()])
