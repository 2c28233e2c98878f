"""The parts of a weight sync: the choice of the transport, the probe, and the report. `WeightSync` joins them.

Nobody waits for a slow replica longer than `weight_sync.patience_s`: a version is then released without it. As requests
go only to replicas that serve the released version or a newer one, the tokens of a group are never older than the
version that was released when the group was admitted (`docs/staleness.md`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from llamarl.config import RunConfig
from llamarl.controller.lives import Restarted
from llamarl.controller.ports import TrainerPort
from llamarl.controller.replica import Replica
from llamarl.executors.probes import Mismatch, Probe
from llamarl.executors.replies import Adoption, Published
from llamarl.training.result import NonFiniteStep
from llamarl.weight_sync.layout import TensorSpec
from llamarl.weight_sync.select import Selection, sample, select

MAX_FAILURES = 3
"""Fetches in a row that may fail at one replica before the run ends."""
RETRY_S = 1.0
"""Pause after a fetch that failed."""
RUINED_NATS = 100.0
"""Mean size of the log-probabilities of sampled tokens that no working policy has: one in 1e43."""


class WeightsWrong(RuntimeError):
    """A generator received or serves something else than the trainer published."""


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


class Transports:
    """Choice of a transport for each replica: one where it shares the trainer's host, one where it does not."""

    def __init__(
        self,
        config: RunConfig,
        trainer: TrainerPort,
        trainer_hosts: Sequence[str],
        tell: Callable[[Selection], None],
    ) -> None:
        """
        Args:
            trainer_hosts: those of its ranks. With several of them it shares memory with nobody.
            tell: what was chosen, and why.
        """
        self._pinned, self._is_inline = config.weight_sync.transport, config.cluster.kind == "inline"
        self._trainer, self._tell = trainer, tell
        self._host = _only(trainer_hosts)
        self._chosen = dict[bool, str]()
        """Transports to replicas on the trainer's host (True), and to others (False)."""
        self._choosing = asyncio.Lock()
        self._num_tries = 0
        self._layouts: Sequence[tuple[TensorSpec, ...]] = ()
        """Tensors that each rank of a replica, of all replicas the same, wants to receive."""

    async def begin(self, replicas: Sequence[Replica]) -> None:
        """Tells the trainer what the first replicas want to receive, and chooses for them."""
        self._layouts, *others = await asyncio.gather(*(replica.port.weight_specs() for replica in replicas))
        assert all(wanted == self._layouts for wanted in others), "one replica wants other weights than the others"
        for rank, specs in enumerate(self._layouts):
            await self._trainer.set_layout(rank, specs)
        await self.choose(replicas)

    async def restore(self, trainer: TrainerPort, hosts: Sequence[str]) -> None:
        """A new trainer, in the place of the old one, publishes as that one did; who shared a host with that one is
        lost with it, if the new one is on another."""
        if (host := _only(hosts)) != self._host:
            self._host = host
            self._chosen.pop(True, None)
        for rank, specs in enumerate(self._layouts):
            await trainer.set_layout(rank, specs)
        for same_host, transport in self._chosen.items():
            await trainer.choose(transport, same_host)

    async def choose(self, replicas: Sequence[Replica]) -> bool:
        """Says for each replica what brings its weights: pinned, or what is the fastest for replicas placed like it,
        with a sample of the real weights; the trainer publishes by it from then on.

        Returns:
            Whether the trainer has begun with a transport: what it published before cannot be had there.
        """
        if not any(self._layouts):  # simulated generators receive nothing
            return False
        async with self._choosing:
            begun = set(self._chosen.values())
            for same_host in (True, False):
                alike = [one for one in replicas if (one.handle.hosts == (self._host,)) == same_host]
                while alike and same_host not in self._chosen:
                    with suppress(Restarted):  # the trainer died while one was tried
                        self._chosen[same_host] = await self._fastest(alike, same_host)
                for replica in alike:
                    replica.transport = self._chosen[same_host]
            return not begun.issuperset(self._chosen.values())

    async def _fastest(self, replicas: Sequence[Replica], same_host: bool) -> str:
        async def one_sync(transport: str) -> None:
            self._num_tries += 1
            version = self._num_tries
            address = await self._trainer.publish_sample(version, transport)
            await asyncio.gather(*(replica.port.try_sample(version, address) for replica in replicas))

        of_one = sum(spec.num_bytes for specs in self._layouts for spec in sample(specs))
        names = await self._trainer.transports(same_host, self._is_inline)
        found = await select(self._pinned, names, one_sync, len(replicas) * of_one)
        await self._trainer.choose(found.transport, same_host)
        self._tell(replace(found, same_host=same_host))
        return found.transport


def _only(hosts: Sequence[str]) -> str | None:
    return hosts[0] if len(hosts) == 1 else None


async def probed(
    replica: Replica, published: Published, max_mismatch: float, outsized: Callable[[], Awaitable[str]]
) -> Mismatch | None:
    """Distance of a replica's log-probabilities, which serves a version, from the trainer's; None: the trainer gave no
    probe. `outsized` names a weight of the trainer's that is damaged.

    Raises:
        WeightsWrong: further than `weight_sync.max_mismatch`.
        NonFiniteStep: the trainer's own say that its weights are ruined, so that nobody can serve them.
    """
    if published.probe is None:
        return None
    found = mismatch_of(published.probe, await replica.port.score(published.probe.sequences))
    if not found.mean <= max_mismatch:
        compared_N = np.concatenate(published.probe.logprobs, dtype=np.float64)[published.probe.is_compared_N]
        own = float(np.abs(compared_N).mean())
        if not own < RUINED_NATS:
            fix = "lower trainer.learning_rate or trainer.max_grad_norm, and go on from an earlier checkpoint"
            raise NonFiniteStep(
                f"training has diverged: after step {published.version} the trainer's own log-probabilities are "
                f"{own:.3g} nats on average; {await outsized() or fix}"
            )
        raise WeightsWrong(
            f"{replica.name} serves version {published.version}, yet its log-probabilities are {found.mean:.3g} nats "
            f"from the trainer's on average (weight_sync.max_mismatch = {max_mismatch:g})"
        )
    return found


def mismatch_of(probe: Probe, scored: Sequence[np.ndarray]) -> Mismatch:
    """Distance of a generator's log-probabilities from the trainer's.

    KL(generator || trainer) by the estimator r - 1 - log r of Schulman, "Approximating KL divergence" (2020), r being
    the trainer's probability over the generator's: never negative, and exact in expectation over what was sampled.
    """
    log_ratio = np.concatenate(probe.logprobs).astype(np.float64) - np.concatenate(list(scored)).astype(np.float64)
    log_ratio = log_ratio[probe.is_compared_N]
    if not np.isfinite(log_ratio).all():
        return Mismatch(kl=math.inf, largest=math.inf, mean=math.inf)
    size = np.abs(log_ratio)
    with np.errstate(over="ignore"):
        kl = float(np.mean(np.expm1(log_ratio) - log_ratio))
    return Mismatch(kl=kl, largest=float(size.max(initial=0)), mean=float(size.mean()))
