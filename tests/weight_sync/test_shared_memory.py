"""Shared memory: versions, damage, and writers that are killed. The values of a tensor tell its version.

Not covered: processors that reorder stores (this must run on them too).
"""

from __future__ import annotations

import gc
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import weight_processes as processes
from in_process import Trainer, faults

from llamarl.config.errors import RanksLost
from llamarl.weight_sync.base import FingerprintMismatch, Superseded, TransferFailed, WriterPlan, plan_writers
from llamarl.weight_sync.layout import Address, TensorSpec, lay_out
from llamarl.weight_sync.select import Reader
from llamarl.weight_sync.transports.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber, word
from tests.nightly import nightly
from tests.weight_sync.conftest import DEADLINE_S, exchange_among, receive

SHAPES = {"embed": (50, 30), "other": (50, 30), "layer.0": (64, 64), "norm": (7,), "nothing": (0, 3)}
SPECS = tuple(TensorSpec.whole(name, shape, "float32") for name, shape in SHAPES.items())
NUM_KILLS = 50
BIG = tuple(TensorSpec.whole(f"w{number}", (130, 400), "float32") for number in range(4))


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def alone(specs: tuple[TensorSpec, ...]) -> WriterPlan:
    """One trainer rank that holds everything."""
    return plan_writers([lay_out(specs)], [list(specs)])[0]


@pytest.fixture
def pair() -> Iterator[tuple[SharedMemoryPublisher, SharedMemorySubscriber]]:
    """Both ends in this process, through two mappings of the memory."""
    publisher = SharedMemoryPublisher(alone(SPECS), lambda value: [value])
    with closing(publisher), closing(SharedMemorySubscriber(SPECS, 3, timeout_s=0.2)) as subscriber:
        yield publisher, subscriber


