"""One-sided transport: each generator rank reads its parts from the memory of the trainer ranks, which take no part.

NIXL moves the bytes with the same calls over RDMA, NVLink or PCIe on GPU machines, and over shared memory or TCP
elsewhere. Slots are on the trainer's device, and reads go directly into the weights on the generator's device. An
authenticated connection tells the addresses of slots, and whether a slot was unchanged during a read. NIXL's own
connections are not authenticated: on one host they use the loopback interface; between hosts UCX takes the devices in
`UCX_NET_DEVICES`, or the best ones, because RDMA does not use the interface of an address.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.distributed import links
from llamarl.parts.cuda.joint import NIXL, NO_NIXL
from llamarl.parts.cuda.transports._one_sided import (
    OneSidedPublisher,
    OneSidedSubscriber,
    PublishedAt,
    Writer,
    check_allocator,
    make_current,
)
from llamarl.weight_sync.base import (
    CPU,
    Bucket,
    Exchange,
    Slot,
    VersionRequest,
    WriterPlan,
    packed,
    part_of,
    wanted,
)

PACKAGES = NIXL[::-1] if (torch.version.cuda or "").startswith("13") else NIXL
"""One for another CUDA than torch's finds no library of it, and then knows no GPU memory."""
MAX_READS = 4
"""Buckets on their way at once for each trainer rank; more would take bandwidth from decoding."""


class Broken(RuntimeError):
    """A read has failed; says how."""


BROKEN = (*links.BROKEN, Broken)


class Memory(NamedTuple):
    """Packed parts of a trainer rank."""

    metadata: bytes
    """Metadata of the trainer rank's agent: what a reader must know of its memory."""
    base: int
    """Address of the packed parts."""
    kind: tuple[str, int]
    """As `memory_of` names it."""


class NixlPublisher(OneSidedPublisher):
    """A trainer rank. Besides the threads that serve versions, one thread drives the reads."""

    TRANSPORT = "nixl"

    def __init__(
        self,
        plan: WriterPlan,
        exchange: Exchange,
        folder: Path | None = None,
        *,
        host: str = "",
        **options: Any,
    ) -> None:
        if options.get("device", CPU).type == "cuda":
            check_allocator(self.TRANSPORT)
        self._agent = NixlEndpoint(host := host or links.weights_address())
        self._registered = dict[int, Any]()
        self._num_reading, self._changed = 0, threading.Condition()
        super().__init__(plan, exchange, folder, host=host, **options)
        self._driver = threading.Thread(target=self._drive, name="weight-driver", daemon=True)
        self._driver.start()

    def _new_slot(self) -> Slot:
        slot = super()._new_slot()
        for flat in filter(Tensor.numel, slot.flats):  # a rank may have nothing to send
            self._registered[flat.data_ptr()] = register(self._agent, flat, flat.nbytes)
        return slot

    def _drop(self, slot: Slot) -> None:
        for flat in filter(Tensor.numel, slot.flats):
            self._agent.do("deregister_memory", self._registered.pop(flat.data_ptr()))

    def _memory(self, slot: Slot, number: int) -> Memory:
        flat = slot.flats[number]
        return Memory(self._agent.do("get_agent_metadata"), flat.data_ptr(), memory_of(flat))

    def _reads(self, change: int) -> None:
        with self._changed:
            self._num_reading += change
            self._changed.notify()

    def _drive(self) -> None:
        """Calls the agent while somebody reads, as no other hardware may do it; always, it would keep a core busy."""
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


class NixlSubscriber(OneSidedSubscriber):
    """A generator rank."""

    PUBLISHER, BROKEN = NixlPublisher, BROKEN

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._opened: NixlEndpoint | None = None
        self._registered = dict[int, Any]()
        """Registrations of memory that is read into, by the address of its first byte."""
        self._scratch = list[Tensor]()

    def _connected(self, connection: Connection) -> None:
        self._opened = self._opened or NixlEndpoint(links.local_host(connection))

    @property
    def _agent(self) -> NixlEndpoint:
        assert self._opened is not None, "there is no writer yet"
        return self._opened

    def _read(self, request: VersionRequest, there: Sequence[tuple[Writer, PublishedAt]]) -> int:
        """Fills the tensors, some buckets at a time; how many bytes came."""
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

    def _reads(self, writer: Writer, found: PublishedAt, request: VersionRequest) -> Iterator[_Read]:
        """A bucket each: straight into place where every part is one piece of memory there, else by way of scratch."""
        memory: Memory = found.memory
        writer.agent = self._agent.do("add_remote_agent", memory.metadata)
        self._register(request.tensors[self.layout.specs[0].key], self.layout.num_bytes)
        for bucket in wanted(writer.buckets, request.only):
            targets = [(part_of(self.layout, request.tensors, part), start) for part, start in bucket.parts]
            scratch = None
            if not all(target.is_contiguous() for target, _ in targets):
                scratch = self._take_scratch(targets[0][0].device)
                targets = [(scratch[: bucket.num_bytes], bucket.start)]
            (kind, number), (far_kind, far_number) = memory_of(targets[0][0]), memory.kind
            here = [(target.data_ptr(), target.nbytes, number) for target, _ in targets]
            far = [(memory.base + start, target.nbytes, far_number) for target, start in targets]
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
        """The oldest read of all: it has ended in time, however many come after it."""
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
            if writer.agent:
                with suppress(Broken):
                    self._agent.do("remove_remote_agent", writer.agent)
        super()._leave()

    def close(self) -> None:
        super().close()
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
    """Kinds of memory, here and there."""
    scratch: Tensor | None
    """Memory where it goes first, if not into place."""


class NixlEndpoint:
    """NIXL's end in this process, which is seen at `host`. Raises ConfigError."""

    def __init__(self, host: str) -> None:
        for package in PACKAGES:
            with suppress(ImportError):
                api = import_module(f"{package}._api")
                break
        else:
            raise ConfigError(NO_NIXL)
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        # Without an NVLink, also between processes that share one GPU, UCX would read by TCP: 100 times as slow.
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
        """Raises Broken."""
        try:
            return getattr(self._agent, method)(*arguments)
        except self._errors as error:
            raise Broken(f"{type(error).__name__}: {error}") from error


def register(agent: NixlEndpoint, first: Tensor, num_bytes: int) -> Any:
    """Lets the agent read or write `num_bytes` from the start of a tensor."""
    kind, number = memory_of(first)
    return agent.do("register_memory", [(first.data_ptr(), num_bytes, number, "")], kind)


def memory_of(tensor: Tensor) -> tuple[str, int]:
    """NIXL's name for the kind of memory, and the number of its device."""
    return ("VRAM", tensor.device.index or 0) if tensor.device.type == "cuda" else ("DRAM", 0)
