"""Shared memory between real processes: bits, versions, damage, and writers that are killed.

Not covered: processors that reorder stores (this must run on them too), generators on a GPU.
"""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import pytest
import torch
import weight_processes as processes
from torch import Tensor

from llamarl.weight_sync.layout import TensorSpec
from llamarl.weight_sync.shared_memory import (
    FingerprintMismatch,
    SharedMemoryPublisher,
    SharedMemorySubscriber,
    Superseded,
)

DEADLINE_S = 30.0


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def receive(connection) -> object:
    assert connection.poll(DEADLINE_S), "the other process does not answer"
    return connection.recv()


@pytest.fixture
def pair() -> tuple[SharedMemoryPublisher, SharedMemorySubscriber]:
    """Both ends in this process, through two mappings of the segment."""
    publisher = SharedMemoryPublisher(processes.specs("float32"))
    return publisher, SharedMemorySubscriber(publisher.address)


class TestBits:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_what_arrives_is_what_was_cast(self, start, dtype: str) -> None:
        """NaN, infinities, negative zero and subnormal numbers included."""
        _, connection = start(processes.write_random, dtype)
        subscriber = SharedMemorySubscriber(receive(connection))
        into = processes.buffers(processes.specs(dtype))
        for version in (*range(6), 41, 100):
            connection.send(version)
            receive(connection)
            subscriber.fetch(version, into)
            for name, weight in processes.random_weights(version).items():
                assert bits(into[name]) == bits(weight.to(getattr(torch, dtype))), f"{name} of version {version}"
        connection.send(None)

    def test_several_readers(self, start) -> None:
        _, connection = start(processes.write_random, "bfloat16")
        address = receive(connection)
        connection.send(0)
        receive(connection)
        for _ in range(3):
            into = processes.buffers(processes.specs("bfloat16"))
            SharedMemorySubscriber(address).fetch(0, into)
            assert bits(into["layer.0"]) == bits(processes.random_weights(0)["layer.0"].bfloat16())
        connection.send(None)

    def test_trained_parameters_and_views_can_be_published(self) -> None:
        publisher = SharedMemoryPublisher([TensorSpec.whole("w", (4, 3), dtype="float32")])
        weight = torch.nn.Parameter(torch.randn(3, 4).T)
        publisher.publish(0, {"w": weight})
        into = {"w": torch.empty(4, 3)}
        SharedMemorySubscriber(publisher.address).fetch(0, into)
        assert torch.equal(into["w"], weight)

    def test_a_weight_of_another_shape_is_no_broadcast(self, pair) -> None:
        publisher, subscriber = pair
        with pytest.raises(AssertionError, match=r"layer\.0"):
            publisher.publish(0, processes.uniform_weights(0) | {"layer.0": torch.ones(64)})
        with pytest.raises(Superseded):
            subscriber.fetch(0, processes.buffers(processes.specs("float32")))


class TestVersions:
    def test_only_the_version_in_the_slot_can_be_had(self, pair) -> None:
        publisher, subscriber = pair
        into = processes.buffers(processes.specs("float32"))
        for version in (0, 1, 2):
            with pytest.raises(Superseded, match=f"wanted version {version}"):
                subscriber.fetch(version, into)
        for version in (0, 1, 2):
            publisher.publish(version, processes.uniform_weights(version))
        with pytest.raises(Superseded, match="its slot holds 2"):
            subscriber.fetch(0, into)
        for version in (1, 2):
            subscriber.fetch(version, into)
            assert (into["embed"] == version).all()

    def test_a_reader_that_is_overtaken_gets_no_mixture(self, pair) -> None:
        """The slot is written again while the reader is half-way through it."""
        publisher, subscriber = pair
        publisher.publish(0, processes.uniform_weights(0))

        class Overtaken(dict[str, Tensor]):
            def __getitem__(self, name: str) -> Tensor:
                if name == "norm":
                    publisher.publish(2, processes.uniform_weights(2))
                return super().__getitem__(name)

        with pytest.raises(Superseded, match="wanted version 0, its slot holds 2"):
            subscriber.fetch(0, Overtaken(processes.buffers(processes.specs("float32"))))

    def test_no_mixture_under_load(self, start) -> None:
        """One writer that waits for nobody, two readers that fetch 200 times each."""
        shapes = {f"w{number}": (130, 400) for number in range(4)}
        _, writer = start(processes.write_freely, shapes)
        address = receive(writer)
        readers = [start(processes.read_freely, address, 200)[1] for _ in range(2)]
        writer.send("go")
        answers = [receive(reader) for reader in readers]
        writer.send("stop")
        published = receive(writer)
        assert isinstance(published, int)
        assert published >= 200
        assert [torn for _, torn in answers] == [[], []]

    def test_nothing_is_refused_when_versions_are_adopted_in_turn(self, start) -> None:
        """The order that the controller keeps: v - 1 is adopted before v + 1 is published."""
        _, connection = start(processes.write_random, "float32")
        subscriber = SharedMemorySubscriber(receive(connection))
        into = processes.buffers(processes.specs("float32"))
        connection.send(0)
        receive(connection)
        for version in range(60):
            connection.send(version + 1)  # the other slot changes while this one is read
            subscriber.fetch(version, into)
            assert bits(into["layer.0"]) == bits(processes.random_weights(version)["layer.0"])
            receive(connection)
        connection.send(None)


