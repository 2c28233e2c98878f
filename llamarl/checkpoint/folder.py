"""Folders of checkpoints without their tensors: which exist, which are complete, and which may be removed. No torch."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import xxhash

T = TypeVar("T")
MANIFEST = "manifest.json"
CRITIC = "critic"
"""Folder of the critic's checkpoints, within the folder of the trainer's."""
BLOCK_BYTES = 1 << 24


class CheckpointError(RuntimeError):
    """A checkpoint is damaged. The message names the file and the fault."""


def saved_steps(checkpoints: Path, last: str = MANIFEST) -> list[int]:
    """Returns the steps with a checkpoint, ascending and not verified. An empty `last` includes incomplete
    checkpoints."""
    found = checkpoints.glob("step-" + "[0-9]" * 8)
    return sorted(int(path.name.removeprefix("step-")) for path in found if (path / last).exists())


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def digest_of(content: Mapping[str, Any]) -> str:
    """Returns the digest of JSON. Order and digits are kept, so content that is read again has the same digest."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())


def describe(path: Path) -> dict[str, Any]:
    """Returns the size and digest of a file on the disk."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint's folder, with its own digest. Raises CheckpointError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        digest = manifest.pop("xxh3_128")
        if digest != digest_of(manifest):
            raise CheckpointError(f"{folder / MANIFEST} differs from its own digest (changed)")
        return {"xxh3_128": digest, **manifest}
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def check_sizes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises CheckpointError for a file that is missing, truncated or too long. This check is fast for terabytes, and
    finds most faults."""
    for name, file in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
        if size != file["bytes"]:
            raise CheckpointError(f"{folder / name} has {size} of {file['bytes']} bytes")


def seems_whole(folder: Path) -> bool:
    """Returns whether a checkpoint is complete, by its manifest and the sizes of its files."""
    try:
        check_sizes(folder, read_manifest(folder)["files"])
    except CheckpointError:
        return False
    return True


def removable_steps(steps: Sequence[int], keep: int, keep_every: int, counts: Callable[[int], bool]) -> list[int]:
    """Returns the steps whose checkpoints may be removed: all before the newest `keep` valid ones, except the first at
    or after each multiple of `keep_every`.

    Args:
        steps: steps with a checkpoint, ascending.
        counts: returns whether the checkpoint of a step is valid. A damaged one replaces no valid one.
    """
    num_good = 0
    for position in reversed(range(len(steps))):
        num_good += counts(steps[position])
        if num_good == keep:
            nth = [step // keep_every if keep_every else 0 for step in (0, *steps)]
            return [step for step, now, before in zip(steps[:position], nth[1:], nth, strict=False) if now == before]
    return []


_idle = list[SimpleQueue[Callable[[], None]]]()
"""Idle threads."""
os.register_at_fork(after_in_child=_idle.clear)


def run_in_background(work: Callable[[], T]) -> Future[T]:
    """Runs `work` in a daemon thread, which is reused. If memory has run out, waiting for a new thread to start would
    never end."""
    future = Future[T]()
    future.set_running_or_notify_cancel()
    try:
        queue = _idle.pop()
    except IndexError:
        queue = SimpleQueue[Callable[[], None]]()
        threading.Thread(target=_serve, args=(queue,), name="checkpoint", daemon=True).start()

    def run() -> None:
        tell: Callable[[], None]
        try:
            tell = partial(future.set_result, work())
        except BaseException as error:
            tell = partial(future.set_exception, error)
        _idle.append(queue)  # before a caller that waits for this has more work
        tell()

    queue.put(run)
    return future


def _serve(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()
