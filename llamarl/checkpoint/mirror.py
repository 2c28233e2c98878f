"""`Mirror`: the newest states of one rank in this host's memory, which its process does not take along when it dies.

A checkpoint is for the loss of machines and is as far away as `checkpoint.every_steps`; this is for the loss of a
process, and at most a step away. A file of each state lies in a folder in memory, which belongs to whoever started the
process and goes with that one. New processes with the same layout go on from the newest state that all of them find.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from llamarl.checkpoint.files import TensorBuffers, write_safetensors
from llamarl.checkpoint.folder import aside, describe
from llamarl.config.errors import ConfigError
from llamarl.sharding.box import Box
from llamarl.weight_sync.base import Exchange
from llamarl.weight_sync.layout import TensorSpec

KEPT = 2
"""Newest states: the step of the newest one may have to be taken again."""
Shards = Mapping[str, tuple[TensorSpec, Tensor]]


class Mirror:
    """One rank's end; `load` is a call of all ranks."""

    def __init__(self, folder: Path, rank: int, num_ranks: int, exchange: Exchange) -> None:
        """`folder` is the executor's, in memory."""
        self._folder = folder / f"{rank}-of-{num_ranks}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._exchange = exchange
        self._copied = TensorBuffers()
        self._written: Future[None] | None = None

    def check_room(self, num_bytes: int) -> None:
        """Raises ConfigError when there is no room for states of so many bytes."""
        needed, free = (KEPT + 1) * num_bytes, shutil.disk_usage(self._folder).free
        if needed > free:
            raise ConfigError(
                f"checkpoint.mirror = true needs {needed / 2**30:.2g} GiB in {self._folder.parent}, and "
                f"{free / 2**30:.2g} GiB are free; make it larger, or leave the mirror out"
            )

    def save(self, step: int, shards: Shards, state: Mapping[str, Any]) -> None:
        """Copies what this rank holds, and writes it beside what comes next; nothing, while the last is still written.

        Args:
            state: JSON.
        """
        if self._written is not None:
            if not self._written.done():
                return
            if error := self._written.exception():
                sys.stdout.write(f"no mirror of this step: {error}\n")
        own = self._copied({name: tensor for name, (_, tensor) in shards.items()})
        about = {"shapes": {name: spec.global_shape for name, (spec, _) in shards.items()}, "state": state}
        self._written = aside(lambda: self._write(step, own, json.dumps(about)))

    def _write(self, step: int, tensors: Mapping[str, Tensor], about: str) -> None:
        """Raises OSError: there is no memory left."""
        path = self._folder / f"step-{step:08d}"
        written = write_safetensors(path.with_suffix(".tensors"), tensors, is_kept=False)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(written | {"about": about}))
        unfinished.rename(path)  # which makes it count
        for old in self._steps()[:-KEPT]:
            for left in self._folder.glob(f"step-{old:08d}*"):
                left.unlink()

    def _steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self._folder.glob("step-" + "[0-9]" * 8))

    def load(self, newest: int) -> State | None:
        """The newest state up to step `newest` that all ranks have whole."""
        held = self._exchange([step for step in self._steps() if step <= newest])
        for step in sorted(set(held[0]).intersection(*held), reverse=True):
            state = self._read(step)
            if all(self._exchange(state is not None)):
                return state
        return None

    def _read(self, step: int) -> State | None:
        path = self._folder / f"step-{step:08d}"
        with suppress(OSError, ValueError, KeyError):
            written = json.loads(path.read_text())
            about = json.loads(written.pop("about"))
            if describe(path.with_suffix(".tensors")) == written:
                return State(step, path.with_suffix(".tensors"), about["shapes"], about["state"])
        return None


class State:
    """State of one rank at one step, read from its mirror."""

    def __init__(self, step: int, path: Path, shapes: dict[str, list[int]], state: dict[str, Any]) -> None:
        self.step, self.state = step, state
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        """Shapes of the whole tensors, by name."""
        self._tensors = safe_open(path, framework="pt")

    def read(self, name: str, _: Box) -> Tensor:
        """The part of a tensor that this rank held."""
        return self._tensors.get_tensor(name)