class TestDamage:
    @pytest.mark.parametrize("name", ["embed", "layer.0", "norm", "scale"])
    def test_one_flipped_bit_is_found_and_named(self, pair, name: str) -> None:
        publisher, subscriber = pair
        into = processes.buffers(processes.specs("float32"))
        rng = random.Random(name)
        for version in range(8):
            publisher.publish(version, processes.random_weights(version))
            raw = publisher._slots.tensors[version % 2][name].view(-1).view(torch.uint8)
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            with pytest.raises(FingerprintMismatch, match=rf"^{re.escape(name)} of version {version} "):
                subscriber.fetch(version, into)

    def test_a_flipped_fingerprint_is_found(self, pair) -> None:
        publisher, subscriber = pair
        publisher.publish(5, processes.random_weights(5))
        publisher._slots.fingerprints[1][2] ^= 1
        with pytest.raises(FingerprintMismatch, match=r"^norm of version 5"):
            subscriber.fetch(5, processes.buffers(processes.specs("float32")))


class TestKilledWriters:
    @pytest.mark.parametrize("last_words", range(len(processes.SHAPES)))
    def test_killed_between_two_tensors(self, start, last_words: int) -> None:
        """The version before is still whole, the one in progress cannot be had."""
        process, connection = start(processes.write_and_die, last_words)
        subscriber = SharedMemorySubscriber(receive(connection))
        connection.send("go")
        process.join(DEADLINE_S)
        assert process.exitcode == -9
        into = processes.buffers(processes.specs("float32"))
        subscriber.fetch(2, into)
        assert all((tensor == 2).all() for tensor in into.values())
        with pytest.raises(Superseded, match="wanted version 3, its slot holds -2"):
            subscriber.fetch(3, into)

    def test_killed_at_any_moment(self, start) -> None:
        shapes = {f"w{number}": (130, 400) for number in range(4)}
        rng = random.Random(3)
        found = 0
        for _ in range(10):
            process, connection = start(processes.write_freely, shapes)
            subscriber = SharedMemorySubscriber(receive(connection))
            connection.send("go")
            deadline_s = time.monotonic() + DEADLINE_S
            while max(int(word[0]) for word in subscriber._slots.versions) < 1:
                assert time.monotonic() < deadline_s
            for _ in range(rng.randrange(20_000)):
                pass
            process.kill()
            process.join(DEADLINE_S)
            into = processes.buffers(subscriber._layout.specs)
            for version in [int(word[0]) for word in subscriber._slots.versions]:
                if version >= 0:
                    subscriber.fetch(version, into)
                    assert all((tensor == version).all() for tensor in into.values())
                    found += 1
        assert found >= 10, "at least one slot is always whole"


class TestNoTraces:
    def shared_files(self, pid: int | str) -> set[tuple[str, str]]:
        """(inode, path) of everything that a process maps shared and writable."""
        lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        return {(parts[4], parts[5]) for parts in lines if parts[1] == "rw-s"}

    def holders(self, inode: str) -> list[str]:
        """Processes that map the segment."""
        found = list[str]()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                text = (folder / "maps").read_text()
            except OSError:  # it ended meanwhile, or belongs to someone else
                continue
            if re.search(rf" {inode} +/memfd:llamarl-weights", text):
                found.append(folder.name)
        return found

    def test_no_name_and_freed_with_its_last_process(self, start) -> None:
        """The only thing shared is an anonymous memfd, which the kernel frees when nobody maps it."""
        process, connection = start(processes.write_freely, processes.SHAPES)
        address = receive(connection)
        ((inode, path),) = self.shared_files(process.pid)
        assert path == "/memfd:llamarl-weights (deleted)"
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            assert not os.readlink(descriptor).startswith(("/dev/shm/", "/tmp/llamarl"))
        reader, answer = start(processes.read_freely, address, 1_000_000)
        deadline_s = time.monotonic() + DEADLINE_S
        while len(self.holders(inode)) < 2:
            assert time.monotonic() < deadline_s
        process.kill()
        process.join(DEADLINE_S)
        assert self.holders(inode) == [str(reader.pid)], "the reader keeps it alive"
        reader.kill()
        reader.join(DEADLINE_S)
        assert self.holders(inode) == []
        answer.close()

    def test_a_dead_writer_cannot_be_subscribed_to(self, start) -> None:
        process, connection = start(processes.write_freely, processes.SHAPES)
        address = receive(connection)
        process.kill()
        process.join(DEADLINE_S)
        with pytest.raises(OSError, match=str(address.pid)):
            SharedMemorySubscriber(address)
