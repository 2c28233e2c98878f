"""Reads of the trainer's memory by handle, with slots in the host's memory: what every transport is tested for is in
`tests/weight_sync/test_transports.py`."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import in_process
import pytest
import torch
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.distributed.links import Rendezvous
from llamarl.parts.cuda.transports import cuda_ipc, nixl
from llamarl.parts.cuda.transports._one_sided import check_allocator
from llamarl.parts.cuda.transports.cuda_ipc import CudaIpcPublisher, CudaIpcSubscriber, IpcHandle
from llamarl.sharding.box import Box
from llamarl.weight_sync.base import FingerprintMismatch, Superseded, TransferFailed, plan_writers, views
from llamarl.weight_sync.layout import TensorSpec, lay_out
from llamarl.weight_sync.select import candidates

SPECS = (
    TensorSpec.whole("rows", (64, 32), "float32"),
    TensorSpec(name="columns", global_shape=(16, 64), box=Box.whole((16, 64)), dtype="bfloat16"),
)
HELD = (TensorSpec.whole("rows", (64, 32), "float32"), TensorSpec.whole("columns", (16, 64), "float32"))


def weights(version: int) -> dict[str, Tensor]:
    torch.manual_seed(version)
    return {spec.name: torch.randn(spec.shape) for spec in HELD}


def right(tensors: Mapping[str, Tensor], version: int) -> bool:
    made = weights(version)
    return torch.equal(tensors["rows"], made["rows"]) and torch.equal(tensors["columns"], made["columns"].bfloat16())


@pytest.fixture
def publisher() -> Iterator[CudaIpcPublisher]:
    (plan,) = plan_writers([lay_out(SPECS)], [HELD])
    made = CudaIpcPublisher(plan, lambda value: [value])
    yield made
    made.close()


@pytest.fixture
def subscriber(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaIpcSubscriber]:
    """It opens handles as another process does."""
    opened = cuda_ipc._opened

    def elsewhere(handle: IpcHandle) -> Tensor:
        pid = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(cuda_ipc.os, "getpid", lambda: pid + 1)
            return opened(handle)

    monkeypatch.setattr(cuda_ipc, "_opened", elsewhere)
    made = CudaIpcSubscriber(SPECS, 0, timeout_s=60)
    yield made
    made.close()


def test_weights_go_straight_into_the_room_that_is_given(
    publisher: CudaIpcPublisher, subscriber: CudaIpcSubscriber
) -> None:
    """A slot is opened once, however many versions it holds."""
    layout = lay_out(SPECS)
    room = views(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    subscriber._room = lambda: room
    for version in range(6):
        found = subscriber.fetch(version, publisher.publish(version, weights(version), ()))
        assert all(found[key] is room[key] for key in room) and right(found, version)
    assert len(subscriber._mapped) == len(publisher._handles) == 2
    assert subscriber.received_bytes >= layout.num_bytes


def test_what_is_overwritten_while_it_is_read_is_superseded(
    publisher: CudaIpcPublisher, subscriber: CudaIpcSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, read = publisher.publish(0, weights(0), ()), subscriber._read

    def overtaken(*arguments: object) -> int:
        publisher.publish(1, weights(1), ())
        publisher.publish(2, weights(2), ())
        return read(*arguments)

    monkeypatch.setattr(subscriber, "_read", overtaken)
    with pytest.raises(Superseded):
        subscriber.fetch(0, address)
    monkeypatch.undo()
    assert right(CudaIpcSubscriber(SPECS, 0).fetch(2, address), 2)


def test_what_is_read_is_proved(publisher: CudaIpcPublisher, subscriber: CudaIpcSubscriber) -> None:
    address = publisher.publish(0, weights(0), ())
    publisher._slots[0].flats[0][5] ^= 1
    with pytest.raises(FingerprintMismatch, match=r"rows of version 0"):
        subscriber.fetch(0, address)


def test_memory_that_is_not_used_any_more_is_given_up(publisher: CudaIpcPublisher) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for version in range(5):
        publisher.publish(version, weights(version), range(version))
    assert len(publisher._handles) == 5 and len(os.listdir("/proc/self/fd")) >= before + 5
    publisher.publish(5, weights(5), ())
    assert len(publisher._handles) == len(publisher._slots) == 2
    publisher.close()
    assert not publisher._handles and not cuda_ipc._own
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_process_reads_its_own_memory_without_a_handle(publisher: CudaIpcPublisher) -> None:
    """CUDA opens no handle in the process that made it."""
    subscriber = CudaIpcSubscriber(SPECS, 0)
    assert right(subscriber.fetch(0, publisher.publish(0, weights(0), ())), 0)
    (memory,) = subscriber._mapped.values()
    assert memory.data_ptr() == publisher._slots[0].flats[0].data_ptr()
    subscriber.close()


def test_ranks_read_their_parts_of_all_trainer_ranks(tmp_path: Path) -> None:
    """Columns lie apart on the reader's side; some trainer ranks have nothing."""
    spec = TensorSpec.whole("rows", (5, 3), "float32")
    trainer, subscriber = in_process.Trainer("cuda_ipc", [[spec]], 4, tmp_path), CudaIpcSubscriber([spec], 0)
    for version in range(3):
        whole = {"rows": torch.full((5, 3), float(version))}
        assert not in_process.faults(subscriber, version, trainer.publish(version, whole), whole)
    subscriber.close()
    trainer.close()


