"""Choice of the transport: a pinned one, or the fastest in a measurement with real tensors at the start.

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
    from llamarl.weight_sync.base import Publisher, Room, Subscriber

TRANSPORTS = "llamarl.weight_sync.transports"
"""The family. The part `cuda` has a member of it."""
OF_GPUS = f"{PARTS}.cuda."
"""Modules that are loaded only for a trainer on a GPU."""
IN_PLACE = "in_place"
"""Chosen whenever it works, because others need memory that the run did not plan for."""
BETWEEN_GPUS, LEAST_BYTES_PER_S = ("cuda_ipc", "nixl"), 5e9
"""Transports between GPUs, and their smallest plausible speed within a host. PCIe has 25 GB/s; UCX that falls back to
TCP has 0.5, and reports no error."""
SAMPLE_BYTES = 64 << 20
REPEATS = 3
MARGIN = 1.5
"""A transport that is slower by at most this factor is chosen if its `RANK` is lower: small models measure noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Measurement of one transport with a sample of the weights."""

    transport: str
    seconds: float | None
    """Median duration of a sync, from publishing to verification on every generator. None means that it failed."""
    num_bytes: int
    """Size of the sample over all generator ranks."""
    failure: str = ""
    """Why it cannot be used. Empty means that it can."""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The transport to some generators, and the reason."""

    transport: str
    measurements: tuple[Measurement, ...]
    """Empty if the transport was pinned."""
    same_host: bool = True
    """Whether these generators are on the trainer's host."""

    @property
    def warning(self) -> str:
        """Text if GPUs of one host exchange weights suspiciously slowly, else ""."""
        found = next((one for one in self.measurements if one.transport == self.transport), None)
        if found is None or not self.same_host or self.transport not in BETWEEN_GPUS:
            return ""
        if found.num_bytes < SAMPLE_BYTES // 2 or found.bytes_per_s >= LEAST_BYTES_PER_S:
            return ""
        return (
            f"weights move between GPUs of this host by {self.transport} at {found.bytes_per_s / 1e9:.2g} GB/s, which "
            "NVLink and PCIe exceed; look for a fallback to TCP in the log of UCX (UCX_PROTO_INFO=y), and compare "
            "`nvidia-smi topo -m`"
        )

    def table(self) -> list[str]:
        """Returns a line per candidate, fastest first."""
        return [
            f"{'*' if found.transport == self.transport else ' '} {found.transport:<14}"
            + (f"{found.bytes_per_s / 1e9:8.2f} GB/s" if found.seconds is not None else f"  {found.failure}")
            for found in sorted(self.measurements, key=lambda found: -found.bytes_per_s)
        ]


def names() -> list[str]:
    """Returns the transports of this package, one per file."""
    return members(TRANSPORTS)


def sample(specs: Sequence[TensorSpec], max_bytes: int = SAMPLE_BYTES) -> tuple[TensorSpec, ...]:
    """Returns whole tensors of each size, evenly spread and in their order, with about `max_bytes` in total."""
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
    """Chooses the transport.

    `sync(name)` publishes the sample through a transport, and all generators fetch and verify it. The first sync is not
    counted, because it maps memory and connects.

    Raises:
        ConfigError: no transport works; gives the failure of each.
    """
    if pinned != "auto":
        return Selection(transport=pinned, measurements=())
    found = tuple([await _measure(name, sync, num_bytes) for name in names])
    working = [one for one in found if one.seconds is not None]
    if not working:
        failures = "; ".join(f"{one.transport}: {one.failure}" for one in found)
        raise ConfigError(f"`weight_sync.transport = 'auto'` finds no transport that works here ({failures})")
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
    """Raises ConfigError if the package has no such transport, or this installation lacks its part."""
    if ":" not in transport and transport not in ("auto", *names()):
        check_part(transport, TRANSPORTS, "weight_sync.transport")
        raise ConfigError(
            f"`weight_sync.transport = {transport!r}` is unknown; use auto, {', '.join(names())} or package.module:Name"
        )


def candidates(
    same_host: bool, same_process: bool, delta: bool, on_gpu: bool = False, in_place: bool = False
) -> list[str]:
    """Returns transports that can work between trainer and generators, in the order of preference. Loads torch.

    Args:
        in_place: generators can serve from the trainer's own weights.
        on_gpu: the trainer is on a GPU.
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
    """Returns the publisher of a transport. Raises ConfigError if there is no such transport."""
    return _ends(transport)[0]


def open_subscriber(
    address: Address,
    specs: Sequence[TensorSpec],
    rank: int,
    delta: bool = False,
    room: Callable[[Sequence[TensorSpec]], Room] | None = None,
    **options: Any,
) -> Subscriber:
    """Opens a generator rank's end of the publisher at `address`.

    Args:
        delta: accept changes from transports that send them.
        room: returns the source of memory on the generator's device, for transports that deliver weights there.
        options: options of the transport.
    """
    publisher, subscriber = _ends(address.transport)
    if room is not None and publisher.ON_DEVICE:
        options["room"] = room(specs)
    return subscriber(specs, rank, delta and publisher.TAKES_DELTA, **options)


class Reader:
    """A generator rank's end of any publisher. A restarted publisher gets a new subscriber."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        rank: int,
        subscribe: Callable[..., Subscriber] = open_subscriber,
        **options: Any,
    ) -> None:
        """
        Args:
            subscribe: called with address, specs, rank and options, as `open_subscriber` is.
        """
        self.specs = tuple(specs)
        self._subscribe = partial(subscribe, specs=self.specs, rank=rank, **options)
        self._publisher = ""
        self._subscriber: Subscriber | None = None

    def at(self, address: Address) -> Subscriber:
        """Returns the subscriber that fetches from `address`."""
        if self._subscriber is None or self._publisher != address.publisher:
            self.close()
            self._subscriber, self._publisher = self._subscribe(address), address.publisher
        return self._subscriber

    def close(self) -> None:
        """Closes the subscriber. Fetched tensors stay valid. May be called again."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None


def _ends(transport: str) -> tuple[type[Publisher], type[Subscriber]]:
    """Returns the classes `<Name>Publisher` and `<Name>Subscriber` of the file `<name>.py`, or of
    `package.module:Name`."""
    module, _, name = transport.partition(":")
    if not name:
        check_name(transport)
        module, name = modules(TRANSPORTS)[transport], "".join(map(str.capitalize, transport.split("_")))
    try:
        found = import_module(module)
        return getattr(found, f"{name}Publisher"), getattr(found, f"{name}Subscriber")
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"`weight_sync.transport = {transport!r}` cannot be loaded: {error}") from error
