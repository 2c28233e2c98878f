"""`CheckpointStore`: atomic, verified, the newest valid one wins.

A checkpoint is a folder `step-00000100` with tensor files and `manifest.json`, which names every file with its size
and xxh3-128 digest and carries the run's state (data position, groups in flight). It is written under a temporary
name, synced to disk and renamed; a crash at any point leaves the previous ones untouched.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint is damaged; the message names the file and what is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One verified checkpoint."""

    folder: Path
    step: int
    state: dict[str, Any]
    """JSON state of trainer and controller."""
    tensors: dict[str, dict[str, Tensor]]
    """By file stem: `model`, `optimizer`."""


class CheckpointStore:
    """Checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
        """Writes checkpoint `step` and then removes all but the newest `keep`.

        Raises:
            OSError: the disk is full or not writable; nothing of the new checkpoint stays.
        """
        final = self._folder / f"step-{step:08d}"
        temporary = self._folder / f".writing-{step:08d}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            for stem, named in tensors.items():
                save_file({name: tensor.contiguous() for name, tensor in named.items()}, temporary / f"{stem}.safetensors")
            files = {path.name: _describe(path) for path in sorted(temporary.iterdir())}
            manifest = {"step": step, "state": dict(state), "files": files}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in (*temporary.iterdir(), temporary):
                _sync(path)
            shutil.rmtree(final, ignore_errors=True)  # a resumed run may reach a step again
            temporary.rename(final)
            _sync(self._folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self._folder / f"step-{old:08d}", ignore_errors=True)
        return final

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending; not yet verified."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._folder.glob("step-*"))

    def load_newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest valid checkpoint, and a sentence about each newer one that is damaged."""
        damaged = list[str]()
        for step in reversed(self.steps()):
            try:
                return load_checkpoint(self._folder / f"step-{step:08d}"), damaged
            except CheckpointError as error:
                damaged.append(str(error))
        return None, damaged


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies one checkpoint. Raises CheckpointError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            if _describe(folder / name) != expected:
                raise CheckpointError(f"{folder / name} differs from its manifest (truncated or changed)")
        tensors = {Path(name).stem: load_file(folder / name) for name in manifest["files"]}
        return Checkpoint(folder=folder, step=manifest["step"], state=manifest["state"], tensors=tensors)
    except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error!r}") from error


def _describe(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