class TestVersions:
    def test_what_was_fetched_stays_while_it_is_in_use(self, pair) -> None:
        publisher, subscriber = pair
        served = subscriber.fetch(0, publisher.publish(0, weights(0), ()))
        for version in range(1, 9):
            publisher.publish(version, weights(version), [0])
        assert all(torch.equal(served[name], weight) for name, weight in weights(0).items())
        assert (publisher._segments[0].versions != 0).sum() == 3, "as few slots as can be"

    def test_what_is_published_again_takes_the_place_of_what_was_damaged(self, pair) -> None:
        """Others, who have proved it, serve on from where it was."""
        publisher, subscriber = pair
        served = subscriber.fetch(0, publisher.publish(0, weights(0), ()))
        publisher._segments[0].tensors[publisher._segments[0].slot_of(0)]["norm"][3] += 1
        with pytest.raises(FingerprintMismatch, match="norm of version 0"):
            subscriber.fetch(0, publisher._address)
        again = subscriber.fetch(0, publisher.publish(0, weights(0), [0]))
        publisher.publish(1, weights(1), [0])
        assert torch.equal(again["norm"], weights(0)["norm"]) and torch.equal(served["embed"], weights(0)["embed"])

    def test_who_fetches_what_is_published_again_is_told_to_begin_anew(self, pair, monkeypatch) -> None:
        """Not to wait for a slot in which nobody writes."""
        publisher, subscriber = pair
        address, prove = publisher.publish(0, weights(0), ()), subscriber.prove

        def published_again(*arguments: Any) -> None:
            publisher.publish(0, weights(0), [0])
            prove(*arguments)

        monkeypatch.setattr(subscriber, "prove", published_again)
        with pytest.raises(Superseded, match="the trainer is at 0"):
            subscriber.fetch(0, address)
        monkeypatch.undo()
        assert torch.equal(subscriber.fetch(0, address)["norm"], weights(0)["norm"])

    def test_only_what_is_there_can_be_had(self, pair) -> None:
        publisher, subscriber = pair
        for version in range(3):
            address = publisher.publish(version, weights(version), ())
        with pytest.raises(Superseded, match="wanted version 0, the trainer is at 2"):
            subscriber.fetch(0, address)
        with pytest.raises(TransferFailed, match=r"rank 3 waited for the trainer to begin \(version 7\) for 0.2 s"):
            subscriber.fetch(7, address)
        subscriber.fetch(2, address)

    def test_a_version_is_there_when_all_writers_say_so(self, pair) -> None:
        """Not when all of its bytes are: one that waits for that in vain has not been overtaken."""
        publisher, subscriber = pair
        address = publisher.publish(0, weights(0), ())
        publisher._segments[0].versions[0] = word(0, writing=True)
        with pytest.raises(TransferFailed, match=r"rank 3 waited for the trainer to finish \(version 0\) for 0.2 s"):
            subscriber.fetch(0, address)

    def test_a_reader_that_is_overtaken_gets_no_mixture(self, pair, monkeypatch) -> None:
        publisher, subscriber = pair
        address = publisher.publish(0, weights(0), ())
        prove_tensor, calls = subscriber.prove_tensor, list[int]()

        def prove_late(index, *args):
            calls.append(index)
            if index == 2:  # nobody said that version 0 is in use
                publisher.publish(1, weights(1), ())
                publisher.publish(2, weights(2), ())
            return prove_tensor(index, *args)

        monkeypatch.setattr(subscriber, "prove_tensor", prove_late)
        with pytest.raises(Superseded, match=r"version 0"):
            subscriber.fetch(0, address)
        assert 2 in calls

    def test_cleared_proofs_are_those_of_no_version(self, pair) -> None:
        """Who looks at a slot just then is overtaken: nothing is damaged."""
        publisher, subscriber = pair
        for version in range(2):
            address = publisher.publish(version, weights(version), ())
        (segment,) = publisher._segments
        proofs, looked = segment.proofs, list[bool]()

        class Watched:
            def __setitem__(self, place: tuple[int, int], value: int) -> None:
                proofs[place] = value
                with pytest.raises(Superseded, match="wanted version 0, the trainer is at 1"):
                    subscriber.fetch(0, address)
                looked.append(True)

            def __getitem__(self, place: tuple[int, int]) -> np.ndarray:
                return proofs[place]

        segment.proofs = Watched()
        publisher.publish(2, weights(2), ())
        assert looked

    def test_fetching_may_begin_before_publishing_ends(self, pair) -> None:
        publisher, subscriber = pair
        address = publisher.publish(0, weights(0), ())
        found = []
        reader = threading.Thread(target=lambda: found.append(subscriber.fetch(1, address)))
        subscriber._timeout_s = DEADLINE_S
        reader.start()
        publisher.publish(1, weights(1), [0])
        reader.join(DEADLINE_S)
        assert torch.equal(found[0]["embed"], weights(1)["embed"])

    def test_a_writer_that_has_not_begun_is_waited_for(self, tmp_path) -> None:
        """Its proofs of the version that lay there before are not those of the new one."""
        (specs,) = processes.wanted(1, "float32")
        trainer = Trainer("shared_memory", [specs], 2, tmp_path)
        for version in range(2):
            address = trainer.publish(version, processes.whole(version))
        subscriber, found = SharedMemorySubscriber(specs, 0, timeout_s=DEADLINE_S), list[list[str]]()
        reader = threading.Thread(target=lambda: found.append(faults(subscriber, 2, address, processes.whole(2))))
        trainer.publish(2, processes.whole(2), between=lambda: (reader.start(), time.sleep(0.1)))
        reader.join(DEADLINE_S)
        assert found == [[]]
        other = SharedMemorySubscriber(specs, 0)
        other.fetch(2, address)
        assert subscriber.fingerprint == other.fingerprint
        trainer.close()

    def test_a_stray_write_of_a_reader_harms_nobody_else(self, pair) -> None:
        publisher, subscriber = pair
        address = publisher.publish(0, weights(0), ())
        subscriber.fetch(0, address)["embed"].fill_(9)
        other = SharedMemorySubscriber(SPECS, 0).fetch(0, address)
        assert torch.equal(other["embed"], weights(0)["embed"])
        with pytest.raises(FingerprintMismatch, match=r"^embed of version 0 on generator rank 3"):
            subscriber.fetch(0, address)

    def test_no_mixture_under_load(self, lend) -> None:
        """200 versions, each adopted by one of two readers that look at what they serve in between."""
        _, writer = lend(processes.publish_uniform, alone(BIG))
        exchange_among([writer])
        readers = [lend(processes.serve_freely, BIG)[1] for _ in range(2)]
        serving, looked = [-1, -1], 0
        for version in range(200):
            writer.send((version, serving))  # while both look at their own versions
            address = receive(writer)
            readers[version % 2].send((version, address))
            looks, torn = receive(readers[version % 2])
            assert torn == []
            serving[version % 2], looked = version, looked + looks
        assert looked > 400


