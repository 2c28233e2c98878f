"""Transport through a folder that trainer and generators share, on tmpfs or disk.

There is one safetensors file per writer and layout. With one trainer rank, a file holds whole tensors under their
names, which any engine can load. With several, each file holds the rank's parts, whose places are in its metadata. A
file is renamed when it is complete. The newest two versions and those in use are kept.

With `delta`, another file holds the changes since each version in use, for tensors whose changes are smaller. A
generator that has fetched that version reads this file, and only the rest of the other one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from llamarl.sharding.box import Box
from llamarl.weight_sync.base import (
    CopyingSubscriber,
    Exchange,
    Publisher,
    Superseded,
    TransferFailed,
    VersionRequest,
    WriterPlan,
    WrittenBox,
    part_of,
)
from llamarl.weight_sync.delta import encode
from llamarl.weight_sync.layout import Address, TensorSpec


def file_name(version: int, digest: str, rank: int, base: int | None = None) -> str:
    """Returns the name of a file with a version's weights, or with their changes since `base`."""
    since = "" if base is None else f"-since-{base}"
    return f"version-{version}{since}-{digest}-{rank}.safetensors"


class FilePublisher(Publisher):
    """Rank 0 clears the folder first."""

    RANK, TAKES_DELTA = 2, True
    TRIED_ACROSS_HOSTS = False  # a folder that hosts share may be as slow as its server

    def __init__(self, plan: WriterPlan, exchange: Exchange, folder: Path, **options: Any) -> None:
        super().__init__(plan, exchange, folder, **options)
        self._own = folder
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
        bases = [held for held in self._written if held in in_use and held != version] if self._delta else []
        # The version may be published again, with changes since other versions.
        paths = [*self._written.get(version, ())]
        for number in range(len(self._plan.layouts)):
            paths += self._write(version, number, weights, bases)
        self._written[version] = list(dict.fromkeys(paths))
        return self._address

    def _write(self, version: int, number: int, weights: Mapping[str, Tensor], bases: Sequence[int]) -> list[Path]:
        plan, layout = self._plan, self._plan.layouts[number]
        proof = np.zeros((2, len(layout.specs)), np.uint64)
        parts = {_name(layout.specs[part.tensor], part): part for part in plan.parts[number]}
        tensors = {name: _empty(layout.specs[part.tensor], part) for name, part in parts.items()}
        targets = zip(parts.values(), tensors.values(), strict=True)
        plan.write(number, version, weights, targets, proof)
        metadata = {
            "publisher": self._address.publisher,
            "proof": json.dumps(proof.tolist()),
            "parts": json.dumps({name: (part.tensor, part.box.starts, part.box.stops) for name, part in parts.items()}),
        }
        paths = list[Path]()
        for base in bases:
            changed = _changes(self._own / file_name(base, layout.digest, plan.rank), tensors)
            if changed:  # safetensors cannot read a file without tensors
                paths.append(_save(self._own / file_name(version, layout.digest, plan.rank, base), changed, {}))
        # Last: a reader that finds this file finds all of them.
        return [*paths, _save(self._own / file_name(version, layout.digest, plan.rank), tensors, metadata)]

    def close(self) -> None:
        for path in (path for paths in self._written.values() for path in paths):
            path.unlink()
        self._written = {}


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> Path:
    unfinished = path.with_suffix(".safetensors.part")
    save_file(dict(tensors), unfinished, metadata)
    return unfinished.replace(path)


def _changes(base: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the changes since the version in `base` as `NAME#NUMBER`, for tensors whose changes are smaller than the
    tensor."""
    changed = dict[str, Tensor]()
    with safe_open(base, framework="pt") as file:
        for name, tensor in tensors.items():
            number, pieces = encode(file.get_tensor(name), tensor)
            if number < tensor.numel():
                changed[f"{name}#{number}"] = torch.cat(pieces)
    return changed


def _empty(spec: TensorSpec, part: WrittenBox) -> Tensor:
    return torch.empty(spec.shape_of(part.box), dtype=getattr(torch, spec.dtype))


def _name(spec: TensorSpec, part: WrittenBox) -> str:
    """Returns the tensor's own name if the part is the whole tensor."""
    return spec.key if part.box == spec.box else f"{spec.key}@{','.join(map(str, part.box.starts))}"


class FileSubscriber(CopyingSubscriber):
    """Copies the parts of all writers into one tensor each."""

    def receive(self, request: VersionRequest, address: Address) -> tuple[np.ndarray, int]:
        folder, digest, version = Path(self.place_in(address)), self.layout.digest, request.version
        proofs = np.zeros((address.num_writers, 2, len(self.layout.specs)), np.uint64)
        num_bytes = 0
        for writer in range(address.num_writers):
            path, base = folder / file_name(version, digest, writer), request.base.version
            changes = {} if base is None else _read_changes(folder / file_name(version, digest, writer, base))
            try:
                proofs[writer], size = self._read(path, address.publisher, request, changes)
            except FileNotFoundError as error:
                raise Superseded(f"version {version} of trainer rank {writer} does not exist: {path}") from error
            num_bytes += size
        return proofs, num_bytes

    def _read(
        self, path: Path, publisher: str, request: VersionRequest, changes: Mapping[str, tuple[int, Tensor]]
    ) -> tuple[list[list[int]], int]:
        """Reads one writer's file. Returns its proof and the number of read bytes."""
        num_bytes = 0
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            if metadata["publisher"] != publisher:
                raise TransferFailed(f"{path} was written by another publisher than the requested one")
            for name, (index, starts, stops) in json.loads(metadata["parts"]).items():
                if request.only is not None and index not in request.only:
                    continue
                part = WrittenBox(tensor=index, box=Box(tuple(starts), tuple(stops)))
                if name in changes:
                    number, message = changes[name]
                    self.put(request, part, number, message)
                    num_bytes += message.nbytes
                else:
                    target = part_of(self.layout, request.tensors, part)
                    target.copy_(file.get_tensor(name))
                    num_bytes += target.nbytes
            return json.loads(metadata["proof"]), num_bytes

    def close(self) -> None:
        """Does nothing, as no file stays open."""


def _read_changes(path: Path) -> dict[str, tuple[int, Tensor]]:
    """Returns the number of changes and their message, by name. Returns nothing if the file does not exist."""
    if not path.exists():
        return {}
    with safe_open(path, framework="pt") as file:
        keys = {key: key.rpartition("#") for key in file.keys()}  # noqa: SIM118
        return {name: (int(number), file.get_tensor(key)) for key, (name, _, number) in keys.items()}
