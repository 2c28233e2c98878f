"""`CheckpointStore`: atomic, verified, the newest valid one wins.

A checkpoint is a folder `step-00000100` with tensor files and `manifest.json`, which names every file with its size
and xxh3-128 digest, carries the run's state (data position, groups in flight) and begins with a digest of itself. It is
written under a temporary name, synced to disk and renamed; a crash at any point leaves the previous ones untouched.
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
        """Writes checkpoint `step`, and then removes all but `keep` of those up to it.

        Later ones stay: a run is only at an earlier step again when they were damaged, and they must not push it out.

        Raises:
            OSError: the disk is full or not writable; nothing of the new checkpoint stays.
        """
        self._put_back()
        for leftover in (*self._folder.glob(".writing-*"), *self._folder.glob(".replaced-*")):
            shutil.rmtree(leftover)
        final, replaced = self._folder / f"step-{step:08d}", self._folder / f".replaced-{step:08d}"
        temporary = self._folder / f".writing-{step:08d}"
        temporary.mkdir(parents=True)
        try:
            _write(temporary, step, tensors, state)
            if final.exists():  # a resumed or interrupted run may reach a step again
                final.rename(replaced)
            temporary.rename(final)
            _sync(self._folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in [saved for saved in self.steps() if saved <= step][: -self._keep]:
            shutil.rmtree(self._folder / f"step-{old:08d}", ignore_errors=True)
        return final

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending; not yet verified."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._folder.glob("step-" + "[0-9]" * 8))

    def load_newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest valid checkpoint, and a sentence about each newer one that is damaged."""
        self._put_back()
        damaged = list[str]()
        for step in reversed(self.steps()):
            try:
                return load_checkpoint(self._folder / f"step-{step:08d}"), damaged
            except CheckpointError as error:
                damaged.append(str(error))
        return None, damaged

    def _put_back(self) -> None:
        """Brings back a checkpoint that was moved aside by a save that did not live to put the new one in its place."""
        for replaced in self._folder.glob(".replaced-*"):
            final = self._folder / replaced.name.replace(".replaced", "step")
            if not final.exists():
                replaced.rename(final)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies one checkpoint. Raises CheckpointError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("xxh3_128") != _digest(manifest):
            raise CheckpointError(f"{folder / MANIFEST} differs from its own digest (changed)")
        for name, expected in manifest["files"].items():
            if _describe(folder / name) != expected:
                raise CheckpointError(f"{folder / name} differs from its manifest (truncated or changed)")
        tensors = {Path(name).stem: load_file(folder / name) for name in manifest["files"]}
        return Checkpoint(folder=folder, step=manifest["step"], state=manifest["state"], tensors=tensors)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def _write(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Tensor files and manifest, synced to disk."""
    for stem, named in tensors.items():
        path = folder / f"{stem}.safetensors"
        try:
            save_file({name: tensor.contiguous() for name, tensor in named.items()}, path)
        except SafetensorError as error:  # also how it reports a full disk
            raise OSError(f"{path} cannot be written: {error}") from error
    files = {path.name: _describe(path) for path in sorted(folder.iterdir())}
    manifest = {"step": step, "state": dict(state), "files": files}
    text = json.dumps({"xxh3_128": _digest(manifest), **manifest}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    for path in (*folder.iterdir(), folder):
        _sync(path)


def _digest(manifest: Mapping[str, Any]) -> str:
    """Of the manifest without its own digest. JSON keeps order and every digit, so what was read has the same."""
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest).encode())


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
