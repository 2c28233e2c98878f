"""Files of a checkpoint: safetensors that are hashed while they are written."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from llamarl.config import open_own

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names in the header of https://github.com/safetensors/safetensors, "Format"."""
BLOCK_BYTES = 1 << 24


class TensorBuffers:
    """Tensors as they were, in memory that is kept: touching new memory takes several times as long as copying."""

    def __init__(self) -> None:
        self._kept = dict[str, Tensor]()

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors on the CPU; the next call writes over them."""
        for name, tensor in tensors.items():
            if name not in self._kept:
                self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()  # once, and before anything is written
        return {name: self._kept[name] for name in tensors}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], *, is_kept: bool = True) -> dict[str, Any]:
    """Writes contiguous CPU tensors; returns the size and digest of what was meant to be written.

    safetensors' own writer holds a second copy of everything, and its file would have to be read again for the digest.

    Args:
        is_kept: it is synced to the disk.

    Raises:
        OSError: the disk is full or not writable.
    """
    digest, size = xxhash.xxh3_128(), 0
    with open_own(path, "wb") as file:
        for block in _blocks(tensors):
            digest.update(block)
            size += len(block)
            file.write(block)
        file.flush()
        if is_kept:
            os.fsync(file.fileno())
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    header, end = dict[str, Any](), 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # so that all are aligned
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for _, tensor in ordered:
        data = tensor.view(-1).view(torch.uint8).numpy().data
        yield from (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
