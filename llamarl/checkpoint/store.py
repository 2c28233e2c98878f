"""Checkpoints of a run: written by all ranks of its trainer, read in any layout, and exported.

A checkpoint is a folder `step-00000100` with a safetensors file of each rank and a `manifest.json`. The manifest begins
with its own digest. It lists every file with its size and xxh3-128 digest and the part of each tensor that it holds,
and carries the run's state (random numbers, position in the data, groups in flight).

`CheckpointStore.save` copies tensors, and a thread writes the copies under a temporary name and syncs them to the disk.
`commit` then adds the manifest, without which a checkpoint is invalid, and renames the folder. A crash at any point
leaves earlier checkpoints intact. All ranks must see the same folder. `Checkpoint` is a checkpoint on the disk.
`export_checkpoint` writes one as a Hugging Face model or as PEFT adapters.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from llamarl.checkpoint.folder import (
    MANIFEST,
    CheckpointError,
    check_sizes,
    describe,
    read_manifest,
    removable_steps,
    run_in_background,
    saved_steps,
    seems_whole,
    step_folder,
)
from llamarl.config import ConfigError, open_own
from llamarl.config.roles import LoraConfig
from llamarl.models.folder import load_shape
from llamarl.models.hf import load_model, save_tensors
from llamarl.models.lora import adapted_weights, adapter_of, merged, save_adapters
from llamarl.observability.files import sync
from llamarl.observability.spans import stage
from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import LayoutError
from llamarl.weight_sync.base import Exchange
from llamarl.weight_sync.layout import TensorSpec

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names in the header of https://github.com/safetensors/safetensors, "Format"."""
BLOCK_BYTES = 1 << 24
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
Texts = Callable[[int], Mapping[str, str]]
"""Returns the contents of further files by name, for the checkpoint of a step."""


class TensorBuffers:
    """Copies of tensors in memory that is kept: touching new memory takes several times as long as copying."""

    def __init__(self) -> None:
        self._kept = dict[str, Tensor]()

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies of the tensors on the CPU. The next call overwrites them."""
        for name, tensor in tensors.items():
            if name not in self._kept:
                self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()  # once, and before anything is written
        return {name: self._kept[name] for name in tensors}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], *, is_kept: bool = True) -> dict[str, Any]:
    """Writes contiguous CPU tensors. Returns the size and digest of the bytes that should be on the disk.

    safetensors' own writer makes a second copy of all tensors, and its file would have to be read again for the digest.

    Args:
        is_kept: sync the file to the disk.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    pieces: tuple[tuple[str, Box], ...]
    """Files and the part in each. Every element is in exactly one file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest is intact."""

    folder: Path
    step: int
    parent: dict[str, Any] | None
    """Step and digest of the checkpoint that this run saved or resumed before. None means that there was none."""
    state: dict[str, Any]
    """JSON state of trainer and controller."""
    files: Mapping[str, dict[str, Any]]
    """Size and digest by name."""
    tensors: Mapping[str, Saved]
    """Saved tensors by name: `PARAMETER`, and `PARAMETER:MOMENT` for the optimizer's state."""
    digest: str
    """Digest of the manifest."""
    _opened: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole tensors, by name."""
        return {name: saved.shape for name, saved in self.tensors.items()}

    def check_files(self, names: Sequence[str]) -> None:
        """Raises CheckpointError for a file that differs from the manifest."""
        for name in names:
            path = self.folder / name
            try:
                is_whole = describe(path) == self.files[name]
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            if not is_whole:
                raise CheckpointError(f"{path} differs from its manifest (truncated or changed)")

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Returns a part of a tensor, and reads only its bytes. None means the whole tensor."""
        saved = self.tensors[name]
        box = box or Box.whole(saved.shape)
        whole, num_found = torch.empty(box.shape, dtype=saved.dtype), 0
        for file, piece in saved.pieces:
            if part := piece.intersection(box):
                if file not in self._opened:
                    self._opened[file] = safe_open(self.folder / file, framework="pt")
                data = self._opened[file]
                is_cut = part != piece  # a scalar cannot be cut
                found = data.get_slice(name)[part.within(piece)] if is_cut else data.get_tensor(name)
                whole[part.within(box)] = found
                num_found += part.num_elements
        if num_found != box.num_elements:
            raise CheckpointError(f"{self.folder} holds {num_found} of the {box.num_elements} elements of {name} {box}")
        return whole


