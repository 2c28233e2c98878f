"""One-sided transport: each generator rank reads its parts from the trainer ranks' memory, without work on their side.

NIXL transfers the bytes with the same calls over RDMA, NVLink or PCIe on GPU machines, and over shared memory or TCP
elsewhere. Slots are on the trainer's device, and reads write directly to the final location on the generator's device.
A connection whose ends have proved that they know the secret carries the addresses of slots, and whether a slot was
overwritten during a read. NIXL's connections do not authenticate: on one host they use the loopback; between hosts UCX
uses the devices in `UCX_NET_DEVICES`, or the best ones, because RDMA devices differ from the interface of an address.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.distributed import links
from llamarl.distributed.links import Rendezvous
from llamarl.parts.cuda.joint import NIXL, NO_NIXL
from llamarl.weight_sync.base import (
    POLL_S,
    Bucket,
    CopyingSubscriber,
    Exchange,
    PackedPublisher,
    Room,
    Slot,
    Superseded,
    TransferFailed,
    VersionRequest,
    WriterPlan,
    into_buckets,
    packed,
    part_of,
    wanted,
)
from llamarl.weight_sync.layout import Address, TensorSpec

PACKAGES = NIXL[::-1] if (torch.version.cuda or "").startswith("13") else NIXL
"""The package for torch's CUDA version first: one for another version finds no CUDA library and supports no GPU
memory."""
MAX_READS = 4
"""Maximum concurrent reads per trainer rank. More would take bandwidth from decoding."""


class Broken(RuntimeError):
    """A read failed. The message has the cause."""


BROKEN = (*links.BROKEN, Broken)


class PublishedAt(NamedTuple):
    """Location of a version in the memory of a trainer rank."""

    metadata: bytes
    """Metadata of the trainer rank's agent, which a reader needs to access its memory."""
    base: int
    """Address of the packed parts."""
    memory: tuple[str, int]
    """Memory of the packed parts, as `memory_of` names it."""
    proof: np.ndarray
    """uint64 [2, tensors]"""


class NixlPublisher(PackedPublisher):
    """A trainer rank. One thread per generator rank sends the locations of versions, and one thread drives the
    agent."""

    TRANSPORT, ON_DEVICE, BUCKET_BYTES = "nixl", True, 256 << 20  # each piece costs launches and calls on both sides

    def __init__(
        self,
        plan: WriterPlan,
        exchange: Exchange,
        folder: Path | None = None,
        *,
        host: str = "",
        **options: Any,
    ) -> None:
        self._agent = NixlEndpoint(host := host or links.weights_address())
        self._registered = dict[int, Any]()
        self._num_reading, self._changed = 0, threading.Condition()
        super().__init__(plan, exchange, folder, host=host, **options)
        self._driver = threading.Thread(target=self._drive, name="weight-driver", daemon=True)
        self._driver.start()

    def _new_slot(self) -> Slot:
        slot = super()._new_slot()
        for flat in filter(Tensor.numel, slot.flats):  # a rank may have no parts
            self._registered[flat.data_ptr()] = register(self._agent, flat, flat.nbytes)
        return slot

    def _drop(self, slot: Slot) -> None:
        for flat in filter(Tensor.numel, slot.flats):
            self._agent.do("deregister_memory", self._registered.pop(flat.data_ptr()))

    def _serve(self, connection: Connection, digest: str) -> None:
        number = self._numbers[digest]
        make_current(self._device)
        connection.send(self._plan.parts[number])
        while not self._closed:
            if not connection.poll(POLL_S):
                continue
            version = connection.recv()
            if (slot := self._slots.get(version)) is None:
                connection.send(None)
                continue
            flat, proof = slot.flats[number], slot.proofs[number].copy()
            connection.send(PublishedAt(self._agent.do("get_agent_metadata"), flat.data_ptr(), memory_of(flat), proof))
            self._reads(1)
            try:
                while not self._closed and not connection.poll(POLL_S):
                    pass
                connection.recv()  # the reader is done
            finally:
                self._reads(-1)
            connection.send(self._slots.get(version) is slot)

    def _reads(self, change: int) -> None:
        with self._changed:
            self._num_reading += change
            self._changed.notify()

    def _drive(self) -> None:
        """Drives the agent during reads, because without hardware support nothing else does. Idles otherwise to save a
        core."""
        make_current(self._device)
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._num_reading or self._closed)
            with suppress(Broken):
                self._agent.do("get_new_notifs")
            time.sleep(1e-3)

    def close(self) -> None:
        super().close()
        self._reads(0)
        self._driver.join()


