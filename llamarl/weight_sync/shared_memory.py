"""Same host, CPU memory: the trainer writes into an anonymous shared segment, generators copy out of it.

The segment is a memfd: it has no name, so two runs cannot collide, and the kernel frees it with the last process that
maps it, even after a SIGKILL. Generators open it through the trainer's `/proc` entry.

It holds two slots; version v lives in slot v mod 2. A slot begins with its version word, then one fingerprint per
tensor, then the tensors. The word says `WRITING` while the slot changes. The writer touches a slot only after its
readers have left it (they adopt v - 1 before v + 1 is published); a reader that was slower anyhow sees the word change
and gets `Superseded`, never a mixture.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor

from llamarl.weight_sync.layout import ALIGNMENT_BYTES, Layout, SegmentAddress, TensorSpec, lay_out

EMPTY, WRITING = -1, -2
"""Version words of a slot that holds no version."""


class Superseded(RuntimeError):
    """The wanted version is no longer (or not yet) in its slot."""


class FingerprintMismatch(RuntimeError):
    """What arrived is not what was published; the message names tensor and version."""


def _header_bytes(layout: Layout) -> int:
    """Version word and fingerprints, 8 bytes each, padded."""
    return -(-(1 + len(layout.specs)) * 8 // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _Slots:
    """Two slots of one mapped segment."""

    def __init__(self, fd: int, layout: Layout) -> None:
        header_bytes = _header_bytes(layout)
        slot_bytes = header_bytes + layout.num_bytes
        whole = torch.frombuffer(mmap.mmap(fd, 2 * slot_bytes), dtype=torch.uint8)
        self.versions = list[np.ndarray]()
        self.fingerprints = list[np.ndarray]()
        self.tensors = list[dict[str, Tensor]]()
        for slot in whole.split(slot_bytes):
            words = slot[:header_bytes].numpy().view(np.int64)
            self.versions.append(words[:1])
            self.fingerprints.append(words[1 : 1 + len(layout.specs)].view(np.uint64))
            data = slot[header_bytes:]
            self.tensors.append(
                {
                    spec.key: data[offset : offset + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)
                    for spec, offset in zip(layout.specs, layout.offsets_bytes, strict=True)
                }
            )


class SharedMemoryPublisher:
    """The trainer's end."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self._layout = lay_out(tuple(specs))
        self._fd = os.memfd_create("llamarl-weights")
        os.ftruncate(self._fd, 2 * (_header_bytes(self._layout) + self._layout.num_bytes))
        self._slots = _Slots(self._fd, self._layout)
        for version in self._slots.versions:
            version[0] = EMPTY

    @property
    def address(self) -> SegmentAddress:
        return SegmentAddress(pid=os.getpid(), fd=self._fd, specs=self._layout.specs)

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Copies `weights`, cast to the specs' types, into the version's slot. Nobody may change them meanwhile."""
        slot = version % 2
        self._slots.versions[slot][0] = WRITING
        targets = self._slots.tensors[slot]
        for position, spec in enumerate(self._layout.specs):
            target, weight = targets[spec.key], weights[spec.name].detach()
            assert weight.shape == target.shape, f"{spec.name}: {weight.shape} is not the generators' {target.shape}"
            target.copy_(weight)
            self._slots.fingerprints[slot][position] = fingerprint(target)
        self._slots.versions[slot][0] = version

    def close(self) -> None:
        os.close(self._fd)


class SharedMemorySubscriber:
    """A generator's end."""

    def __init__(self, address: SegmentAddress) -> None:
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR)
        try:
            self._layout = lay_out(address.specs)
            self._slots = _Slots(fd, self._layout)
        finally:
            os.close(fd)

    def fetch(self, version: int, into: Mapping[str, Tensor]) -> None:
        """Copies one version into `into`, which must not be in use, and proves that it arrived whole.

        Raises:
            Superseded: the slot holds another version.
            FingerprintMismatch: a tensor differs from what was published.
        """
        slot = version % 2
        self._require(slot, version)
        for spec in self._layout.specs:
            into[spec.key].copy_(self._slots.tensors[slot][spec.key])
        published = self._slots.fingerprints[slot].tolist()
        self._require(slot, version)
        for spec, expected in zip(self._layout.specs, published, strict=True):
            if fingerprint(into[spec.key]) != expected:
                raise FingerprintMismatch(f"{spec.name} of version {version} is not what the trainer published")

    def _require(self, slot: int, version: int) -> None:
        found = int(self._slots.versions[slot][0])
        if found != version:
            raise Superseded(f"wanted version {version}, its slot holds {found}")


def fingerprint(tensor: Tensor) -> int:
    """xxh3-64 of the bytes of `tensor`, which is contiguous."""
    return xxhash.xxh3_64_intdigest(tensor.detach().view(-1).view(torch.uint8).cpu().numpy().data)
