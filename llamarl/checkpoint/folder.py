"""The folders of checkpoints without their tensors, and without torch: what is there, what is whole, what may go."""

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
"""Folder, beside the trainer's checkpoints, of those of the critic."""
BLOCK_BYTES = 1 << 24


class CheckpointError(RuntimeError):
    """A checkpoint is damaged; the message names the file and what is wrong with it."""


def saved_steps(checkpoints: Path, last: str = MANIFEST) -> list[int]:
    """Steps that have a checkpoint, ascending; not yet verified. Without `last`, or what is left of one."""
    found = checkpoints.glob("step-" + "[0-9]" * 8)
    return sorted(int(path.name.removeprefix("step-")) for path in found if (path / last).exists())


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def digest_of(content: Mapping[str, Any]) -> str:
    """Digest of JSON, which keeps order and every digit: what is read again has the same."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())


def describe(path: Path) -> dict[str, Any]:
    """Size and digest of a file as it is."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in a checkpoint's folder, its own digest included. Raises CheckpointError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        digest = manifest.pop("xxh3_128")
        if digest != digest_of(manifest):
            raise CheckpointError(f"{folder / MANIFEST} differs from its own digest (changed)")
        return {"xxh3_128": digest, **manifest}
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def check_sizes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises CheckpointError for a file that is missing or shorter or longer than it was written: little to ask of
    terabytes, and most of what befalls them."""
    for name, file in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
        if size != file["bytes"]:
            raise CheckpointError(f"{folder / name} has {size} of {file['bytes']} bytes")


def seems_whole(folder: Path) -> bool:
    """Whether a checkpoint is whole, by its manifest and the sizes of its files."""
    try:
        check_sizes(folder, read_manifest(folder)["files"])
    except CheckpointError:
        return False
    return True


def superfluous(steps: Sequence[int], keep: int, keep_every: int, counts: Callable[[int], bool]) -> list[int]:
    """Steps, of these ascending ones, whose checkpoints may go: all before the newest `keep` that count, but for the
    first at or after each multiple of `keep_every`.

    One that does not count, being damaged, pushes out none that may be good.
    """
    num_good = 0
    for position in reversed(range(len(steps))):
        num_good += counts(steps[position])
        if num_good == keep:
            nth = [step // keep_every if keep_every else 0 for step in (0, *steps)]
            return [step for step, now, before in zip(steps[:position], nth[1:], nth, strict=False) if now == before]
    return []


_idle = list[SimpleQueue[Callable[[], None]]]()
"""Threads that have done their work."""
os.register_at_fork(after_in_child=_idle.clear)


def aside(work: Callable[[], T]) -> Future[T]:
    """Does it in a thread that no exit waits for, and which stays for the next: where memory has run out, a thread that
    is being started would be waited for without end."""
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
        _idle.append(queue)  # before whoever waits for this has more work
        tell()

    queue.put(run)
    return future


def _serve(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()