def load_checkpoint(folder: Path) -> Checkpoint:
    """Opens a checkpoint without verifying its files. Raises CheckpointError."""
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
    """Returns the rank that writes each part: among its holders, the rank with the least to write.

    Args:
        held: specs of each rank's tensors.

    Raises:
        LayoutError: no rank holds some elements of a tensor, or ranks disagree on its shape.
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


class CheckpointStore:
    """One rank's end of a run's checkpoints. All ranks make the same calls in the same order."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        rank: int = 0,
        num_ranks: int = 1,
        exchange: Exchange = lambda value: [value],
        keep_every: int = 0,
    ) -> None:
        """
        Args:
            keep: number of newest checkpoints to keep.
            keep_every: also keep checkpoints at, or first after, multiples of this number of steps. 0 means none.
        """
        self._folder = folder
        self._keep, self._keep_every = keep, keep_every
        self._rank = rank
        self._names = [f"shard-{one:05d}-of-{num_ranks:05d}.safetensors" for one in range(num_ranks)]
        self._exchange = exchange
        self._parent: dict[str, Any] | None = None
        self._damaged = set[int]()
        """Steps whose checkpoints were found damaged."""
        self._step = -1
        """Step of the newest save; -1 before the first."""
        self._state: Any = None
        """State for the manifest of the newest save: JSON."""
        self._planned = list[str]()
        """Digest of each rank's specs when the plan was made."""
        self._tensors = dict[str, tuple[tuple[int, ...], str, list[Any]]]()
        """Shape, type and pieces of each tensor, for the manifest."""
        self._own = set[tuple[str, Box]]()
        """Parts that this rank writes: name of the tensor and box."""
        self._copied = TensorBuffers()
        self._written: Future[dict[str, Any] | OSError] = Future()

    def save(
        self, step: int, shards: Mapping[str, tuple[TensorSpec, Tensor]], state: Mapping[str, Any]
    ) -> Future[dict[str, Any] | OSError]:
        """Copies the tensors that this rank writes, which may then change. Call `commit` once the future is done.

        Args:
            shards: the part of each tensor that this rank holds, by name. Several ranks may hold the same part.
            state: JSON. The state of rank 0 is saved.

        Returns:
            A future: size and digest of this rank's file on the disk, or the error.

        Raises:
            LayoutError: the ranks' parts do not make whole tensors.
        """
        if self._step >= 0:
            wait([self._written])  # the previous save was not committed
        if self._rank == 0:
            for leftover in self._folder.glob(".writing-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        self._step = step
        self._plan([replace(spec, dtype=DTYPES[tensor.dtype]) for spec, tensor in shards.values()])
        self._state = json.loads(json.dumps(state))  # the caller may change it
        own = self._copied({name: one for name, (spec, one) in shards.items() if (name, spec.box) in self._own})
        path = self._temporary / self._names[self._rank]
        self._written = run_in_background(lambda: _write(path, own))
        return self._written

    def _plan(self, held: list[TensorSpec]) -> None:
        """Plans which rank writes which part, again only if the specs of a rank have changed since the last save."""
        digests = self._exchange(xxhash.xxh3_128_hexdigest(repr(held).encode()))
        if digests == self._planned:
            return
        ranks = self._exchange(held)
        tensors = {spec.name: (spec.global_shape, spec.dtype, list[Any]()) for specs in ranks for spec in specs}
        plan = writers(ranks)
        for (name, box), writer in plan.items():
            tensors[name][2].append((writer, box.starts, box.stops))
        self._own = {part for part, writer in plan.items() if writer == self._rank}
        self._planned, self._tensors = digests, tensors

    def commit(self) -> Future[str] | None:
        """Makes the last saved checkpoint valid, and removes earlier ones that are not kept.

        Later checkpoints stay: a run returns to an earlier step only if they were damaged, and they must not replace
        the new one. The same holds for other damaged checkpoints.

        Returns:
            A future on rank 0: the checkpoint's folder, once it is on the disk. None on other ranks.

        Raises:
            OSError: a rank could not write; the future may raise it, too. Nothing of the new checkpoint remains.
        """
        files = self._exchange(self._written.result())
        failed = next((file for file in files if isinstance(file, OSError)), None)
        if failed is not None:
            if self._rank == 0:
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise failed
        if self._rank:
            return None
        manifest = {
            "step": self._step,
            "parent": self._parent,
            "state": self._state,
            "files": dict(zip(self._names, files, strict=True)),
            "tensors": self._tensors,
        }
        return run_in_background(lambda: self._publish(manifest))

    @property
    def _temporary(self) -> Path:
        return self._folder / f".writing-{self._step:08d}"

    def _publish(self, manifest: dict[str, Any]) -> str:
        step, temporary = self._step, self._temporary
        final, replaced = self._folder / step_folder(step), self._folder / f".replaced-{step:08d}"
        try:
            self._put_back()
            for leftover in self._folder.glob(".replaced-*"):
                shutil.rmtree(leftover)
            check_sizes(temporary, manifest["files"])
            text = json.dumps(manifest)
            digest = xxhash.xxh3_128_hexdigest(text.encode())
            (temporary / MANIFEST).write_text(f'{{"xxh3_128": "{digest}", {text[1:]}', encoding="utf-8")
            for path in (temporary / MANIFEST, temporary):
                sync(path)
            if final.exists():  # a resumed or interrupted run may reach a step again
                final.rename(replaced)
            temporary.rename(final)
            sync(self._folder)
        except CheckpointError as error:
            raise OSError(f"{error}; do all ranks see the same folder?") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._parent = {"step": step, "xxh3_128": digest}
        shutil.rmtree(replaced, ignore_errors=True)
        self._damaged.discard(step)
        past = [saved for saved in self.steps() if saved <= step]
        for old in removable_steps(past, self._keep, self._keep_every, self._counts):
            shutil.rmtree(self._folder / step_folder(old), ignore_errors=True)
        return str(final)

    def _counts(self, step: int) -> bool:
        return step not in self._damaged and seems_whole(self._folder / step_folder(step))

    def steps(self) -> list[int]:
        """Returns the steps with a checkpoint or the rest of one, ascending and not verified."""
        return saved_steps(self._folder, last="")

    def substore(self, name: str) -> CheckpointStore:
        """Returns a store in a subfolder of this one, for the same ranks."""
        num_ranks = len(self._names)
        return CheckpointStore(self._folder / name, self._keep, self._rank, num_ranks, self._exchange, self._keep_every)

    @stage("loads the checkpoint")
    def load_newest(
        self, beside: Sequence[CheckpointStore] = (), newest: float = math.inf
    ) -> tuple[Checkpoint | None, list[str]]:
        """Returns the newest valid checkpoint, and a sentence about each newer one that is damaged.

        Each rank verifies a share of the files.

        Args:
            beside: stores that must have a valid checkpoint of the same step.
            newest: ignore later steps.
        """
        stores, damaged = (*beside, self), list[str]()
        if self._rank == 0:
            for store in stores:
                store._put_back()
        held = [self._exchange(store.steps())[0] for store in stores]
        if not held[-1]:
            return None, []  # the stores in `beside` save first: the run may have ended in between
        for step in sorted({step for steps in held for step in steps if step <= newest}, reverse=True):
            try:
                return [store.load(step) for store in stores][-1], damaged
            except CheckpointError as error:
                damaged.append(str(error))
        return None, damaged

    def load(self, step: int) -> Checkpoint:
        """Returns the checkpoint of a step. Raises CheckpointError, on all ranks, if a rank finds it damaged."""
        checkpoint, fault = None, ""
        try:
            checkpoint = load_checkpoint(self._folder / step_folder(step))
            checkpoint.check_files(list(checkpoint.files)[self._rank :: len(self._names)])
        except CheckpointError as error:
            fault = str(error)
        if faults := list(filter(None, self._exchange(fault))):
            self._damaged.add(step)
            raise CheckpointError(faults[0])
        assert checkpoint is not None
        self._parent = {"step": step, "xxh3_128": checkpoint.digest}
        return checkpoint

    def _put_back(self) -> None:
        """Restores checkpoints that were renamed by a save which died before its new one was in place."""
        for replaced in self._folder.glob(".replaced-*"):
            final = self._folder / replaced.name.replace(".replaced", "step")
            if not final.exists():
                replaced.rename(final)


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any] | OSError:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_safetensors(path, tensors)
    except OSError as error:
        return error


