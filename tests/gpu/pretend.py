"""A GPU that is not there: tensors say `cuda:0`, and carry real values on the CPU.

What a GPU refuses raises: operands on two devices, shapes and layouts that its matrix units do not take, waiting for
the device or copying from the host while a graph is captured. What costs there is counted in `LEDGER`: kernels, copies
between host and device, and how often the host waits. `index_add_` rounds as often as its atomics do there.

It does not tell times, knows one stream, which is never behind, and else rounds as the CPU does.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu.kernels import KERNELS, SHAPES

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
MEMORY_BYTES = 80 << 30
PACKAGE = "/llamarl/"
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
WAITING = {
    aten._local_scalar_dense.default: "a number is read",
    aten.nonzero.default: "the host learns how many there are",
    aten.masked_select.default: "the host learns how many there are",
    aten._unique2.default: "the host learns how many there are",
    aten.unique_dim.default: "the host learns how many there are",
    aten.repeat_interleave.Tensor: "the host learns how many there are",
    aten.bincount.default: "the host learns how many there are",
    aten.equal.default: "the answer is read",
}
"""Operations after which the host knows something of the values."""


@dataclass
class Memory:
    """What tensors on the device hold, by storage."""

    device: str = "cpu"
    """Where values are; `meta`: nowhere, so that models of any size fit, and nothing but their memory is told."""
    live_bytes: int = 0
    peak_bytes: int = 0
    at_peak: str = ""
    """Operation that made the peak."""
    _held: set[int] = field(default_factory=set)

    def hold(self, values: Tensor, operation: str) -> None:
        storage = untyped_storage(values)
        if (key := storage._cdata) in self._held:
            return
        self._held.add(key)
        self.live_bytes += (num_bytes := storage.nbytes())
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak = self.live_bytes, operation
        weakref.finalize(storage, self._drop, key, num_bytes)

    def _drop(self, key: int, num_bytes: int) -> None:
        self._held.remove(key)
        self.live_bytes -= num_bytes


MEMORY = Memory()
untyped_storage = Tensor.untyped_storage


class WrongDevice(RuntimeError):
    """Operands of one operation are on two devices."""


class CaptureBroken(RuntimeError):
    """What cannot be part of a graph."""


@dataclass
class Ledger:
    """What has been asked of the device since it was last cleared; places are `file:function` of the package."""

    kernels: int = 0
    syncs: Counter[str] = field(default_factory=Counter)
    """The host waits for the device to catch up."""
    uploads: Counter[str] = field(default_factory=Counter)
    downloads: Counter[str] = field(default_factory=Counter)
    up_bytes: int = 0
    down_bytes: int = 0
    queued: int = 0
    """Kernels since the host last waited."""

    def wait(self, why: str) -> None:
        if _graphs:
            raise CaptureBroken(f"{why}, which no graph can: {place()}")
        self.syncs[f"{place()}: {why}"] += 1
        self.queued = 0

    def upload(self, source: Tensor, waits: bool) -> None:
        if _graphs:
            raise CaptureBroken(f"a copy from the host would bring the values of now to each replay: {place()}")
        self.uploads[place()] += 1
        self.up_bytes += source.nbytes
        if waits and self.queued:  # a copy from pageable memory waits for the stream unless it is told not to
            self.wait("a copy to the device, not told `non_blocking`")

    def download(self, num_bytes: int, waits: bool = True) -> None:
        self.downloads[place()] += 1
        self.down_bytes += num_bytes
        if waits:
            self.wait("a copy to the host")

    def run(self, num: int = 1) -> None:
        self.kernels += num
        self.queued += num

    def take(self) -> Ledger:
        """What is in it, and begin anew."""
        taken = Ledger(**{name: getattr(self, name) for name in self.__dataclass_fields__})
        self.__init__()
        return taken


LEDGER = Ledger()
_graphs = list["Graph"]()
"""Being captured."""


def place() -> str:
    """The innermost function of the package on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if PACKAGE in file and "/tests/" not in file:
            return f"{file.rpartition(PACKAGE)[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "tests"


class GpuTensor(torch.Tensor):
    """Says that it is on the device."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> GpuTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=GPU,
        )  # fmt: skip
        made.values = values
        return made

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Device():  # in a thread that has none
            return func(*args, **(kwargs or {}))


def values_of(x: Any) -> Any:
    """Of a tensor on the device; anything else is itself."""
    return x.values if isinstance(x, GpuTensor) else x


class Device(TorchDispatchMode):
    """Between autograd and the kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [one for one in tensors if isinstance(one, GpuTensor)]
        target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if not here and target != "cuda":
            return func(*args, **kwargs)
        _count(func, args, kwargs, tensors, target)
        plain_args, plain = tree_map(values_of, args), tree_map(values_of, kwargs)
        if target == "cuda":
            plain["device"] = MEMORY.device
        kernels = KERNELS if MEMORY.device == "cpu" else SHAPES
        result = kernels.get(func, func)(*plain_args, **plain)
        if func is aten.copy_.default and not isinstance(args[0], GpuTensor):
            return args[0]
        if target == "cpu" or func is aten._local_scalar_dense.default:
            return result
        _launched(func, plain_args, plain, result)
        given = {id(values_of(one)): one for one in tensors}

        def wrapped(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            if id(one) in given:
                return given[id(one)]
            MEMORY.hold(one, str(func))
            return GpuTensor(one)

        return tree_map(wrapped, result)


def _count(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], target: str | None) -> None:
    """What it costs beside the kernel. Raises WrongDevice."""
    if func in COPIES:
        _copied(func, args, kwargs, target)
    else:
        _check_devices(func, args, tensors)
    if func in WAITING:
        LEDGER.wait(WAITING[func])


