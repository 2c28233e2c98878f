"""Which transport carries the weights: the fastest that works, measured on real tensors at the start, or a pinned one.

No torch here: the controller measures, executors send. Transports are modules of this folder, found by name.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from llamarl.cluster.api import CallTimeout, RemoteError
from llamarl.config.errors import ConfigError
from llamarl.weight_sync.layout import Address, TensorSpec

if TYPE_CHECKING:  # these load torch
    from llamarl.weight_sync.base import Exchange, Publisher, Subscriber, WriterPlan

SAMPLE_BYTES = 64 << 20
REPEATS = 3
MARGIN = 1.5
"""One that is slower by no more than this is taken before those after it in `CLASSES`: small models measure noise."""
CLASSES = {"shared_memory": "SharedMemory", "p2p": "P2p", "file": "File"}
"""What the classes of each module begin with."""
DELTA = ("p2p", "file")
"""Those that can send only what changed; shared memory sends nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What one transport did with the sample."""

    transport: str
    seconds: float | None
    """Median of a sync, from publishing to proved on every generator; None when it failed."""
    num_bytes: int
    """Of the sample, over all generator ranks."""
    failure: str = ""
    """Why it cannot be used."""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The transport of a run, and why."""

    transport: str
    measurements: tuple[Measurement, ...]
    """Empty when the transport was pinned."""

    def table(self) -> list[str]:
        """A line per candidate, fastest first."""
        return [
            f"{'*' if found.transport == self.transport else ' '} {found.transport:<14}"
            + (f"{found.bytes_per_s / 1e9:8.2f} GB/s" if found.seconds is not None else f"  {found.failure}")
            for found in sorted(self.measurements, key=lambda found: -found.bytes_per_s)
        ]


def candidates(same_host: bool, delta: bool = False) -> tuple[str, ...]:
    """What can work between trainer and generators. Weights of GPUs go through the hosts' memory."""
    names = DELTA if delta else tuple(CLASSES)
    return names if same_host else tuple(name for name in names if name != "shared_memory")


def sample(specs: Sequence[TensorSpec], max_bytes: int = SAMPLE_BYTES) -> tuple[TensorSpec, ...]:
    """Some tensors of each size, in their order: whole ones, evenly spread, about `max_bytes` of them."""
    total = sum(spec.num_bytes for spec in specs)
    chosen, seen, taken = set[str](), 0, 0
    for spec in specs:
        seen += spec.num_bytes
        if spec.part == "values" and (taken < max_bytes * seen / max(1, total) or total <= max_bytes):
            chosen.add(spec.name)
            taken += spec.num_bytes
    return tuple(spec for spec in specs if spec.name in chosen)


async def select(
    pinned: str, names: Iterable[str], sync: Callable[[str], Awaitable[None]], num_bytes: int
) -> Selection:
    """The transport to use.

    `sync(name)` publishes the sample through a transport and has all generators fetch and prove it. The first time
    is not counted: memory is mapped and connections are made in it.

    Raises:
        ConfigError: none works; gives each one's failure.
    """
    if pinned != "auto":
        return Selection(transport=pinned, measurements=())
    found = tuple([await _measure(name, sync, num_bytes) for name in names])
    working = [one for one in found if one.seconds is not None]
    if not working:
        failures = "; ".join(f"{one.transport}: {one.failure}" for one in found)
        raise ConfigError(f"`weight_sync.transport = 'auto'` finds none that works here ({failures})")
    fastest = max(one.bytes_per_s for one in working)
    chosen = next(one for one in working if one.bytes_per_s * MARGIN >= fastest)
    return Selection(transport=chosen.transport, measurements=found)


async def _measure(name: str, sync: Callable[[str], Awaitable[None]], num_bytes: int) -> Measurement:
    clock, times = asyncio.get_running_loop().time, list[float]()
    try:
        for _ in range(1 + REPEATS):
            start_s = clock()
            await sync(name)
            times.append(clock() - start_s)
    except (RemoteError, CallTimeout) as error:
        return Measurement(transport=name, seconds=None, num_bytes=num_bytes, failure=str(error.__cause__ or error))
    return Measurement(transport=name, seconds=statistics.median(times[1:]), num_bytes=num_bytes)


def open_publisher(transport: str, plan: WriterPlan, exchange: Exchange, **options: Any) -> Publisher:
    """A trainer rank's end of a transport; all ranks call this together."""
    return _class(transport, "Publisher", options)(plan, exchange, **options)


def open_subscriber(address: Address, specs: Sequence[TensorSpec], rank: int, **options: Any) -> Subscriber:
    """A generator rank's end of what publishes at `address`."""
    return _class(address.transport, "Subscriber", options)(specs, rank, **options)


def _class(transport: str, end: str, options: dict[str, Any]) -> Any:
    if transport not in CLASSES:
        raise ConfigError(f"`weight_sync.transport = {transport!r}` is unknown; use auto, {', '.join(CLASSES)}")
    if transport not in DELTA and options.pop("delta", False):
        cause = f"`weight_sync.delta = true` saves nothing with weight_sync.transport = {transport!r}"
        raise ConfigError(f"{cause}, which sends no weights; use delta = false, or transport = 'p2p' or 'file'")
    return getattr(import_module(f"llamarl.weight_sync.{transport}"), CLASSES[transport] + end)
