"""Which transport carries the weights: the fastest that works, measured on real tensors at the start, or a pinned one.

No torch here: the controller measures and chooses, executors send.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from llamarl.cluster.api import CallTimeout, RemoteError
from llamarl.config.errors import ConfigError
from llamarl.config.ref import PARTS, check_part, members, modules
from llamarl.weight_sync.layout import Address, TensorSpec

if TYPE_CHECKING:  # these load torch
    from llamarl.weight_sync.base import Publisher, Subscriber
    from llamarl.weight_sync.copying import Room

TRANSPORTS = "llamarl.weight_sync.transports"
"""The family; the part `cuda` has a member of it."""
OF_GPUS = f"{PARTS}.cuda."
"""Modules that are not loaded for a trainer elsewhere."""
IN_PLACE = "in_place"
"""Taken where it works: others need memory that the run does not count on."""
SAMPLE_BYTES = 64 << 20
REPEATS = 3
MARGIN = 1.5
"""One that is slower by no more than this is taken before those of a larger `RANK`: small models measure noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Measurement of one transport, with a sample of the weights."""

    transport: str
    seconds: float | None
    """Median of a sync, from publishing to proved on every generator; None when it failed."""
    num_bytes: int
    """Size of the sample in bytes, over all generator ranks."""
    failure: str = ""
    """Why it cannot be used."""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The transport to some generators, and why."""

    transport: str
    measurements: tuple[Measurement, ...]
    """Empty when the transport was pinned."""
    same_host: bool = True
    """Whether these generators are on the trainer's host."""

    def table(self) -> list[str]:
        """A line per candidate, fastest first."""
        return [
            f"{'*' if found.transport == self.transport else ' '} {found.transport:<14}"
            + (f"{found.bytes_per_s / 1e9:8.2f} GB/s" if found.seconds is not None else f"  {found.failure}")
            for found in sorted(self.measurements, key=lambda found: -found.bytes_per_s)
        ]


def names() -> list[str]:
    """The transports of this package: a file each."""
    return members(TRANSPORTS)


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
    chosen = next(one for one in working if one.transport == IN_PLACE or one.bytes_per_s * MARGIN >= fastest)
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


def check_name(transport: str) -> None:
    """Raises ConfigError: this package has no such transport, or this installation lacks its part."""
    if ":" not in transport and transport not in ("auto", *names()):
        check_part(transport, TRANSPORTS, "weight_sync.transport")
        raise ConfigError(
            f"`weight_sync.transport = {transport!r}` is unknown; use auto, {', '.join(names())} or package.module:Name"
        )


def candidates(
    same_host: bool, same_process: bool, delta: bool, on_gpu: bool = False, in_place: bool = False
) -> list[str]:
    """Transports that can work between trainer and generators, in the order of preference. Loads torch.

    Args:
        in_place: generators can serve from the trainer's own weights.
        on_gpu: the trainer is on one.
    """
    own = [name for name, module in modules(TRANSPORTS).items() if on_gpu or not module.startswith(OF_GPUS)]
    ends = {name: publisher_class(name) for name in sorted(own)}
    able = [
        name
        for name, end in ends.items()
        if (same_host or end.TRIED_ACROSS_HOSTS) and (same_process <= end.WITHIN_PROCESS)
        if delta <= end.TAKES_DELTA and on_gpu >= end.ON_DEVICE and in_place >= end.IN_PLACE
    ]
    return sorted(able, key=lambda name: ends[name].RANK)


def publisher_class(transport: str) -> type[Publisher]:
    """Raises ConfigError: there is no such transport."""
    return _ends(transport)[0]


def open_subscriber(
    address: Address,
    specs: Sequence[TensorSpec],
    rank: int,
    delta: bool = False,
    room: Callable[[Sequence[TensorSpec]], Room] | None = None,
    **options: Any,
) -> Subscriber:
    """A generator rank's end of what publishes at `address`; with `delta`, changes are taken where they are sent.

    Args:
        room: of the generator's device, for transports that bring weights there.
        options: the transport's own.
    """
    publisher, subscriber = _ends(address.transport)
    if room is not None and publisher.ON_DEVICE:
        options["room"] = room(specs)
    return subscriber(specs, rank, delta and publisher.TAKES_DELTA, **options)


class Reader:
    """A generator rank's end of whatever publishes: a publisher that was started anew gets a new subscriber."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        rank: int,
        subscribe: Callable[..., Subscriber] = open_subscriber,
        **options: Any,
    ) -> None:
        """
        Args:
            subscribe: takes address, specs, rank and options, as `open_subscriber` does.
        """
        self.specs = tuple(specs)
        self._subscribe = partial(subscribe, specs=self.specs, rank=rank, **options)
        self._publisher = ""
        self._subscriber: Subscriber | None = None

    def at(self, address: Address) -> Subscriber:
        """The subscriber that fetches from there."""
        if self._subscriber is None or self._publisher != address.publisher:
            self.close()
            self._subscriber, self._publisher = self._subscribe(address), address.publisher
        return self._subscriber

    def close(self) -> None:
        """Leaves tensors that were fetched alone; may be called again."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None


def _ends(transport: str) -> tuple[type[Publisher], type[Subscriber]]:
    """The classes `<Name>Publisher` and `<Name>Subscriber` of the file `<name>.py`, or of `package.module:Name`."""
    module, _, name = transport.partition(":")
    if not name:
        check_name(transport)
        module, name = modules(TRANSPORTS)[transport], "".join(map(str.capitalize, transport.split("_")))
    try:
        found = import_module(module)
        return getattr(found, f"{name}Publisher"), getattr(found, f"{name}Subscriber")
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"`weight_sync.transport = {transport!r}` cannot be loaded: {error}") from error