@dataclass(slots=True)
class _Writer:
    """State of a trainer rank."""

    connection: Connection
    buckets: tuple[Bucket, ...]
    agent: str = ""
    """Name of its agent, once something was read from it."""


class NixlSubscriber(CopyingSubscriber):
    """A generator rank. Reads from all trainer ranks in parallel."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        rank: int,
        delta: bool = False,
        room: Room | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(specs, rank, delta, room)
        self._timeout_s = timeout_s
        self._writers = list[_Writer]()
        self._opened: NixlEndpoint | None = None
        self._registered = dict[int, Any]()
        """Registrations of destination memory, by the address of its first byte."""
        self._scratch = list[Tensor]()

    def receive(self, request: VersionRequest, address: Address) -> tuple[np.ndarray, int]:
        places = [Rendezvous(place, address.publisher) for place in self.place_in(address).split(",") if place]
        is_used = bool(self._writers)
        try:
            return self._receive(request, places)
        except BROKEN as error:
            self._leave()
            if is_used:  # broken since the last fetch
                return self.receive(request, address)
            what = f"version {request.version} from the trainer ranks at {', '.join(place.address for place in places)}"
            raise TransferFailed(f"generator rank {self.rank} did not get {what}: {error}") from error

    def _receive(self, request: VersionRequest, places: Sequence[Rendezvous]) -> tuple[np.ndarray, int]:
        while len(self._writers) < len(places):
            connection = places[len(self._writers)].connect(self.layout.digest, self._timeout_s)
            self._opened = self._opened or NixlEndpoint(links.local_host(connection))
            self._writers.append(
                _Writer(connection, into_buckets(self.layout, connection.recv(), NixlPublisher.BUCKET_BYTES))
            )
        founds = self._ask(self._writers, request.version)
        there = [(writer, found) for writer, found in zip(self._writers, founds, strict=True) if found]
        num_bytes = self._read(request, there) if len(there) == len(founds) else 0
        still = self._ask([writer for writer, _ in there], None)
        if not all(still) or len(there) < len(founds):
            raise Superseded(f"version {request.version} is no longer at all trainer ranks")
        return np.stack([found.proof for _, found in there]), num_bytes

    @property
    def _agent(self) -> NixlEndpoint:
        assert self._opened is not None, "there is no writer yet"
        return self._opened

    def _ask(self, writers: Sequence[_Writer], version: int | None) -> list[Any]:
        """Asks all trainer ranks for the location of a version. None asks whether the version was intact during the
        read."""
        for writer in writers:
            writer.connection.send(version)
        answers, deadline_s = list[Any](), time.monotonic() + self._timeout_s
        for writer in writers:
            if not writer.connection.poll(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError(f"no answer in {self._timeout_s:g} s")
            answers.append(writer.connection.recv())
        return answers

    def _read(self, request: VersionRequest, there: Sequence[tuple[_Writer, PublishedAt]]) -> int:
        """Fills the tensors, several buckets in parallel. Returns the number of bytes."""
        under_way, num_bytes = deque[tuple[Any, _Read]](), 0
        reads = [self._reads(writer, found, request) for writer, found in there]
        make_current(request.tensors[self.layout.specs[0].key].device)
        while reads or under_way:
            if reads and len(under_way) < MAX_READS * len(there):
                turn = reads.pop(0)
                if (read := next(turn, None)) is not None:
                    under_way.append((self._begin(read), read))
                    reads.append(turn)
                continue
            handle, read = under_way.popleft()
            self._finish(handle)
            num_bytes += read.bucket.num_bytes
            if read.scratch is not None:
                for part, start in read.bucket.parts:
                    piece = packed(self.layout, read.scratch, part, start - read.bucket.start)
                    part_of(self.layout, request.tensors, part).copy_(piece)
                self._scratch.append(read.scratch)
        return num_bytes

    def _reads(self, writer: _Writer, found: PublishedAt, request: VersionRequest) -> Iterator[_Read]:
        """Yields one read per bucket: directly if every part is contiguous at its destination, otherwise through
        scratch memory."""
        writer.agent = self._agent.do("add_remote_agent", found.metadata)
        self._register(request.tensors[self.layout.specs[0].key], self.layout.num_bytes)
        for bucket in wanted(writer.buckets, request.only):
            targets = [(part_of(self.layout, request.tensors, part), start) for part, start in bucket.parts]
            scratch = None
            if not all(target.is_contiguous() for target, _ in targets):
                scratch = self._take_scratch(targets[0][0].device)
                targets = [(scratch[: bucket.num_bytes], bucket.start)]
            (kind, number), (far_kind, far_number) = memory_of(targets[0][0]), found.memory
            here = [(target.data_ptr(), target.nbytes, number) for target, _ in targets]
            far = [(found.base + start, target.nbytes, far_number) for target, start in targets]
            yield _Read(bucket, writer.agent, here, far, (kind, far_kind), scratch)

    def _begin(self, read: _Read) -> Any:
        here, far = (
            self._agent.do("get_xfer_descs", places, kind)
            for places, kind in zip((read.here, read.far), read.kinds, strict=True)
        )
        handle = self._agent.do("initialize_xfer", "READ", here, far, read.agent)
        if self._agent.do("transfer", handle) == "ERR":
            raise Broken("a read could not begin")
        return handle

    def _finish(self, handle: Any) -> None:
        """Waits for the oldest read. Its deadline does not depend on later reads."""
        deadline_s = time.monotonic() + self._timeout_s
        while (state := self._agent.do("check_xfer_state", handle)) == "PROC":
            if time.monotonic() > deadline_s:
                raise Broken(f"a read has not ended in {self._timeout_s:g} s")
            time.sleep(1e-5)
        if state == "ERR":
            raise Broken("a read has failed")
        self._agent.do("release_xfer_handle", handle)

    def _register(self, first: Tensor, num_bytes: int) -> None:
        if first.data_ptr() not in self._registered:
            self._registered[first.data_ptr()] = register(self._agent, first, num_bytes)

    def _take_scratch(self, device: torch.device) -> Tensor:
        if self._scratch:
            return self._scratch.pop()
        size = max(bucket.num_bytes for writer in self._writers for bucket in writer.buckets)
        scratch = torch.empty(size, dtype=torch.uint8, device=device)
        self._register(scratch, size)
        return scratch

    def _leave(self) -> None:
        for writer in self._writers:
            writer.connection.close()
            if writer.agent:
                with suppress(Broken):
                    self._agent.do("remove_remote_agent", writer.agent)
        self._writers = []

    def close(self) -> None:
        self._leave()
        for registered in self._registered.values():
            with suppress(Broken):
                self._agent.do("deregister_memory", registered)
        self._registered, self._scratch, self._opened = {}, [], None


class _Read(NamedTuple):
    """One transfer."""

    bucket: Bucket
    agent: str
    here: list[tuple[int, int, int]]
    """Address, bytes, device."""
    far: list[tuple[int, int, int]]
    kinds: tuple[str, str]
    """Kinds of local and remote memory."""
    scratch: Tensor | None
    """Intermediate buffer. None means that the read writes directly to the destination."""


class NixlEndpoint:
    """NIXL's agent in this process, reachable at `host`. Raises ConfigError."""

    def __init__(self, host: str) -> None:
        for package in PACKAGES:
            with suppress(ImportError):
                api = import_module(f"{package}._api")
                break
        else:
            raise ConfigError(NO_NIXL)
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        # Without NVLink, also between processes on one GPU, UCX would use TCP, which is 100 times as slow.
        os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
        if host.startswith("127.") or host == "::1":
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._agent = api.nixl_agent(
            secrets.token_hex(8), api.nixl_agent_config(enable_prog_thread=False, sync_mode=strict)
        )
        kinds = (kind for kind in vars(api.nixlBind).values() if isinstance(kind, type) and issubclass(kind, Exception))
        self._errors = tuple(kinds)
        """Errors of the library, which have no common base class."""

    def do(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the library. Raises Broken."""
        try:
            return getattr(self._agent, method)(*arguments)
        except self._errors as error:
            raise Broken(f"{type(error).__name__}: {error}") from error


def register(agent: NixlEndpoint, first: Tensor, num_bytes: int) -> Any:
    """Registers `num_bytes` bytes from the start of a tensor, so that the agent may read or write them."""
    kind, number = memory_of(first)
    return agent.do("register_memory", [(first.data_ptr(), num_bytes, number, "")], kind)


def make_current(device: torch.device) -> None:
    """Makes the device current in this thread. NIXL copies in the CUDA context of its caller, and threads start without
    one."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        torch.cuda.current_stream().synchronize()


def memory_of(tensor: Tensor) -> tuple[str, int]:
    """Returns NIXL's name for the kind of memory, and the number of its device."""
    return ("VRAM", tensor.device.index or 0) if tensor.device.type == "cuda" else ("DRAM", 0)
