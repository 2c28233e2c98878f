"""On one host: generator ranks open the trainer ranks' memory by CUDA IPC handles and copy their parts of it.

A trainer rank has a handle for each slot, and a reader opens a handle once. A copy runs on the reader's GPU, in its own
stream: at the speed of the card's memory if both processes share a card, else of NVLink or PCIe. A reader must see
the trainer's GPU, whatever number it has there: GPUs are known by their UUID.

Off GPUs slots are anonymous files in memory, which readers map: this is how the protocol is tested.
"""

from __future__ import annotations

import inspect
import itertools
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llamarl.distributed import links
from llamarl.parts.cuda.transports._one_sided import (
    OneSidedPublisher,
    OneSidedSubscriber,
    PublishedAt,
    Writer,
    check_allocator,
    make_current,
)
from llamarl.weight_sync.base import CPU, Exchange, Slot, VersionRequest, WriterPlan, packed, part_of, wanted


class Unreachable(RuntimeError):
    """Memory of the trainer cannot be opened; says why."""


class IpcHandle(NamedTuple):
    """Memory of another process."""

    pid: int
    number: int
    """Differs for each memory of a process."""
    gpu: str
    """UUID of the GPU, or "" for memory of the host."""
    arguments: Any
    """Of a GPU what torch rebuilds the tensor by, else descriptor and bytes."""


_numbers = itertools.count()
_own = dict[int, Tensor]()
"""Memory of this process by `IpcHandle.number`, since CUDA opens no handle in the process that made it."""


class CudaIpcPublisher(OneSidedPublisher):
    """A trainer rank, which makes a handle for each slot."""

    TRANSPORT, RANK = "cuda_ipc", 0
    NEEDS_SAME_HOST, TRIED_ACROSS_HOSTS = True, False

    def __init__(self, plan: WriterPlan, exchange: Exchange, folder: Path | None = None, **options: Any) -> None:
        self._handles = dict[int, IpcHandle]()
        """By the address of the memory."""
        if options.get("device", CPU).type == "cuda":
            check_allocator(self.TRANSPORT)
        super().__init__(plan, exchange, folder, **options)

    def _new_slot(self) -> Slot:
        slot = super()._new_slot()
        for index, flat in enumerate(slot.flats):
            if flat.numel():  # a rank may have nothing to send
                slot.flats[index], handle = _shared(flat)
                self._handles[slot.flats[index].data_ptr()] = handle
                _own[handle.number] = slot.flats[index]
        return slot

    def _memory(self, slot: Slot, number: int) -> IpcHandle:
        return self._handles[slot.flats[number].data_ptr()]

    def _drop(self, slot: Slot) -> None:
        for flat in filter(Tensor.numel, slot.flats):
            handle = self._handles.pop(flat.data_ptr())
            _own.pop(handle.number, None)
            if not handle.gpu:
                os.close(handle.arguments[0])

    def close(self) -> None:
        slots = list(self._slots.values())
        super().close()
        for slot in slots:
            self._drop(slot)


class CudaIpcSubscriber(OneSidedSubscriber):
    """A generator rank."""

    PUBLISHER, BROKEN = CudaIpcPublisher, (*links.BROKEN, Unreachable)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._mapped = dict[tuple[int, int], Tensor]()
        """Opened memory by process and number."""

    def _read(self, request: VersionRequest, there: Sequence[tuple[Writer, PublishedAt]]) -> int:
        device, num_bytes = request.tensors[self.layout.specs[0].key].device, 0
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        make_current(device)
        with torch.cuda.stream(stream):
            for writer, found in there:
                flat = self._open(found.memory)
                for bucket in wanted(writer.buckets, request.only):
                    num_bytes += bucket.num_bytes
                    for part, start in bucket.parts:
                        target = part_of(self.layout, request.tensors, part)
                        target.copy_(packed(self.layout, flat, part, start), non_blocking=True)
        if stream is not None:
            stream.synchronize()
        return num_bytes

    def _open(self, handle: IpcHandle) -> Tensor:
        if (handle.pid, handle.number) not in self._mapped:
            self._mapped[handle.pid, handle.number] = _opened(handle)
        return self._mapped[handle.pid, handle.number]

    def _leave(self) -> None:
        super()._leave()
        self._mapped = {}

    def close(self) -> None:
        super().close()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.ipc_collect()


def _shared(flat: Tensor) -> tuple[Tensor, IpcHandle]:
    """Returns memory of the same size that others can open, and its handle. GPU memory is the given one."""
    about = os.getpid(), next(_numbers)
    if flat.device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(flat)
        return flat, IpcHandle(*about, _uuid(flat.device.index or 0), arguments)
    descriptor = os.memfd_create("llamarl-slot")
    os.ftruncate(descriptor, flat.nbytes)
    memory = torch.frombuffer(mmap.mmap(descriptor, flat.nbytes), dtype=torch.uint8)
    return memory, IpcHandle(*about, "", (descriptor, flat.nbytes))


def _opened(handle: IpcHandle) -> Tensor:
    """Raises Unreachable."""
    if handle.pid == os.getpid():
        return _own[handle.number]
    if not handle.gpu:
        descriptor, size = handle.arguments
        try:
            with Path(f"/proc/{handle.pid}/fd/{descriptor}").open("rb") as file:
                view = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)  # nothing is written there
        except (OSError, ValueError) as error:
            raise Unreachable(f"memory of process {handle.pid} cannot be mapped: {error}") from error
        return torch.frombuffer(view, dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    visible = {_uuid(number): number for number in range(torch.cuda.device_count())}
    if handle.gpu not in visible:
        raise Unreachable(
            f"the trainer's GPU {handle.gpu} is not among this generator's ({', '.join(visible)}); let "
            "CUDA_VISIBLE_DEVICES name both, or use weight_sync.transport = 'nixl'"
        )
    arguments, names = list(handle.arguments), list(inspect.signature(rebuild_cuda_tensor).parameters)
    arguments[names.index("storage_device")] = visible[handle.gpu]  # its number may differ in the other process
    try:
        return rebuild_cuda_tensor(*arguments)
    except RuntimeError as error:
        raise Unreachable(f"a CUDA IPC handle of process {handle.pid} cannot be opened: {error}") from error


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
