"""Descriptors and memory that weights by sockets take on large layouts, by the rules of `transports/p2p.py`."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.weight_sync import relays
from llamarl.weight_sync.buckets import BUCKET_BYTES
from llamarl.weight_sync.transports.p2p import MAX_KEPT, MAX_THREADS, streams_from_each


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Most of what one version takes at the same time, beside what a process has anyway."""

    trainer_descriptors: int
    """Descriptors of a trainer rank: a port, and a stream to each reader."""
    generator_descriptors: int
    """Descriptors of a generator rank: streams from trainer ranks and other readers, and to these, and a port."""
    scratch_bytes: int
    """Memory for buckets under way, of all generator ranks on a host."""


def growth(num_trainers: int, num_generators: int, ranks_per_host: int, bucket_bytes: int = BUCKET_BYTES) -> Growth:
    """The most, where each generator rank needs something of each trainer rank and is on another host than these.

    Args:
        ranks_per_host: generator ranks.
    """
    per_trainer = streams_from_each(num_trainers)
    streams = num_trainers * per_trainer
    passed = min(streams, relays.MAX_LINES + MAX_THREADS) + min(2 * streams, relays.MAX_SERVED)
    return Growth(
        trainer_descriptors=1 + num_generators * per_trainer,
        generator_descriptors=1 + min(streams, MAX_KEPT + MAX_THREADS) + passed,
        scratch_bytes=ranks_per_host * min(streams, MAX_THREADS) * bucket_bytes,
    )