def export_checkpoint(
    checkpoints: Path,
    base_model: str,
    folder: Path,
    step: int | None,
    lora: LoraConfig | None,
    merge: bool,
    *,
    dtype: torch.dtype = torch.float32,
    texts: Texts = lambda step: {},
) -> int:
    """Writes a checkpoint with the base model's small files and settings as a folder in Hugging Face format.

    Args:
        step: step of the checkpoint. None means the newest valid one.
        lora: the run's adapters, in which case the checkpoint holds adapters. None means that it holds a model.
        merge: merge adapters into the base model instead of writing only the adapters.
        dtype: type of the matrices, or of adapters that are not merged. Adapters are merged in float32 and the sum is
            rounded once, as generators do.
        texts: called with the exported step.

    Returns:
        The exported step.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or `folder` holds something else.
    """
    store = CheckpointStore(checkpoints, keep=1)
    if step is None:
        checkpoint, damaged = store.load_newest()
        if checkpoint is None:
            raise ConfigError("; ".join([f"{checkpoints} holds no valid checkpoint; let the run save one", *damaged]))
    else:
        if step not in (known := store.steps()):
            raise ConfigError(
                f"step {step} has no checkpoint in {checkpoints}; there are {', '.join(map(str, known)) or 'none'}"
            )
        try:
            checkpoint = store.load(step)
        except CheckpointError as error:
            raise ConfigError(f"--step {step}: {error}") from None
    weights = {name: checkpoint.read(name) for name in checkpoint.tensors if ":" not in name}
    if lora and not merge:
        save_adapters(weights, lora, base_model, folder, dtype=dtype, texts=texts(checkpoint.step))
        return checkpoint.step
    if lora:
        model = load_model(base_model, torch.float32, "cpu").state_dict()
        for name, _ in adapted_weights(load_shape(base_model), lora):
            model[name].copy_(merged(model[name], *adapter_of(weights, name), lora.scale))
        weights = model
    save_tensors(
        weights, load_shape(base_model), folder, base_model, base=base_model, dtype=dtype, texts=texts(checkpoint.step)
    )
    return checkpoint.step
