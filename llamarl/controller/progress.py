"""Records that every object of the controller shares: how far a run is, and how a version reached the generators."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llamarl.executors.replies import Adoption, Mismatch

NO_VERSION = -1
"""Older than every version of the weights."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run is, in optimizer steps. Step n makes version n of the weights.

    All objects read the same record, and each field has one writer::

        progress = Progress.resumed_at(4)       # from the checkpoint of step 4
        progress.begun = 5                      # the trainer is asked for step 5
        assert progress.is_stepping
        progress.trained = 5                    # the trainer has answered
    """

    begun: int = 0
    """Newest step that the trainer was asked for. Written by `TrainedExecutors`."""
    trained: int = 0
    """Newest step that the trainer has completed. Written by `TrainedExecutors`."""
    made: int = 0
    """Newest version that is made, as `admission.py` and `docs/staleness.md` say: its step has ended and the slots of
    its groups are free. It may still be on its way to the generators. Written by `Admission`."""
    released: int = NO_VERSION
    """Version that a generator must serve, or a newer one, to get requests. Written by `Replicas`."""
    critic_begun: int = 0
    """Newest step that the critic was asked for. Written by `TrainedExecutors`."""
    critic: int = 0
    """Newest step that the critic has completed. Written by `TrainedExecutors`."""
    recorded: int = 0
    """Newest step that this process wrote to `metrics.jsonl`; 0 means none. Written by `Telemetry`."""

    @classmethod
    def resumed_at(cls, step: int) -> Progress:
        """Returns the progress of a run that continues after `step` completed steps."""
        return cls(begun=step, trained=step, made=step, critic_begun=step, critic=step)

    @property
    def is_stepping(self) -> bool:
        """Whether the trainer works on a step."""
        return self.begun > self.trained


@dataclass(kw_only=True, slots=True)
class SyncReport:
    """How one version reached the generators in service: the slowest or worst value of all generators."""

    sync_s: float = math.nan
    """Seconds from the start of `publish` until the version was released."""
    publish_s: float = math.nan
    fetch_s: float = 0.0
    stall_s: float = 0.0
    num_bytes: int = 0
    """Bytes received per generator."""
    fingerprint: str = ""
    """Fingerprint of the adopted weights, in hexadecimal digits."""
    tensors: str = ""
    """`Adoption.tensors`."""
    mismatch: Mismatch | None = None
    """None means that no generator was probed."""
    num_late: int = 0
    """Generators that the release did not wait for."""
    num_resyncs: int = 0
    """Fetches since the last report that failed or delivered other weights than the trainer published."""
    num_probing: int = 0
    """Generators that have adopted the version and whose probe is not answered yet."""

    def add(self, adoption: Adoption, mismatch: Mismatch | None) -> None:
        """Adds the adoption of one generator."""
        self.fetch_s, self.stall_s = max(self.fetch_s, adoption.fetch_s), max(self.stall_s, adoption.stall_s)
        self.num_bytes = max(self.num_bytes, adoption.num_bytes)
        self.fingerprint, self.tensors = adoption.fingerprint, adoption.tensors
        if mismatch is not None and (self.mismatch is None or mismatch.mean > self.mismatch.mean):
            self.mismatch = mismatch

    def metrics(self) -> dict[str, float]:
        """Returns metrics for the row of the step that made the version."""
        worst = self.mismatch
        probed = {"probe_kl": worst.kl, "mismatch_max": worst.largest, "mismatch_mean": worst.mean} if worst else {}
        return {
            **probed,
            "publish_s": self.publish_s,
            "fetch_s": self.fetch_s,
            "stall_s": self.stall_s,
            "sync_bytes": float(self.num_bytes),
            "late_generators": float(self.num_late),
            "resyncs": float(self.num_resyncs),
        }