class TestDamage:
    """Everything is named within the sync in which it happens."""

    @pytest.mark.parametrize("name", ["embed", "layer.0", "norm"])
    def test_a_flipped_bit(self, pair, name: str) -> None:
        publisher, subscriber = pair
        rng = random.Random(name)
        for version in range(8):
            address = publisher.publish(version, weights(version), ())
            slot = publisher._segments[0].slot_of(version)
            raw = publisher._segments[0].tensors[slot][name].view(-1).view(torch.uint8)
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            with pytest.raises(FingerprintMismatch, match=rf"^{re.escape(name)} of version {version} on .* rank 3"):
                subscriber.fetch(version, address)

    def test_a_missed_tensor(self, pair) -> None:
        publisher, subscriber = pair
        parts = tuple(part for part in publisher._plan.parts[0] if SPECS[part.tensor].name != "norm")
        object.__setattr__(publisher._plan, "parts", (parts,))
        address = publisher.publish(0, weights(0), ())
        with pytest.raises(FingerprintMismatch, match=r"^norm of version 0 .* wrote 0 of its 28 bytes"):
            subscriber.fetch(0, address)

    def test_a_stale_tensor(self, pair) -> None:
        """It keeps the bytes of the version that lay in the slot before."""
        publisher, subscriber = pair
        for version in range(3):
            address = publisher.publish(version, weights(version), ())
        slot = publisher._segments[0].slot_of(2)
        publisher._segments[0].tensors[slot]["layer.0"].copy_(weights(0)["layer.0"])
        with pytest.raises(FingerprintMismatch, match=r"^layer\.0 of version 2"):
            subscriber.fetch(2, address)

    def test_exchanged_rows_and_tensors(self, pair) -> None:
        publisher, subscriber = pair
        address = publisher.publish(0, weights(0), ())
        tensors = publisher._segments[0].tensors[0]
        tensors["layer.0"][[3, 4]] = tensors["layer.0"][[4, 3]]
        with pytest.raises(FingerprintMismatch, match=r"^layer\.0 of version 0"):
            subscriber.fetch(0, address)
        address = publisher.publish(1, weights(1), ())
        tensors = publisher._segments[0].tensors[1]
        kept = tensors["embed"].clone()
        tensors["embed"].copy_(tensors["other"])
        tensors["other"].copy_(kept)
        with pytest.raises(FingerprintMismatch, match=r"^embed of version 1"):
            subscriber.fetch(1, address)

    def test_a_flipped_proof(self, pair) -> None:
        publisher, subscriber = pair
        address = publisher.publish(5, weights(5), ())
        publisher._segments[0].proofs[0, 0, 0, 3] ^= 1
        with pytest.raises(FingerprintMismatch, match=r"^norm of version 5"):
            subscriber.fetch(5, address)


