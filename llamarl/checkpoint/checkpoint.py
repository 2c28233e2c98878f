"""`Checkpoint`: one that is on the disk, whatever layout wrote it; ranks of any other read what they need of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from llamarl.checkpoint.files import DTYPES
from llamarl.checkpoint.folder import CheckpointError, describe, read_manifest
from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import LayoutError
from llamarl.weight_sync.layout import TensorSpec

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    pieces: tuple[tuple[str, Box], ...]
    """Files and the part that each holds; every element is in exactly one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest is whole."""

    folder: Path
    step: int
    parent: dict[str, Any] | None
    """Step and digest of the checkpoint that this run had saved or resumed before."""
    state: dict[str, Any]
    """JSON state of trainer and controller."""
    files: Mapping[str, dict[str, Any]]
    """Size and digest by name."""
    tensors: Mapping[str, Saved]
    """Saved tensors by name: `PARAMETER`, and `PARAMETER:MOMENT` for what the optimizer knows of it."""
    digest: str
    """Digest of the manifest."""
    _opened: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole tensors, by name."""
        return {name: saved.shape for name, saved in self.tensors.items()}

    def check_files(self, names: Sequence[str]) -> None:
        """Raises CheckpointError for a file that is not what the manifest says."""
        for name in names:
            path = self.folder / name
            try:
                is_whole = describe(path) == self.files[name]
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            if not is_whole:
                raise CheckpointError(f"{path} differs from its manifest (truncated or changed)")

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A part of a tensor (none: all of it), of which only these bytes are read."""
        saved = self.tensors[name]
        box = box or Box.whole(saved.shape)
        whole, num_found = torch.empty(box.shape, dtype=saved.dtype), 0
        for file, piece in saved.pieces:
            if part := piece.intersection(box):
                if file not in self._opened:
                    self._opened[file] = safe_open(self.folder / file, framework="pt")
                data = self._opened[file]
                is_cut = part != piece  # a scalar cannot be
                found = data.get_slice(name)[part.within(piece)] if is_cut else data.get_tensor(name)
                whole[part.within(box)] = found
                num_found += part.num_elements
        if num_found != box.num_elements:
            raise CheckpointError(f"{self.folder} holds {num_found} of the {box.num_elements} elements of {name} {box}")
        return whole


def load_checkpoint(folder: Path) -> Checkpoint:
    """Opens a checkpoint; its files are not verified yet. Raises CheckpointError."""
    manifest = read_manifest(folder)
    digest = manifest.pop("xxh3_128")
    try:
        files = list(manifest["files"])
        tensors = {
            name: Saved(
                shape=tuple(shape),
                dtype=TORCH_DTYPES[dtype],
                pieces=tuple((files[at], Box(tuple(starts), tuple(stops))) for at, starts, stops in pieces),
            )
            for name, (shape, dtype, pieces) in manifest.pop("tensors").items()
        }
        return Checkpoint(folder=folder, tensors=tensors, digest=digest, **manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def writers(held: Sequence[Sequence[TensorSpec]]) -> dict[tuple[str, Box], int]:
    """Which rank writes each part: of those that hold the same the one with the least to write.

    Args:
        held: by rank.

    Raises:
        LayoutError: nobody holds some elements of a tensor, or ranks disagree on its shape.
    """
    holders, shapes = defaultdict[tuple[str, Box], list[int]](list), dict[str, TensorSpec]()
    for rank, specs in enumerate(held):
        for spec in specs:
            if shapes.setdefault(spec.name, spec).global_shape != spec.global_shape:
                raise LayoutError(spec.name, f"rank {rank} has a part of {spec.global_shape}, another does not")
            if spec.box.num_elements:
                holders[spec.name, spec.box].append(rank)
    load, found, sizes = [0] * len(held), dict[tuple[str, Box], int](), defaultdict[str, int](int)
    for part, ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        name, box = part
        found[part] = min(ranks, key=load.__getitem__)
        load[found[part]] += box.num_elements
        sizes[name] += box.num_elements
    for name, spec in shapes.items():
        if sizes[name] != (whole := Box.whole(spec.global_shape).num_elements):
            raise LayoutError(name, f"the ranks hold {sizes[name]} of its {whole} elements")
    return found
