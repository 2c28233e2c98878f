"""`CheckpointStore`: the checkpoints of a run, written by all ranks of its trainer; the newest valid one wins.

A checkpoint is a folder `step-00000100`: a safetensors file of each rank, and `manifest.json`, which names every file
with its size and xxh3-128 digest, says which part of which tensor it holds, carries the run's state (random numbers,
data position, groups in flight) and begins with a digest of itself.

`save` copies tensors, and a thread writes the copies under a temporary name and syncs them to disk. `commit`, once all
ranks have, adds the manifest, without which nothing counts, and renames the folder: a crash at any point leaves the
previous ones untouched. All ranks must see the same folder.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from llamarl.checkpoint.checkpoint import Checkpoint, load_checkpoint, writers
from llamarl.checkpoint.files import DTYPES, TensorBuffers, write_safetensors
from llamarl.checkpoint.folder import (
    MANIFEST,
    CheckpointError,
    aside,
    check_sizes,
    saved_steps,
    seems_whole,
    step_folder,
    superfluous,
)
from llamarl.observability.files import sync
from llamarl.observability.spans import stage
from llamarl.sharding.box import Box
from llamarl.weight_sync.base import Exchange
from llamarl.weight_sync.layout import TensorSpec


class CheckpointStore:
    """One rank's end; all ranks make the same calls in the same order."""

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
            keep: newest checkpoints that stay.
            keep_every: those of multiples of so many steps stay too, or the first after them; 0: of none.
        """
        self._folder = folder
        self._keep, self._keep_every = keep, keep_every
        self._rank = rank
        self._names = [f"shard-{one:05d}-of-{num_ranks:05d}.safetensors" for one in range(num_ranks)]
        self._exchange = exchange
        self._parent: dict[str, Any] | None = None
        self._damaged = set[int]()
        """Steps whose checkpoints have been read and found so."""
        self._step = -1
        """Step of the newest save; -1: there has been none."""
        self._state: Any = None
        """State for the manifest of the newest save: JSON."""
        self._planned = list[str]()
        """Digest per rank of what it held when the plan was made."""
        self._tensors = dict[str, tuple[tuple[int, ...], str, list[Any]]]()
        """Shape, type and pieces of each, for the manifest."""
        self._own = set[tuple[str, Box]]()
        """Parts that this rank writes: name of the tensor and box."""
        self._copied = TensorBuffers()
        self._written: Future[dict[str, Any] | OSError] = Future()

    def save(
        self, step: int, shards: Mapping[str, tuple[TensorSpec, Tensor]], state: Mapping[str, Any]
    ) -> Future[dict[str, Any] | OSError]:
        """Copies what this rank has to write; then the tensors may change. `commit` comes when the answer is there.

        Args:
            shards: by name, the part of each tensor that this rank holds; others may hold the same.
            state: JSON; rank 0's counts.

        Returns:
            When this rank's file is on the disk, its size and digest, or why it is not.

        Raises:
            LayoutError: the ranks' parts do not make whole tensors.
        """
        if self._step >= 0:
            wait([self._written])  # nobody has committed it
        if self._rank == 0:
            for leftover in self._folder.glob(".writing-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        self._step = step
        self._plan([replace(spec, dtype=DTYPES[tensor.dtype]) for spec, tensor in shards.values()])
        self._state = json.loads(json.dumps(state))  # what it names may change, too
        own = self._copied({name: one for name, (spec, one) in shards.items() if (name, spec.box) in self._own})
        path = self._temporary / self._names[self._rank]
        self._written = aside(lambda: _write(path, own))
        return self._written

    def _plan(self, held: list[TensorSpec]) -> None:
        """Who writes what, anew when some rank holds something else than at the last save."""
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
        """Makes the checkpoint that was saved last one that counts, and removes those before it that nobody keeps.

        Later ones stay: a run is only at an earlier step again when they were damaged, and they must not push it out.
        Nor does any other damaged one.

        Returns:
            Its folder, when that is on the disk; None but on rank 0.

        Raises:
            OSError: a rank could not write, also by way of the future; nothing of the new checkpoint stays.
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
        return aside(lambda: self._publish(manifest))

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
        for old in superfluous(past, self._keep, self._keep_every, self._counts):
            shutil.rmtree(self._folder / step_folder(old), ignore_errors=True)
        return str(final)

    def _counts(self, step: int) -> bool:
        return step not in self._damaged and seems_whole(self._folder / step_folder(step))

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, or what is left of one, ascending; not yet verified."""
        return saved_steps(self._folder, last="")

    def beside(self, name: str) -> CheckpointStore:
        """One in a folder of this one, for the same ranks."""
        num_ranks = len(self._names)
        return CheckpointStore(self._folder / name, self._keep, self._rank, num_ranks, self._exchange, self._keep_every)

    @stage("loads the checkpoint")
    def load_newest(
        self, beside: Sequence[CheckpointStore] = (), newest: float = math.inf
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest valid checkpoint, and a sentence about each newer one that is damaged.

        Each rank verifies some of the files.

        Args:
            beside: they must have a valid checkpoint of the same step.
            newest: later ones are left out.
        """
        stores, damaged = (*beside, self), list[str]()
        if self._rank == 0:
            for store in stores:
                store._put_back()
        held = [self._exchange(store.steps())[0] for store in stores]
        if not held[-1]:
            return None, []  # those beside save first: the run may have ended in between
        for step in sorted({step for steps in held for step in steps if step <= newest}, reverse=True):
            try:
                return [store.load(step) for store in stores][-1], damaged
            except CheckpointError as error:
                damaged.append(str(error))
        return None, damaged

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of this step. Raises CheckpointError, on all ranks, when one of them finds it damaged."""
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
        """Brings back a checkpoint that was moved aside by a save that did not live to put the new one in its place."""
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
