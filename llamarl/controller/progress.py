"""Records that objects of the controller share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llamarl.executors.probes import Mismatch
from llamarl.executors.replies import Adoption


@dataclass(kw_only=True, slots=True)
class SyncReport:
    """Report of how a version came to the generators in service; of several the slowest or the worst."""

    sync_s: float = math.nan
    """Seconds from the start of `publish` until the version was released."""
    publish_s: float = math.nan
    fetch_s: float = 0.0
    stall_s: float = 0.0
    num_bytes: int = 0
    """Bytes that came to one replica, the most of all."""
    fingerprint: str = ""
    """Fingerprint of the weights that serve, in hexadecimal digits."""
    tensors: str = ""
    """`Adoption.tensors`."""
    mismatch: Mismatch | None = None
    """None: not probed."""
    num_late: int = 0
    """Replicas that were left behind."""
    num_resyncs: int = 0
    """Fetches since the last report that failed or brought something else than was published."""
    num_probing: int = 0
    """Replicas that have adopted it and have not shown yet that they serve the right thing."""

    def add(self, adoption: Adoption, mismatch: Mismatch | None) -> None:
        """One replica has adopted it."""
        self.fetch_s, self.stall_s = max(self.fetch_s, adoption.fetch_s), max(self.stall_s, adoption.stall_s)
        self.num_bytes = max(self.num_bytes, adoption.num_bytes)
        self.fingerprint, self.tensors = adoption.fingerprint, adoption.tensors
        if mismatch is not None and (self.mismatch is None or mismatch.mean > self.mismatch.mean):
            self.mismatch = mismatch

    def measured(self) -> dict[str, float]:
        """Metrics of the sync, for the step that made the version."""
        found = self.mismatch
        probed = {"probe_kl": found.kl, "mismatch_max": found.largest, "mismatch_mean": found.mean} if found else {}
        return {
            **probed,
            "publish_s": self.publish_s,
            "fetch_s": self.fetch_s,
            "stall_s": self.stall_s,
            "sync_bytes": float(self.num_bytes),
            "late_generators": float(self.num_late),
            "resyncs": float(self.num_resyncs),
        }
