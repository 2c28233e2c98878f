"""What large layouts take, by a formula that is held to the real thing where that is small."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import Trainer, faults
from weight_processes import wanted, whole

from llamarl.weight_sync.growth import growth
from llamarl.weight_sync.transports import p2p
from llamarl.weight_sync.transports.p2p import P2pPublisher, P2pSubscriber
from tests.nightly import nightly


def num_connections(pid: int) -> int:
    """Descriptors of a process that are ports or connections of TCP."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text(encoding="utf-8").splitlines()[1:]
    inodes = {line.split()[9] for line in lines}
    links = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()]
    return sum(link.removeprefix("socket:[").removesuffix("]") in inodes for link in links)


@nightly("processes; by day the same sums are made in one")
def test_descriptors_of_processes_are_as_foretold(world: Callable[..., Any]) -> None:
    made = world("p2p", (4, 1, 1), 2, replicas=0, mortal=True)
    for host in ("127.0.0.2", "127.0.0.3"):
        for rank in range(2):
            made.add_generator(rank, host=host)
    before = [num_connections(process.pid) for process, *_ in made.generators]
    foretold = growth(4, 4, ranks_per_host=2)
    for version in range(3):
        address = made.publish(version, [version - 1] if version else [])
        assert made.wrong(version, made.fetch(version, address)) == []
        assert [num_connections(process.pid) for process, _ in made.trainers] == [foretold.trainer_descriptors] * 4
        for one, (process, *_) in zip(before, made.generators, strict=True):
            assert 1 + 2 * 4 <= num_connections(process.pid) - one <= foretold.generator_descriptors


@nightly("streams to many; by day their number is bounded in test_relays.py")
def test_memory_of_streams_is_as_foretold_and_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In many small buckets, by few threads, and with fewer kept than there are trainer ranks."""
    monkeypatch.setattr(P2pPublisher, "BUCKET_BYTES", 512)
    monkeypatch.setattr(p2p, "MAX_THREADS", 2)
    monkeypatch.setattr(p2p, "MAX_KEPT", 3)
    specs = wanted(2, "float32")
    trainer = Trainer("p2p", specs, 6, tmp_path, host="127.0.0.1")
    ranks = [P2pSubscriber(specs[rank], rank, host=f"127.0.0.{2 + number}") for number in range(2) for rank in range(2)]
    for version in range(3):
        address = trainer.publish(version, whole(version), ())
        for one in ranks:
            assert not faults(one, version, address, whole(version))
            assert len(one._streams) == 3
            assert sum(scratch.nbytes for scratch in one._scratch) <= 2 * max(512, _largest(one))
            assert len(one._scratch) <= 2
    for one in ranks:
        one.close()
    trainer.close()


def _largest(subscriber: P2pSubscriber) -> int:
    return max(bucket.num_bytes for stream in subscriber._streams.values() for bucket in stream.buckets)


def test_512_ranks_to_512_fit_a_process_and_a_host() -> None:
    found = growth(512, 512, ranks_per_host=8)
    assert max(found.trainer_descriptors, found.generator_descriptors) <= 1024 - 128, "some are for other things"
    assert found.scratch_bytes <= 1 << 30
