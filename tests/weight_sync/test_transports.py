"""Every transport between real processes: bits, deaths on either side, and two runs at once.

Not covered: several hosts, GPUs, and processors that reorder stores (these must run on them too).
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llamarl.config.errors import RanksLost
from llamarl.distributed.watch import open_sockets
from llamarl.sharding.parallel_layout import LayoutError
from llamarl.weight_sync.base import FingerprintMismatch, Superseded, TransferFailed, WriterPlan, plan_writers
from llamarl.weight_sync.layout import TensorSpec, lay_out
from llamarl.weight_sync.transports import p2p
from llamarl.weight_sync.transports.file import FilePublisher
from llamarl.weight_sync.transports.p2p import P2pPublisher, P2pSubscriber
from llamarl.weight_sync.transports.shared_memory import SharedMemorySubscriber
from tests.nightly import NIGHTLY, some
from tests.weight_sync.conftest import receive

STOPPED_S = 30.0 if NIGHTLY else 0.0
TRANSPORTS = ("shared_memory", "p2p", "file", "nixl", "cuda_ipc")
LAYOUTS = [  # trainer (fsdp, tp, pp), generator tp, replicas
    ((1, 1, 1), 1, 1),
    ((1, 1, 1), 4, 1),
    ((2, 1, 1), 2, 1),
    ((3, 1, 1), 1, 3),
    ((2, 2, 1), 1, 2),
    ((4, 1, 1), 2, 1),
    ((1, 2, 2), 2, 1),
    ((1, 4, 1), 2, 1),
    ((1, 1, 4), 1, 2),
]


@pytest.mark.parametrize(
    ("transport", "trainer", "tp", "replicas"),
    [
        (transport, *layout)
        for row, layout in enumerate(LAYOUTS)
        for column, transport in enumerate(TRANSPORTS)
        if NIGHTLY or row % len(TRANSPORTS) == column
    ],
    ids=str,
)
def test_weights_arrive_bit_for_bit(world, transport, trainer, tp, replicas) -> None:
    made = world(transport, trainer, tp, replicas, dtype="bfloat16" if replicas > 1 else "float32")
    fingerprints = list[str]()
    for version in range(3):
        answers = made.fetch(version, made.publish(version, in_use=[version - 1]))
        assert made.wrong(version, answers) == []
        fingerprints.append(answers[0]["fingerprint"])
        assert {answer["fingerprint"] for answer in answers[::tp]} == {fingerprints[-1]}, "replicas agree"
    assert len(set(fingerprints)) == 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_versions_in_use_stay_and_others_go(world, transport) -> None:
    made = world(transport, (2, 1, 1), 1)
    for version in range(5):
        address = made.publish(version, in_use=[1])
    assert made.wrong(1, made.fetch(1, address)) == []
    assert made.wrong(4, made.fetch(4, address)) == []
    assert isinstance(made.fetch(2, address)[0], Superseded)


@pytest.mark.parametrize("transport", some(TRANSPORTS, 2))
def test_a_killed_generator_disturbs_nobody(world, transport) -> None:
    """Its replacement gets the current version, and the trainer goes on."""
    made = world(transport, (2, 1, 1), 2, mortal=True)
    address = made.publish(0)
    assert made.wrong(0, made.fetch(0, address)) == []
    process, connection, rank = made.generators.pop(0)
    connection.send((0, address))  # in the middle of it
    process.kill()
    process.join(240)
    made.add_generator(rank)
    assert made.wrong(0, made.fetch(0, address)) == []
    assert made.wrong(1, made.fetch(1, made.publish(1, in_use=[0]))) == []


@pytest.mark.parametrize("transport", some(TRANSPORTS, 2))
def test_a_killed_trainer_is_taken_over_from(world, transport) -> None:
    made = world(transport, (2, 1, 1), 2, mortal=True)
    address = made.publish(0)
    assert made.wrong(0, made.fetch(0, address)) == []
    for process, _ in made.trainers:
        process.kill()
        process.join(240)
    answers = made.fetch(1, address)
    assert all(isinstance(answer, TransferFailed | Superseded) for answer in answers)
    made.restart_trainer()
    started_s = time.monotonic()
    assert made.wrong(1, made.fetch(1, made.publish(1))) == []
    assert time.monotonic() - started_s < 60, "a fetch from who is dead takes 240 s"


@pytest.mark.parametrize("transport", some(TRANSPORTS, 2))
def test_a_stopped_generator_holds_up_nobody_and_catches_up(world, transport) -> None:
    made = world(transport, (2, 1, 1), 1, replicas=2, mortal=True)
    address = made.publish(0)
    assert made.wrong(0, made.fetch(0, address)) == []
    process, connection, _ = made.generators[0]
    os.kill(process.pid, signal.SIGSTOP)
    connection.send((0, address))
    started_s = time.monotonic()
    version = 0
    while version < 5 or time.monotonic() - started_s < STOPPED_S:
        version += 1
        publish_started_s = time.monotonic()
        made.publish(version, in_use=[0])
        assert time.monotonic() - publish_started_s < 60, "it would be waited for until the test goes on"
    os.kill(process.pid, signal.SIGCONT)
    assert made.wrong(0, [receive(connection)]) == []
    assert made.wrong(version, made.fetch(version, address)) == []


def test_a_generator_with_other_tensors_is_refused(world) -> None:
    address = world("shared_memory", (1, 1, 1), 1).publish(0)
    other = (TensorSpec.whole("w", (2, 2), "float32"),)
    for subscriber in (SharedMemorySubscriber(other, 3), P2pSubscriber(other, 3)):
        with pytest.raises(LayoutError, match="generator rank 3: "):
            subscriber.fetch(0, address)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_runs_at_once_do_not_meet(world, transport) -> None:
    one, other = (world(transport, (1, 1, 1), 1) for _ in range(2))
    addresses = one.publish(0), other.publish(1)
    assert one.wrong(0, one.fetch(0, addresses[0])) == []
    assert other.wrong(1, other.fetch(1, addresses[1])) == []


def alone(specs: tuple[TensorSpec, ...]) -> WriterPlan:
    return plan_writers([lay_out(specs)], [list(specs)])[0]


class TestPairs:
    SPECS = tuple(TensorSpec.whole(f"w{number}", (50, 30), "float32") for number in range(5))

    @pytest.fixture
    def publisher(self) -> Iterator[P2pPublisher]:
        made = P2pPublisher(alone(self.SPECS), lambda value: [value])
        yield made
        made.close()

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        return {spec.name: torch.full(spec.shape, float(version)) for spec in self.SPECS}

    @pytest.mark.parametrize("variable", ["LLAMARL_ADDRESS", "LLAMARL_WEIGHTS_ADDRESS"])
    def test_it_listens_at_the_address_of_its_process(self, variable, monkeypatch) -> None:
        """That of weights, where they have one of their own, readers too, who pass them on."""
        monkeypatch.setenv("LLAMARL_ADDRESS", "127.0.0.6")
        monkeypatch.setenv(variable, "127.0.0.7")
        publisher = P2pPublisher(alone(self.SPECS), lambda value: [value])
        monkeypatch.setenv(variable, "127.0.0.8")
        subscriber = P2pSubscriber(self.SPECS, 0)
        address = publisher.publish(0, self.weights(0), ())
        assert all(place.startswith("127.0.0.7:") for place in address.places.values())
        assert (subscriber.fetch(0, address)["w1"] == 0).all()
        assert subscriber._relay.place.startswith("127.0.0.8:")
        publisher.close()
        subscriber.close()

    def test_what_arrives_damaged_is_sent_again(self, publisher, monkeypatch) -> None:
        address, subscriber = publisher.publish(0, self.weights(0), ()), P2pSubscriber(self.SPECS, 0)
        take, asked = P2pSubscriber._take, list[Any]()

        def take_damaged(self, request, *args):
            taken = take(self, request, *args)
            if not asked:
                request.tensors["w1"].view(-1).view(torch.uint8)[1000] ^= 4  # on the wire
            asked.append(taken)
            return taken

        monkeypatch.setattr(P2pSubscriber, "_take", take_damaged)
        tensors = subscriber.fetch(0, address)
        assert all((tensor == 0).all() for tensor in tensors.values())
        assert len(asked) == 2
        subscriber.close()

    def test_what_stays_damaged_is_refused_by_name(self, publisher) -> None:
        address, subscriber = publisher.publish(0, self.weights(0), ()), P2pSubscriber(self.SPECS, 2)
        publisher._slots[0].flats[0][7000] ^= 4
        with pytest.raises(FingerprintMismatch, match=r"^w1 of version 0 on generator rank 2"):
            subscriber.fetch(0, address)
        subscriber.close()

    def test_a_pair_that_breaks_is_formed_anew(self, publisher) -> None:
        address, subscriber = publisher.publish(0, self.weights(0), ()), P2pSubscriber(self.SPECS, 0)
        subscriber.fetch(0, address)
        for stream in subscriber._streams.values():
            with socket.socket(fileno=os.dup(stream.connection.fileno())) as one:
                one.shutdown(socket.SHUT_RDWR)
        address = publisher.publish(1, self.weights(1), ())
        assert (subscriber.fetch(1, address)["w3"] == 1).all()
        subscriber.close()

    def test_a_pair_whose_way_becomes_long_is_formed_anew_but_not_again_and_again(self, publisher, monkeypatch) -> None:
        subscriber, formed = P2pSubscriber(self.SPECS, 0), list[list[Any]]()
        for version, is_far in enumerate((False, False, True, True, False)):
            monkeypatch.setattr(p2p, "has_slowed", lambda connection, is_far=is_far: is_far)
            tensors = subscriber.fetch(version, publisher.publish(version, self.weights(version), ()))
            assert (tensors["w3"] == version).all()
            formed.append(list(subscriber._streams.values()))  # kept alive: a freed one's id may be used again
        assert formed[0] == formed[1] and formed[2] == formed[3] == formed[4]
        assert not any(old is new for old in formed[1] for new in formed[2])
        monkeypatch.setattr(p2p, "has_slowed", lambda connection: True)
        monkeypatch.setattr(p2p, "AGAIN_S", 0.0)  # that time has passed
        kept = list(subscriber._streams.values())
        subscriber.fetch(5, publisher.publish(5, self.weights(5), ()))
        assert all(old.connection.closed for old in kept) and len(subscriber._streams) == len(kept)
        subscriber.close()

    def test_slots_that_a_gpu_writes_into_are_pinned_as_they_are(self, monkeypatch) -> None:
        """Without rounding up, and given back with the slot."""
        pinned, most = dict[int, int](), 0

        class Runtime:
            def cudaHostRegister(self, place: int, num_bytes: int, flags: int) -> int:
                pinned[place] = num_bytes
                return 0

            def cudaHostUnregister(self, place: int) -> int:
                return 0 if pinned.pop(place, None) else 713

        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
        publisher = P2pPublisher(alone(self.SPECS), lambda value: [value], device=torch.device("cuda"))
        for version in range(6):
            address = publisher.publish(version, self.weights(version), range(version) if version < 4 else (4,))
            most = max(most, len(pinned))
        size = sum(bucket.num_bytes for bucket in publisher._buckets[0])
        assert most == 4 and len(pinned) == len(publisher._slots) < 4
        assert set(pinned.values()) == {size} and size.bit_count() > 1 and all(place % 4096 == 0 for place in pinned)
        publisher.publish(5, self.weights(5), (4,))
        assert len(pinned) == len(publisher._slots), "once more"
        subscriber = P2pSubscriber(self.SPECS, 0)
        assert (subscriber.fetch(5, address)["w3"] == 5).all()
        subscriber.close()
        publisher.close()
        assert not pinned

    def test_one_that_is_not_opened_listens_no_more(self) -> None:
        """Other ranks are lost when they are to say where they listen."""
        seen = list[str]()

        def exchange(value: Any) -> list[Any]:
            if isinstance(value, str):
                return [value]
            seen.append(value[0])
            raise RanksLost("rank 1 is gone")

        with pytest.raises(RanksLost) as lost:
            P2pPublisher(alone(self.SPECS), exchange)
        host, _, port = seen[0].rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), 240)
        assert lost

    def test_a_pair_leaves_nothing_behind(self) -> None:
        gc.collect()
        before = open_sockets()
        for _ in range(3):
            publisher, subscriber = P2pPublisher(alone(self.SPECS), lambda value: [value]), P2pSubscriber(self.SPECS, 0)
            subscriber.fetch(0, publisher.publish(0, self.weights(0), ()))
            publisher.close()
            subscriber.close()
        threads = [thread for thread in threading.enumerate() if thread.name == "entrance"]
        for thread in threads:
            thread.join(240)
        assert not any(thread.is_alive() for thread in threads)
        gc.collect()  # a process group ends with the last reference to it
        assert open_sockets().keys() <= before.keys()

    def test_strangers_are_refused_and_disturb_nobody(self, publisher) -> None:
        address = publisher.publish(0, self.weights(0), ())
        (place,) = address.places.values()
        host, port = place.split(":")
        assert host == "127.0.0.1"
        stranger = P2pSubscriber(self.SPECS, 0, timeout_s=240)
        with pytest.raises(TransferFailed, match="digest"):
            stranger.fetch(0, replace(address, publisher="guessed"))
        silent = [socket.create_connection((host, int(port))) for _ in range(3)]
        silent[0].sendall(b"\x7f\xff\xff\xff" * 100)
        subscriber = P2pSubscriber(self.SPECS, 0)
        assert (subscriber.fetch(0, address)["w0"] == 0).all()
        for connection in silent:
            connection.close()
        subscriber.close()


def test_a_file_of_one_trainer_rank_is_a_plain_checkpoint(tmp_path) -> None:
    specs = (TensorSpec.whole("a", (4, 3), "bfloat16"), TensorSpec.whole("b", (), "float32"))
    publisher = FilePublisher(alone(specs), lambda value: [value], tmp_path)
    weights = {"a": torch.randn(4, 3), "b": torch.tensor(2.0)}
    for version in range(4):
        publisher.publish(version, weights, ())
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2, "the newest and the one before"
    loaded = load_file(files[-1])
    assert torch.equal(loaded["a"], weights["a"].bfloat16())
    assert torch.equal(loaded["b"], weights["b"])
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_files_of_what_was_published_again_go_with_it(tmp_path: Path) -> None:
    """Those of changes since other versions too."""
    specs = (TensorSpec.whole("w", (64,), "float32"),)
    publisher, weights = FilePublisher(alone(specs), lambda value: [value], tmp_path, delta=True), torch.arange(64.0)
    publisher.publish(1, {"w": weights}, ())
    weights[0] = 5
    publisher.publish(2, {"w": weights}, [1])
    assert any("since-1" in path.name for path in tmp_path.iterdir())
    publisher.publish(2, {"w": weights}, [2])
    for version in range(3, 6):
        publisher.publish(version, {"w": weights}, ())
    assert {path.name.split("-")[1] for path in tmp_path.iterdir()} == {"4", "5"}
    publisher.close()
    assert not [*tmp_path.iterdir()]