class TestKilledWriters:
    @pytest.mark.parametrize("killed", [0, 1])
    @pytest.mark.parametrize("last_words", [0, 2])
    def test_killed_between_two_tensors(self, start, killed: int, last_words: int) -> None:
        """With one of two trainer ranks dead, the version before is whole, and that in progress cannot be had."""
        held = [[TensorSpec(**_fields(spec, rank)) for spec in BIG] for rank in range(2)]
        plans = plan_writers([lay_out(BIG)], held)
        writers = [
            start(processes.write_and_die, "shared_memory", plan, last_words if rank == killed else 99, {})
            for rank, plan in enumerate(plans)
        ]
        exchange_among([connection for _, connection in writers])
        for _ in range(3):
            for _, connection in writers:
                connection.send("publish")
            address, _ = [receive(connection) for _, connection in writers]
        subscriber = SharedMemorySubscriber(BIG, 0)
        served = subscriber.fetch(2, address)
        for _, connection in writers:
            connection.send("die")
        writers[killed][0].join(DEADLINE_S)
        assert writers[killed][0].exitcode == -9
        assert all((tensor == 2).all() for tensor in served.values())
        assert all((tensor == 2).all() for tensor in subscriber.fetch(2, address).values())
        started_s = time.monotonic()
        with pytest.raises(TransferFailed, match=rf"but process {writers[killed][0].pid} is gone"):
            subscriber.fetch(3, address)
        assert time.monotonic() - started_s < 50, "nobody waits 60 s for who is gone"

    def newest(self, subscriber: SharedMemorySubscriber, address: Address) -> dict[str, torch.Tensor]:
        """Of a writer that waits for nobody."""
        while True:
            try:
                return subscriber.fetch(subscriber._open(address).newest, address)
            except Superseded:
                continue

    @nightly("many kills; by day no mixture under load, and test_transports.py kills trainers")
    def test_killed_at_any_moment_and_started_anew(self, start) -> None:
        """The old version is served throughout; the next one is adopted soon after the restart."""
        plan, rng, reader = alone(BIG), random.Random(3), Reader(BIG, 0)
        for _ in range(NUM_KILLS):
            process, connection = start(processes.write_freely, plan, 1)
            exchange_among([connection])
            connection.send("go")
            started_s = time.monotonic()
            address = receive(connection)
            subscriber = reader.at(address)
            served = self.newest(subscriber, address)
            assert time.monotonic() - started_s < 50, "a fetch that waits for it takes 60 s"
            segment = subscriber._open(address)
            until = segment.newest + rng.randrange(1, 4)
            while segment.newest < until:
                assert time.monotonic() - started_s < DEADLINE_S
            for _ in range(rng.randrange(5_000)):
                pass
            process.kill()
            process.join(DEADLINE_S)
            words = segment.versions[:, 0].tolist()
            whole = [word // 2 - 1 for word in words if word and not word % 2]
            assert whole, "at least one slot is always whole"
            for version in whole:
                assert all((tensor == version).all() for tensor in subscriber.fetch(version, address).values())
            assert len(served) == len(BIG)


def _fields(spec: TensorSpec, rank: int) -> dict:
    rows = spec.global_shape[0] // 2
    box = spec.box.cut(0, rank * rows, (rank + 1) * rows)
    return {"name": spec.name, "global_shape": spec.global_shape, "box": box, "dtype": spec.dtype}


class TestNoTraces:
    def holders(self, inode: str) -> list[str]:
        """Processes that map the memory."""
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
        process, connection = start(processes.publish_uniform, alone(BIG))
        exchange_among([connection])
        connection.send((0, ()))
        address = receive(connection)
        (place,) = address.places.values()
        assert os.readlink(place) == "/memfd:llamarl-weights (deleted)"
        inode = str(os.stat(place).st_ino)
        reader, answer = start(processes.serve_freely, BIG)
        answer.send((0, address))
        assert receive(answer)[1] == []
        process.kill()
        process.join(DEADLINE_S)
        assert self.holders(inode) == [str(reader.pid)], "the reader keeps it alive"
        reader.kill()
        reader.join(DEADLINE_S)
        assert self.holders(inode) == []

    def test_a_dead_publisher_cannot_be_fetched_from(self, start) -> None:
        process, connection = start(processes.write_freely, alone(BIG), 1)
        exchange_among([connection])
        connection.send("go")
        address = receive(connection)
        process.kill()
        process.join(DEADLINE_S)
        with pytest.raises(TransferFailed, match=f"/proc/{process.pid}/fd"):
            SharedMemorySubscriber(BIG, 0).fetch(0, address)

    def test_closing_frees_memory_and_descriptors(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            publisher = SharedMemoryPublisher(alone(BIG), lambda value: [value])
            subscriber = SharedMemorySubscriber(BIG, 0)
            subscriber.fetch(0, publisher.publish(0, processes.uniform(0, publisher._plan.held), ()))
            publisher.close()
            subscriber.close()
        assert len(os.listdir("/proc/self/fd")) <= before + 1

    @pytest.mark.parametrize("num_exchanges", [0, 1])
    def test_one_that_is_not_opened_leaves_no_descriptor(self, num_exchanges: int) -> None:
        """Other ranks are lost when memory is made, or when it is mapped."""
        answers = iter(range(num_exchanges))

        def exchange(value: object) -> list:
            if next(answers, None) is None:
                raise RanksLost("rank 1 is gone")
            return [value]

        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(RanksLost):
            SharedMemoryPublisher(alone(BIG), exchange)
        gc.collect()  # what was mapped
        assert len(os.listdir("/proc/self/fd")) == before


def test_slots_that_a_gpu_writes_into_are_pinned_once_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    specs, pinned, calls = (TensorSpec.whole("w", (64, 32), "float32"),), dict[int, int](), list[int]()

    class Runtime:
        def cudaHostRegister(self, place: int, num_bytes: int, flags: int) -> int:
            pinned[place] = num_bytes
            calls.append(place)
            return 0

        def cudaHostUnregister(self, place: int) -> int:
            del pinned[place]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    (plan,) = plan_writers([lay_out(specs)], [specs])
    publisher = SharedMemoryPublisher(plan, lambda value: [value], device=torch.device("cuda"))
    for version in range(6):
        publisher.publish(version, {"w": torch.full((64, 32), float(version))}, (version - 1,))
    assert list(pinned.values()) == [64 * 32 * 4] * len(calls) and len(calls) == len(set(calls)) <= 3
    assert all(place % 4096 == 0 for place in calls)
    publisher.close()
    assert not pinned