def _launched(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    if _graphs:
        _graphs[-1].record(func, args, kwargs, result)
    elif not _is_view(func):
        LEDGER.run()


def _copied(func: Any, args: Any, kwargs: dict[str, Any], target: str | None) -> None:
    """Counts what goes from one side to the other."""
    if func is aten.copy_.default:
        to, source, waits = isinstance(args[0], GpuTensor), args[1], not (args[2:] or (False,))[0]
    else:
        to, source, waits = target == "cuda", args[0], not kwargs.get("non_blocking", False)
        if target is None:
            return
    if to and not isinstance(source, GpuTensor):
        LEDGER.upload(source, waits)
    elif not to and isinstance(source, GpuTensor):
        LEDGER.download(source.values.nbytes, waits)


def _check_devices(func: Any, args: Any, tensors: Iterable[Tensor]) -> None:
    """Raises WrongDevice. Numbers, and indices into what is on the device, may come from the host."""
    elsewhere = [one for one in tensors if not isinstance(one, GpuTensor) and one.ndim]
    if func in INDEXED and isinstance(args[0], GpuTensor):
        indices = [one for one in args[1] if isinstance(one, Tensor)]
        if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
            LEDGER.wait("a mask as index")
        if any(not isinstance(one, GpuTensor) for one in indices):
            LEDGER.upload(indices[0], waits=True)
            elsewhere = [one for one in elsewhere if all(one is not index for index in indices)]
    if elsewhere and any(isinstance(one, GpuTensor) for one in tensors):
        raise WrongDevice(f"{func} of cuda:0 and of {[tuple(one.shape) for one in elsewhere]} on the CPU: {place()}")


def _is_view(func: Any) -> bool:
    """Launches nothing."""
    is_alias = [one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns]
    return (bool(is_alias) and all(is_alias)) or func._schema.name.startswith("aten::empty")


class Graph:
    """`torch.cuda.CUDAGraph`: repeats kernels on the addresses that they had."""

    def __init__(self, keep_graph: bool = False) -> None:
        del keep_graph
        self._kernels = list[tuple[Any, Any, Any, Any]]()

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not _is_view(func):
            self._kernels.append((KERNELS.get(func, func), args, kwargs, result))

    def replay(self) -> None:
        assert not _graphs
        LEDGER.run()  # one launch
        for func, args, kwargs, result in self._kernels:
            made = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(made), strict=True):
                if isinstance(old, Tensor) and old is not new:
                    old.copy_(new)


class Capture:
    """`torch.cuda.graph`."""

    def __init__(self, cuda_graph: Graph, **_: Any) -> None:
        self._graph = cuda_graph

    def __enter__(self) -> None:
        _graphs.append(self._graph)

    def __exit__(self, *_: object) -> None:
        _graphs.pop()


class Stream:
    """All streams are one, which is never behind."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None:
        LEDGER.wait("a stream is waited for")

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    """Has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        LEDGER.wait("an event is waited for")


def install() -> None:
    """From now on this process has a GPU. Once, before the package is imported."""
    # Composites then fall apart below autograd, as on a GPU, and tensors can be told apart from others at all.
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.autograd.set_multithreading_enabled(False).__enter__()  # no thread of the device's own
    _install_queries()
    _install_methods()
    run = threading.Thread.run

    def run_with_device(thread: threading.Thread) -> None:
        with Device():
            run(thread)

    threading.Thread.run = run_with_device
    Device().__enter__()


def _install_queries() -> None:
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_name": "a pretended GPU", "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES), "memory_reserved": 0,
        "max_memory_allocated": 0, "memory_allocated": 0, "is_bf16_supported": True, "set_device": None,
        "graph_pool_handle": (0, 0), "_lazy_init": None, "is_initialized": True, "empty_cache": None,
        "current_stream": Stream(), "default_stream": Stream(), "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.synchronize = lambda *_: LEDGER.wait("the device is waited for")
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph, torch.cuda.graph = Stream, Event, Graph, Capture


def _install_methods() -> None:
    """What does not go by way of kernels."""
    made, methods = torch.tensor, {name: getattr(Tensor, name) for name in ("tolist", "data_ptr", "untyped_storage")}

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return made(data, *args, **kwargs).to(device or "cpu")

    def tolist(self: Tensor) -> Any:
        if isinstance(self, GpuTensor):
            LEDGER.download(self.values.nbytes)
        return methods["tolist"](values_of(self))

    def numpy(self: Tensor, **kwargs: Any) -> Any:
        if isinstance(self, GpuTensor):
            raise WrongDevice(f"an array of a tensor on cuda:0: {place()}")
        return to_numpy(self, **kwargs)

    to_numpy, torch.tensor = Tensor.numpy, tensor
    Tensor.tolist, Tensor.numpy = tolist, numpy
    Tensor.data_ptr = lambda self: methods["data_ptr"](values_of(self))
    Tensor.untyped_storage = lambda self: methods["untyped_storage"](values_of(self))


@contextlib.contextmanager
def ledger() -> Iterator[Ledger]:
    """What is asked of the device inside."""
    LEDGER.take()
    found = Ledger()
    yield found
    found.__dict__.update(LEDGER.take().__dict__)
