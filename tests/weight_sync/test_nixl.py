"""What one-sided reads need beside what every transport is tested for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from llamarl.config import ConfigError
from llamarl.sharding.box import Box
from llamarl.weight_sync.base import FingerprintMismatch, Superseded, TransferFailed, plan_writers, views
from llamarl.weight_sync.layout import TensorSpec, lay_out
from llamarl.weight_sync.packed import MAX_SLOTS
from llamarl.weight_sync.transports import nixl
from llamarl.weight_sync.transports.nixl import NixlPublisher, NixlSubscriber, interface_of

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
    made = NixlPublisher(plan, lambda value: [value], timeout_s=5)
    yield made
    made.close()


@pytest.fixture
def subscriber() -> Iterator[NixlSubscriber]:
    made = NixlSubscriber(SPECS, 0, timeout_s=5)
    yield made
    made.close()


def test_weights_go_straight_into_the_room_that_is_given(publisher: NixlPublisher) -> None:
    layout = lay_out(SPECS)
    room = views(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    subscriber = NixlSubscriber(SPECS, 0, room=lambda: room, timeout_s=5)
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
    publisher = NixlPublisher(idle, lambda value: [value], timeout_s=5)
    for version in range(5):
        publisher.publish(version, weights(version), range(version) if version < 4 else ())
    assert len(publisher._slots) == 2 and not publisher._registered
    publisher.close()


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


def test_it_is_bound_to_the_interface_of_the_run() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") == ""
    assert "lo" in {name for _, name in socket.if_nameindex()}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_package",))
    (plan,) = plan_writers([lay_out(SPECS)], [HELD])
    with pytest.raises(ConfigError, match=r"transport = 'nixl'` needs a package: pip install 'llamarl\[nixl\]'"):
        NixlPublisher(plan, lambda value: [value])
