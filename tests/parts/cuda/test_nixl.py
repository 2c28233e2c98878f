"""What one-sided reads need beside what every transport is tested for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import in_process
import pytest
import torch
from torch import Tensor

from llamarl.config import ConfigError
from llamarl.parts.cuda.transports import nixl
from llamarl.parts.cuda.transports.nixl import MAX_READS, NixlPublisher, NixlSubscriber
from llamarl.sharding.box import Box
from llamarl.weight_sync.base import (
    MAX_SLOTS,
    FingerprintMismatch,
    NoFreeSlot,
    Superseded,
    TransferFailed,
    plan_writers,
    views,
)
from llamarl.weight_sync.layout import TensorSpec, lay_out

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
def publisher() -> Iterator[NixlPublisher]:
    (plan,) = plan_writers([lay_out(SPECS)], [HELD])
    made = NixlPublisher(plan, lambda value: [value])
    yield made
    made.close()


@pytest.fixture
def subscriber() -> Iterator[NixlSubscriber]:
    made = NixlSubscriber(SPECS, 0, timeout_s=240)
    yield made
    made.close()


def test_weights_go_straight_into_the_room_that_is_given(publisher: NixlPublisher) -> None:
    layout = lay_out(SPECS)
    room = views(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    subscriber = NixlSubscriber(SPECS, 0, room=lambda: room, timeout_s=240)
    for version in range(3):
        found = subscriber.fetch(version, publisher.publish(version, weights(version), ()))
        assert all(found[key] is room[key] for key in room) and right(found, version)
    assert subscriber.received_bytes == layout.num_bytes
    subscriber.close()


def test_what_is_overwritten_while_it_is_read_is_superseded(
    publisher: NixlPublisher, subscriber: NixlSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, read = publisher.publish(0, weights(0), ()), subscriber._read

    def overtaken(*arguments: object) -> int:
        publisher.publish(1, weights(1), ())
        publisher.publish(2, weights(2), ())
        return read(*arguments)

    monkeypatch.setattr(subscriber, "_read", overtaken)
    with pytest.raises(Superseded, match="version 0 is no longer at all trainer ranks"):
        subscriber.fetch(0, address)
    monkeypatch.undo()
    assert right(subscriber.fetch(2, address), 2), "the conversation goes on"


def test_reads_are_bounded_and_share_their_scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of columns, which lie apart on the reader's side, in more buckets than may be on their way."""
    monkeypatch.setattr(NixlPublisher, "BUCKET_BYTES", 1 << 10)
    monkeypatch.setattr(
        in_process, "_rows", lambda spec, _, rank: replace(spec, box=spec.box.cut(1, 32 * rank, 32 * rank + 32))
    )
    spec = TensorSpec.whole("wide", (256, 64), "float32")
    trainer, subscriber = in_process.Trainer("nixl", [[spec]], 2, tmp_path), NixlSubscriber([spec], 0, timeout_s=240)
    most, under_way, begin, finish = 0, list[object](), subscriber._begin, subscriber._finish

    def begun(read: nixl._Read) -> object:
        nonlocal most
        assert read.scratch is not None, "it lies apart"
        under_way.append(handle := begin(read))
        most = max(most, len(under_way))
        return handle

    def finished(handle: object) -> None:
        under_way.remove(handle)
        finish(handle)

    monkeypatch.setattr(subscriber, "_begin", begun)
    monkeypatch.setattr(subscriber, "_finish", finished)
    for version in range(3):
        whole = torch.randn(256, 64)
        assert torch.equal(subscriber.fetch(version, trainer.publish(version, {"wide": whole}))["wide"], whole)
        assert most == 2 * MAX_READS < sum(len(one._buckets[0]) for one in trainer.publishers)
        assert len(subscriber._scratch) == most
    subscriber.close()
    trainer.close()


