"""Upper bounds of descriptors and memory of the p2p transport on large layouts, by the rules of `transports/p2p.py`."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.weight_sync import relays
from llamarl.weight_sync.base import BUCKET_BYTES
from llamarl.weight_sync.transports.p2p import MAX_KEPT, MAX_THREADS, streams_from_each


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Largest numbers of descriptors and bytes for one version, in addition to those of the idle process."""

    trainer_descriptors: int
    """Descriptors of a trainer rank: a port, and a stream to each reader."""
    generator_descriptors: int
    """Descriptors of a generator rank: streams from trainer ranks, from and to other readers, and a port."""
    scratch_bytes: int
    """Memory for buckets in transfer, of all generator ranks on a host."""


def growth(num_trainers: int, num_generators: int, ranks_per_host: int, bucket_bytes: int = BUCKET_BYTES) -> Growth:
    """Returns the bounds if each generator rank needs a part of each trainer rank and runs on another host than these.

    Args:
        ranks_per_host: generator ranks of a host.
    """
    per_trainer = streams_from_each(num_trainers)
    streams = num_trainers * per_trainer
    passed = min(streams, relays.MAX_LINES + MAX_THREADS) + min(2 * streams, relays.MAX_SERVED)
    return Growth(
        trainer_descriptors=1 + num_generators * per_trainer,
        generator_descriptors=1 + min(streams, MAX_KEPT + MAX_THREADS) + passed,
        scratch_bytes=ranks_per_host * min(streams, MAX_THREADS) * bucket_bytes,
    )
