"""`Mirror`: the newest states of one rank in this host's memory, where they outlive its process, and in another host's
memory, where they outlive the host.

A checkpoint covers the loss of all machines, and is up to `checkpoint.every_steps` old. The mirror covers the loss of a
process or a host, and is at most one step old. Each state is a file in a folder in memory, which belongs to the process
that started the executor and is removed with it. A copy is sent to a keeper (`keeper.py`) on another host, if there is
one. New processes resume from the newest state that all of them can read completely: each from its own part or, in
another layout, from all parts.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from llamarl.checkpoint import keeper
from llamarl.checkpoint.folder import describe, run_in_background
from llamarl.checkpoint.keeper import KEPT, Place
from llamarl.checkpoint.store import TORCH_DTYPES, Checkpoint, Saved, TensorBuffers, write_safetensors
from llamarl.config.errors import ConfigError
from llamarl.distributed.links import BROKEN, own_address
from llamarl.sharding.box import Box
from llamarl.weight_sync.base import Exchange
from llamarl.weight_sync.layout import TensorSpec

Shards = Mapping[str, tuple[TensorSpec, Tensor]]
Elsewhere = Sequence[tuple[Place, Mapping[str, Sequence[int]]]]
"""Keepers, each with its steps of each part."""


class Mirror:
    """One rank's end. All ranks call every method but `save` together."""

    def __init__(
        self, folder: Path, rank: int, num_ranks: int, exchange: Exchange, keepers: Iterable[Place] = ()
    ) -> None:
        """
        Args:
            folder: the executor's folder in memory.
            keepers: keepers of hosts, including this one. The first are asked first to keep states for this one.
        """
        self._executor, self._rank, self._num_ranks = folder, rank, num_ranks
        self._folder = folder / f"{rank}-of-{num_ranks}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._exchange = exchange
        self._copied = TensorBuffers()
        self._written: Future[None] | None = None
        self.choose_keepers(keepers)

    def choose_keepers(self, keepers: Iterable[Place]) -> None:
        """Chooses which other hosts keep states for this one from now on. Hosts without a rank of the executor are
        preferred."""
        everywhere, own = self._exchange(own_address()), own_address()
        self._keepers = [(address, secret) for address, secret in keepers]
        others = [one for one in self._keepers if _host(one) != own]
        able = [one for one in others if _host(one) not in everywhere] or others
        self._away = deque(able)
        self._away.rotate(-self._rank)

    def check_space(self, num_bytes: int) -> None:
        """Raises ConfigError if this rank's states of `num_bytes` do not fit into memory here or at its keeper."""
        wanted = self._exchange((self._away[0] if self._away else None, num_bytes))
        needed, free = (KEPT + 1) * num_bytes, shutil.disk_usage(self._folder).free
        if needed > free:
            raise ConfigError(
                f"checkpoint.mirror = true needs {needed / 2**30:.2g} GiB in {self._executor}, and "
                f"{free / 2**30:.2g} GiB are free; make it larger, or leave the mirror out"
            )
        if self._away:
            needed = (KEPT + 1) * sum(size for place, size in wanted if place == self._away[0])
            with suppress(*BROKEN):  # a keeper that is gone is skipped when states are sent
                free = keeper.ask(self._away[0], "free")
                if needed > free:
                    raise ConfigError(
                        f"checkpoint.mirror = true needs {needed / 2**30:.2g} GiB on {_host(self._away[0])}, which "
                        f"keeps the state of {self._executor.name}, and {free / 2**30:.2g} GiB are free in its "
                        "memory; make /dev/shm there larger, or leave the mirror out"
                    )

    def save(self, step: int, shards: Shards, state: Mapping[str, Any]) -> None:
        """Copies this rank's tensors and writes them in the background. Does nothing while the previous state is being
        written.

        Args:
            state: JSON.
        """
        if self._written is not None:
            if not self._written.done():
                return
            if error := self._written.exception():
                sys.stdout.write(f"no mirror of this step: {error}\n")
        own = self._copied({name: tensor for name, (_, tensor) in shards.items()})
        about = {
            "shapes": {name: spec.global_shape for name, (spec, _) in shards.items()},
            "boxes": {name: (spec.box.starts, spec.box.stops) for name, (spec, _) in shards.items()},
            "state": state,
        }
        self._written = run_in_background(lambda: self._write(step, own, json.dumps(about)))

    def _write(self, step: int, tensors: Mapping[str, Tensor], about: str) -> None:
        """Writes a state. Raises OSError if memory is full here, or no other host keeps it."""
        path = _state(self._folder, step)
        written = write_safetensors(path.with_suffix(".tensors"), tensors, is_kept=False)
        keeper.complete(path, json.dumps(written | {"about": about}))
        reasons, away = list[str](), self._away
        for _ in range(len(away)):
            try:
                keeper.send_state(away[0], path)
                return
            except BROKEN as error:
                reasons.append(f"{_host(away[0])}: {error}")
                away.rotate(-1)
        if reasons:
            raise keeper.NotKept(f"no other host can keep it ({'; '.join(reasons)})")

    def load(self, newest: int) -> State | Checkpoint | None:
        """Returns the newest state up to step `newest` that all ranks can read completely; of the same step, that of
        this layout. Returns None if there is none."""
        elsewhere: Elsewhere = self._exchange(list(self._ask_all()) if self._rank == 0 else [])[0]
        can = [one for one in self._candidates(elsewhere) if one[0] <= newest]
        everyones = self._exchange(can)
        common = set(everyones[0]).intersection(*everyones)
        for step, num in sorted(common, key=lambda one: (one[0], one[1] == self._num_ranks), reverse=True):
            self._bring(step, num, elsewhere)
            self._exchange(None)  # another rank of this host may fetch files that are read here
            state = self._read(step) if num == self._num_ranks else self._read_all(step, num)
            if all(self._exchange(state is not None)):
                return state
        return None

    def _ask_all(self) -> Iterable[tuple[Place, dict[str, list[int]]]]:
        for one in self._keepers:
            with suppress(*BROKEN):  # the keeper is gone
                yield one, keeper.ask(one, "held", "/".join(self._executor.parts[-2:]))

    def _candidates(self, elsewhere: Elsewhere) -> list[tuple[int, int]]:
        """Returns steps and numbers of ranks whose states this rank can read completely."""
        steps = dict[str, set[int]]()
        for there in (keeper.held(self._executor), *(there for _, there in elsewhere)):
            for part, found in there.items():
                steps.setdefault(part, set()).update(found)
        layouts = {int(part.partition("-of-")[2]) for part in steps}
        wanted = {num: [steps.get(part, set()) for part in self._parts(num)] for num in layouts}
        return sorted((step, num) for num, held in wanted.items() for step in set.intersection(*held))

    def _parts(self, num: int) -> list[str]:
        """Returns the parts that this rank needs of a state of `num` ranks."""
        return [self._folder.name] if num == self._num_ranks else [f"{rank}-of-{num}" for rank in range(num)]

    def _bring(self, step: int, num: int, elsewhere: Elsewhere) -> None:
        """Fetches missing parts. Parts that all ranks need are fetched by the first rank of each host."""
        hosts = self._exchange(own_address())
        if num != self._num_ranks and hosts.index(own_address()) != self._rank:
            return
        for part in self._parts(num):
            path = _state(self._executor / part, step)
            for one in [] if path.exists() else [one for one, there in elsewhere if step in there.get(part, ())]:
                with suppress(*BROKEN):
                    keeper.fetch(one, path)
                    break

    def _read(self, step: int) -> State | None:
        path = _state(self._folder, step)
        if (about := _about(path)) is None:
            return None
        return State(step, path.with_suffix(".tensors"), about["shapes"], about["state"])

    def _read_all(self, step: int, num: int) -> Checkpoint | None:
        """Returns a state of another layout as if it were on the disk. None means that it is incomplete."""
        pieces, shapes, dtypes = dict[str, dict[Box, str]](), dict[str, tuple[int, ...]](), dict[str, Any]()
        state = dict[str, Any]()
        for part in self._parts(num):
            path = _state(self._executor / part, step)
            if (about := _about(path)) is None:
                return None
            state, file = about["state"], f"{part}/{path.with_suffix('.tensors').name}"
            with safe_open(self._executor / file, framework="pt") as data:
                for name, (starts, stops) in about["boxes"].items():
                    shapes[name] = tuple(about["shapes"][name])
                    dtypes[name] = TORCH_DTYPES[data.get_slice(name).get_dtype()]
                    pieces.setdefault(name, {}).setdefault(Box(tuple(starts), tuple(stops)), file)
        tensors = {
            name: Saved(shape=shapes[name], dtype=dtypes[name], pieces=tuple((file, box) for box, file in of.items()))
            for name, of in pieces.items()
        }
        return Checkpoint(
            folder=self._executor, step=step, parent=None, state=state, files={}, tensors=tensors, digest=""
        )


def _host(place: Place) -> str:
    return place[0].rpartition(":")[0]


def _state(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _about(path: Path) -> dict[str, Any] | None:
    """Returns the text of a state. None means that the state is incomplete."""
    with suppress(OSError, ValueError, KeyError):
        written = json.loads(path.read_text())
        about = json.loads(written.pop("about"))
        if describe(path.with_suffix(".tensors")) == written:
            return about
    return None


class State:
    """State of one rank at one step, read from its mirror."""

    def __init__(self, step: int, path: Path, shapes: dict[str, list[int]], state: dict[str, Any]) -> None:
        self.step, self.state = step, state
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        """Shapes of the whole tensors, by name."""
        self._tensors = safe_open(path, framework="pt")

    def read(self, name: str, _: Box) -> Tensor:
        """Returns the part of a tensor that this rank held."""
        return self._tensors.get_tensor(name)