def test_a_read_that_fails_is_tried_once_more(
    publisher: NixlPublisher, subscriber: NixlSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With new connections, if these have been used; the first time it has failed."""
    do, failing, asked = nixl.NixlEndpoint.do, 1, 0

    def sometimes(agent: nixl.NixlEndpoint, method: str, *arguments: object) -> object:
        nonlocal asked
        if method == "check_xfer_state":
            asked += 1
            return "ERR" if asked <= failing else do(agent, method, *arguments)
        return do(agent, method, *arguments)

    monkeypatch.setattr(nixl.NixlEndpoint, "do", sometimes)
    with pytest.raises(TransferFailed, match=r"did not get version 0 from .*: a read has failed"):
        subscriber.fetch(0, publisher.publish(0, weights(0), ()))
    assert right(subscriber.fetch(0, publisher._address), 0)
    asked = 0
    assert right(subscriber.fetch(1, publisher.publish(1, weights(1), ())), 1), "another read went well"
    failing, asked = 10**6, 0
    with pytest.raises(TransferFailed, match="a read has failed"):
        subscriber.fetch(2, publisher.publish(2, weights(2), ()))
    assert asked == 2


def test_slots_are_bounded(publisher: NixlPublisher) -> None:
    for version in range(MAX_SLOTS):
        publisher.publish(version, weights(version), range(version))
    with pytest.raises(NoFreeSlot, match=f"no slot for version {MAX_SLOTS}: versions .* are in use"):
        publisher.publish(MAX_SLOTS, weights(0), range(MAX_SLOTS))
    assert len(publisher._slots) == MAX_SLOTS


def test_what_is_read_is_proved(publisher: NixlPublisher, subscriber: NixlSubscriber) -> None:
    address = publisher.publish(0, weights(0), ())
    publisher._slots[0].flats[0][5] ^= 1
    with pytest.raises(FingerprintMismatch, match=r"rows of version 0 on generator rank 0"):
        subscriber.fetch(0, address)


def test_memory_that_is_not_used_any_more_is_given_up(publisher: NixlPublisher, subscriber: NixlSubscriber) -> None:
    for version in range(4):
        address = publisher.publish(version, weights(version), range(version))
    assert len(publisher._registered) == 4
    address = publisher.publish(4, weights(4), (2,))
    assert right(subscriber.fetch(2, address), 2) and right(subscriber.fetch(4, address), 4)
    assert len(publisher._registered) == len(publisher._slots) == 3 < MAX_SLOTS


def test_a_rank_that_has_nothing_to_send_takes_part() -> None:
    idle = next(one for one in plan_writers([lay_out(HELD[:1])], [HELD[:1]] * 2) if not one.parts[0])
    publisher = NixlPublisher(idle, lambda value: [value])
    for version in range(5):
        publisher.publish(version, weights(version), range(version) if version < 4 else ())
    assert len(publisher._slots) == 2 and not publisher._registered
    publisher.close()


def test_all_who_have_something_are_asked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer may have a long way; whoever has nothing is not even called."""
    spec, said = TensorSpec.whole("rows", (5, 3), "float32"), list[str]()
    trainer = in_process.Trainer("nixl", [[spec]], 4, tmp_path)  # of five rows, two each: the last one has none
    subscriber = NixlSubscriber([spec], 0, timeout_s=240)
    for version in range(2):
        whole = {"rows": torch.full((5, 3), float(version))}
        address = trainer.publish(version, whole)
        with monkeypatch.context() as patch:
            for name in ("send", "recv"):
                given = getattr(Connection, name)

                def noted(one: Connection, *arguments: object, given=given, name=name) -> object:
                    if threading.current_thread() is threading.main_thread():
                        said.append(name)
                    return given(one, *arguments)

                patch.setattr(Connection, name, noted)
            assert not in_process.faults(subscriber, version, address, whole)
    assert len(subscriber._writers) == 3
    assert said[-12:] == [*["send"] * 3, *["recv"] * 3] * 2
    subscriber.close()
    trainer.close()


def test_nobody_works_while_nothing_is_read(publisher: NixlPublisher, subscriber: NixlSubscriber) -> None:
    subscriber.fetch(0, publisher.publish(0, weights(0), ()))
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.1, "a thread of NIXL's spins"


def test_a_trainer_that_is_silent_is_named(publisher: NixlPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    address, released = publisher.publish(0, weights(0), ()), threading.Event()
    monkeypatch.setattr(publisher._agent, "do", lambda *_: released.wait(20))
    subscriber = NixlSubscriber(SPECS, 3, timeout_s=0.3)
    with pytest.raises(TransferFailed, match=r"generator rank 3 did not get version 0 from .* no answer in 0.3 s"):
        subscriber.fetch(0, address)
    released.set()
    subscriber.close()


@pytest.mark.parametrize(
    ("host", "set_to", "devices"),
    [("127.0.0.1", None, "lo"), ("203.0.113.77", None, None), ("203.0.113.77", "mlx5_0:1", "mlx5_0:1"),
     ("127.0.0.1", "eth0", "eth0")],
)  # fmt: skip
def test_between_hosts_the_best_devices_are_taken(
    monkeypatch: pytest.MonkeyPatch, host: str, set_to: str | None, devices: str | None
) -> None:
    """Or those that the user names; an Ethernet interface would leave RDMA out."""
    env = {"UCX_NET_DEVICES": set_to} if set_to else {}
    monkeypatch.setattr(nixl.os, "environ", env)
    nixl.NixlEndpoint(host)
    assert env.get("UCX_NET_DEVICES") == devices


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_package",))
    (plan,) = plan_writers([lay_out(SPECS)], [HELD])
    with pytest.raises(ConfigError, match=r"transport = 'nixl'` needs a package: pip install 'llamarl\[nixl\]'"):
        NixlPublisher(plan, lambda value: [value])
