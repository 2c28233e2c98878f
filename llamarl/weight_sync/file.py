"""Through a folder that trainer and generators see, on tmpfs or disk: one safetensors file per writer and layout.

With one trainer rank a file holds whole tensors under their names, which any engine can load. With several, each holds
its parts, which its metadata places. A file appears by renaming, complete or not at all; the newest two versions and
those in use are kept.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from llamarl.distributed.box import Box
from llamarl.weight_sync.base import (
    Buffers,
    Exchange,
    Part,
    Publisher,
    Subscriber,
    Superseded,
    TransferFailed,
    WriterPlan,
    part_of,
    shape_of,
    views,
    write_parts,
)
from llamarl.weight_sync.layout import Address, TensorSpec


def file_name(version: int, digest: str, rank: int) -> str:
    return f"version-{version}-{digest}-{rank}.safetensors"


class FilePublisher(Publisher):
    """`folder` is the same on all ranks; nothing else may lie in it."""

    def __init__(self, plan: WriterPlan, exchange: Exchange, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._written = dict[int, list[Path]]()
        folder.mkdir(parents=True, exist_ok=True)
        if plan.rank == 0:
            for left_over in folder.glob("*.safetensors*"):
                left_over.unlink()
        self._address = Address(
            transport="file",
            publisher=str(exchange(secrets.token_hex(8))[0]),
            num_writers=plan.num_writers,
            places={layout.digest: str(folder) for layout in plan.layouts},
        )

    def publish(self, version: int, weights: Mapping[str, Tensor], in_use: Collection[int]) -> Address:
        newest = max(self._written, default=version)
        for old in [held for held in self._written if held not in in_use and held != newest]:
            for path in self._written.pop(old):
                path.unlink()
        self._written[version] = [self._write(version, number, weights) for number in range(len(self._plan.layouts))]
        return self._address

    def _write(self, version: int, number: int, weights: Mapping[str, Tensor]) -> Path:
        plan, layout = self._plan, self._plan.layouts[number]
        proof = np.zeros((2, len(layout.specs)), np.uint64)
        parts = {_name(layout.specs[part.tensor], part): part for part in plan.parts[number]}
        tensors = {name: _empty(layout.specs[part.tensor], part) for name, part in parts.items()}
        write_parts(plan, number, weights, zip(parts.values(), tensors.values(), strict=True), proof)
        metadata = {
            "publisher": self._address.publisher,
            "proof": json.dumps(proof.tolist()),
            "parts": json.dumps({name: (part.tensor, part.box.starts, part.box.stops) for name, part in parts.items()}),
        }
        path = self._folder / file_name(version, layout.digest, plan.rank)
        unfinished = path.with_suffix(".safetensors.part")
        save_file(tensors, unfinished, metadata)
        return unfinished.replace(path)

    def close(self) -> None:
        for path in (path for paths in self._written.values() for path in paths):
            path.unlink()
        self._written = {}


def _empty(spec: TensorSpec, part: Part) -> Tensor:
    return torch.empty(shape_of(spec, part.box), dtype=getattr(torch, spec.dtype))


def _name(spec: TensorSpec, part: Part) -> str:
    """The tensor's own name where the part is all of it."""
    return spec.key if part.box == spec.box else f"{spec.key}@{','.join(map(str, part.box.starts))}"


class FileSubscriber(Subscriber):
    """Copies the parts of all writers together."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int) -> None:
        super().__init__(specs, rank)
        self._buffers = Buffers(self.layout.num_bytes, torch.device("cpu"))

    def fetch(self, version: int, address: Address) -> dict[str, Tensor]:
        tensors = views(self.layout, self._buffers.take())
        proofs = np.zeros((address.num_writers, 2, len(self.layout.specs)), np.uint64)
        for writer in range(address.num_writers):
            path = Path(self.place_in(address)) / file_name(version, self.layout.digest, writer)
            try:
                proofs[writer] = self._read(path, address.publisher, tensors)
            except FileNotFoundError as error:
                raise Superseded(f"version {version} of trainer rank {writer} is not there: {path}") from error
        self.prove(tensors, version, proofs)
        return tensors

    def _read(self, path: Path, publisher: str, tensors: Mapping[str, Tensor]) -> list[list[int]]:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            if metadata["publisher"] != publisher:
                raise TransferFailed(f"{path} was written by another publisher than the one asked for")
            for name, (index, starts, stops) in json.loads(metadata["parts"]).items():
                spec = self.layout.specs[index]
                part_of(spec, tensors[spec.key], Box(tuple(starts), tuple(stops))).copy_(file.get_tensor(name))
            return json.loads(metadata["proof"])

    def close(self) -> None:
        """Keeps no file open."""
