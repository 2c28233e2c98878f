"""What a weight sync reports: how long it took, what it brought, and how far log-probabilities are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llamarl.executors.replies import Adoption


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Distance between a generator's and the trainer's log-probabilities of the same tokens by the same weights."""

    kl: float
    """Estimate of KL(generator || trainer) per token, in nats."""
    largest: float
    """Largest absolute difference, in nats."""
    mean: float
    """Mean absolute difference, in nats."""


@dataclass(kw_only=True, slots=True)
class SyncReport:
    """How a version came to the generators in service; of several the slowest or the worst."""

    sync_s: float = math.nan
    """From the start of `publish` until the version was released."""
    publish_s: float = math.nan
    fetch_s: float = 0.0
    stall_s: float = 0.0
    num_bytes: int = 0
    """That came to one replica."""
    fingerprint: str = ""
    """Of the weights that serve, in hexadecimal digits."""
    mismatch: Mismatch | None = None
    """None: not probed."""
    num_late: int = 0
    """Replicas that were left behind."""
    num_resyncs: int = 0
    """Fetches since the last report that failed or brought something else than was published."""

    def add(self, adoption: Adoption, mismatch: Mismatch | None) -> None:
        """One replica has adopted it."""
        self.fetch_s, self.stall_s = max(self.fetch_s, adoption.fetch_s), max(self.stall_s, adoption.stall_s)
        self.num_bytes = max(self.num_bytes, adoption.num_bytes)
        self.fingerprint = adoption.fingerprint
        if mismatch is not None and (self.mismatch is None or mismatch.mean > self.mismatch.mean):
            self.mismatch = mismatch

    def measured(self) -> dict[str, float]:
        """For the metrics of the step that made the version."""
        found = self.mismatch
        probed = {"mismatch_kl": found.kl, "mismatch_max": found.largest, "mismatch_mean": found.mean} if found else {}
        return probed | {
            "publish_s": self.publish_s,
            "fetch_s": self.fetch_s,
            "stall_s": self.stall_s,
            "sync_bytes": float(self.num_bytes),
            "late_generators": float(self.num_late),
            "resyncs": float(self.num_resyncs),
        }