def test_a_gpu_that_the_generator_does_not_see_is_named(
    publisher: CudaIpcPublisher, subscriber: CudaIpcSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = publisher.publish(0, weights(0), ())
    handles = {place: handle._replace(gpu="GPU-far") for place, handle in publisher._handles.items()}
    monkeypatch.setattr(publisher, "_handles", handles)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-near"))
    with pytest.raises(TransferFailed, match=r"GPU-far .*GPU-near.*CUDA_VISIBLE_DEVICES"):
        subscriber.fetch(0, address)
    monkeypatch.setattr(publisher, "_handles", {place: one._replace(gpu="") for place, one in handles.items()})


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("kind", [CudaIpcPublisher, nixl.NixlPublisher])
def test_memory_without_a_handle_is_refused(variable: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX would read it by TCP, 100 times as slow, without an error."""
    monkeypatch.setenv(variable, "max_split_size_mb:512,expandable_segments:True")
    (plan,) = plan_writers([lay_out(SPECS)], [HELD])
    with pytest.raises(ConfigError, match=variable):
        kind(plan, lambda value: [value], device=torch.device("cuda", 0))
    monkeypatch.setenv(variable, "expandable_segments:False")
    check_allocator("nixl")


def test_many_readers_cost_the_trainer_little(publisher: CudaIpcPublisher, subscriber: CudaIpcSubscriber) -> None:
    """64 generator ranks, as on eight hosts of eight GPUs, have a thread each. In between they wait, and one that reads
    does not make its thread spin."""
    address = publisher.publish(0, weights(0), ())
    place = Rendezvous(subscriber.place_in(address), address.publisher)
    connections = [place.connect(lay_out(SPECS).digest, 60.0) for _ in range(64)]
    try:
        for connection in connections:
            connection.recv()
            connection.send(0)
        assert all(connection.recv() for connection in connections), "all read"
        before_s = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before_s < 0.1
    finally:
        for connection in connections:
            connection.close()


def test_it_is_preferred_to_nixl_between_processes_of_one_host() -> None:
    found = candidates(same_host=True, same_process=False, delta=False, on_gpu=True)
    assert found.index("cuda_ipc") < found.index("nixl")
    for case in ({"same_host": False}, {"same_process": True}, {"on_gpu": False}, {"delta": True}):
        given = {"same_host": True, "same_process": False, "delta": False, "on_gpu": True} | case
        assert "cuda_ipc" not in candidates(**given)
