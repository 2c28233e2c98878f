"""`WeightSync`: the trainer publishes versions, each generator adopts the newest one when it can.

::

    publish(version, in use) -> [newest version] -> follower of each replica: adopt -> probe -> in service
                                                            |
                          release the step's slots <- all in service have it, or patience is over

Nobody waits for a slow replica longer than `weight_sync.patience_s`: a version is then released without it. As requests
go only to replicas that serve the released version or a newer one, the tokens of a group are never older than the
version that was released when the group was admitted (`docs/staleness.md`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from llamarl.cluster.api import ExecutorHandle, MeshFailed
from llamarl.config.schema import WeightSyncConfig
from llamarl.controller.generators import NO_VERSION, Generators, Replica
from llamarl.controller.supervision import Signal, Supervisor
from llamarl.controller.sync_report import Mismatch, SyncReport
from llamarl.controller.telemetry import Telemetry
from llamarl.executors.replies import Adoption, Probe, Published
from llamarl.weight_sync.layout import TensorSpec
from llamarl.weight_sync.select import candidates, sample, select

CallTrainer = Callable[..., Coroutine[Any, Any, Any]]
"""Calls a method of the trainer, by name."""
MAX_FAILURES = 3
"""Fetches in a row that may fail at one replica before the run ends."""
RETRY_S = 1.0
"""Pause after a fetch that failed."""


class WeightsWrong(RuntimeError):
    """What a generator received or serves is not what the trainer published."""


class _Round:
    """One version on its way to the replicas in service."""

    def __init__(self, version: int, late: set[Replica]) -> None:
        self.version = version
        self.late = late
        """Those that do not serve it yet."""
        self.report = SyncReport()
        self.done = asyncio.Event()
        self.leave()

    def arrived(self, replica: Replica, adoption: Adoption, mismatch: Mismatch | None) -> None:
        """`replica` serves this version or a newer one."""
        if replica in self.late:
            self.report.add(adoption, mismatch)
        self.leave(replica)

    def leave(self, replica: Replica | None = None) -> None:
        """`replica` need not be waited for."""
        self.late.discard(replica)
        if not self.late:
            self.done.set()


class WeightSync:
    """Keeps the generators' weights up to date."""

    def __init__(
        self,
        config: WeightSyncConfig,
        generators: Generators,
        call_trainer: CallTrainer,
        supervisor: Supervisor,
        telemetry: Telemetry,
        has_weights: Callable[[int], bool],
        is_inline: bool = False,
    ) -> None:
        """
        Args:
            has_weights: whether the trainer, if it is called right now, still has the weights of this version.
            is_inline: all executors are in this process.
        """
        self._is_inline = is_inline
        self._config = config
        self._generators = generators
        self._call_trainer = call_trainer
        self._supervisor = supervisor
        self._telemetry = telemetry
        self._has_weights = has_weights
        self._layouts: list[tuple[TensorSpec, ...]] = []
        """What each rank of a replica wants to receive."""
        self._newest: Published | None = None
        """None while the trainer publishes, as it may overwrite what was the newest before."""
        self._published = Signal()
        self._rounds = set[_Round]()
        self._num_resyncs = 0
        self._num_samples = 0
        self._reported_late = set[Replica]()

    async def start(self, version: int, timeout_s: float) -> None:
        """Tells the trainer what the generators want to receive, and brings them to its version."""
        replicas = list(self._generators.replicas)
        await asyncio.gather(*map(self._agree, replicas))
        for rank, specs in enumerate(self._layouts):
            await self._call_trainer("set_layout", rank, specs)
        if any(self._layouts):  # simulated generators receive nothing
            await self._choose()
        for replica in replicas:
            self.follow(replica)
        await self.sync(version, timeout_s)

    async def _choose(self) -> None:
        """The transport: pinned, or what is the fastest with a sample of the real weights."""
        one = sum(spec.num_bytes for specs in self._layouts for spec in sample(specs))
        names = ("shared_memory",) if self._is_inline else candidates(same_host=True, delta=self._config.delta)
        selection = await select(self._config.transport, names, self._try, one * len(self._generators.replicas))
        await self._call_trainer("choose", selection.transport)
        self._telemetry.chose_transport(selection)

    async def _try(self, transport: str) -> None:
        """One sync of a sample."""
        self._num_samples += 1
        address = await self._call_trainer("publish_sample", self._num_samples, transport)
        await asyncio.gather(
            *(
                replica.handle.call("try_sample", self._num_samples, address, timeout_s=self._generators.timeout_s)
                for replica in self._generators.replicas
            )
        )

    async def _agree(self, replica: Replica) -> None:
        """All replicas hold the same model, in the same way."""
        layouts = await replica.handle.call_each("weight_specs", timeout_s=self._generators.timeout_s)
        self._layouts = self._layouts or layouts
        assert layouts == self._layouts, f"{replica.handle.name} wants other weights than the others"

    def follow(self, replica: Replica) -> None:
        """Starts the loop that keeps the weights of `replica` up to date."""
        replica.follower = self._supervisor.start(self._follow(replica), f"weights of {replica.handle.name}")

    async def bring(self, handle: ExecutorHandle) -> Replica:
        """A new replica, in service. Raises MeshFailed when it dies before."""
        replica = self._generators.add(handle)
        try:
            await self._agree(replica)
            while not self._generators.serves(replica):
                if not await self._catch_up(replica):
                    raise MeshFailed(handle.name, (0,), "died before it had weights")
        finally:
            if not self._generators.serves(replica):
                self._generators.lose(replica)
        return replica

    async def sync(self, version: int, patience_s: float | None = None) -> SyncReport:
        """Publishes what the trainer has now as `version`, and releases it to the replicas.

        Waits until those in service have adopted it, no longer than for `weight_sync.patience_s`, and until those have
        that can catch up in this time.
        """
        clock = asyncio.get_running_loop()
        start_s = clock.time()
        await self._publish(version)
        publish_s = clock.time() - start_s
        late = {one for one in self._generators.replicas if one.version < version and self._is_awaited(one)}
        round_ = _Round(version, late)
        self._rounds.add(round_)
        try:
            async with asyncio.timeout(self._config.patience_s if patience_s is None else patience_s):
                await round_.done.wait()
        except TimeoutError:
            self._report_late(round_)
        finally:
            self._rounds.discard(round_)
        self._generators.release(version)
        report = round_.report
        report.publish_s, report.sync_s = publish_s, clock.time() - start_s
        report.num_late = len(self._generators.replicas) - sum(map(self._generators.serves, self._generators.replicas))
        report.num_resyncs, self._num_resyncs = self._num_resyncs, 0
        return report

    def _is_awaited(self, replica: Replica) -> bool:
        """One that was left behind or has just come, but needs less than half the patience for a version, finishes the
        one that it fetches and then this one in time. It would else run after the newest version for ever."""
        age_s = asyncio.get_running_loop().time() - replica.fetching_since_s
        return self._generators.serves(replica) or max(replica.adopt_s, age_s) < self._config.patience_s / 2

    async def _publish(self, version: int) -> Published:
        """The call leaves before the first wait in here: the trainer may take its next step right after."""
        self._newest = None
        living = self._generators.replicas
        in_use = {version for one in living for version in (one.version, one.fetching) if version != NO_VERSION}
        published: Published = await self._call_trainer("publish", version, tuple(sorted(in_use)))
        assert published.version == version, f"asked for version {version}, published {published.version}"
        # A newer version may have been asked for meanwhile; its answer comes later.
        if self._newest is None or self._newest.version <= version:
            self._newest = published
        self._published.notify()
        return published

    def _report_late(self, round_: _Round) -> None:
        for replica in sorted(round_.late - self._reported_late, key=lambda one: one.handle.name):
            self._reported_late.add(replica)
            self._telemetry.warn(
                f"{replica.handle.name} has not adopted version {round_.version} after {self._config.patience_s:g} s "
                "(weight_sync.patience_s); the run goes on without it until it has caught up"
            )

    async def _follow(self, replica: Replica) -> None:
        """Consumes published versions, always the newest; produces adoptions; unblocked by `_publish`."""
        try:
            while await self._catch_up(replica):
                pass
        finally:
            for round_ in self._rounds:
                round_.leave(replica)

    async def _catch_up(self, replica: Replica) -> bool:
        """Waits for a version that `replica` has neither got nor tried, and has it adopted; False when it is dead."""

        def is_news() -> bool:
            newest = self._newest
            return newest is not None and newest is not replica.tried and newest.version > replica.version

        await self._published.until(is_news)
        published = self._newest
        assert published is not None
        clock = asyncio.get_running_loop()
        replica.tried, replica.fetching, replica.fetching_since_s = published, published.version, clock.time()
        adoption: Adoption | None = await self._generators.call(replica, "adopt", published.version, published.address)
        if adoption is None:
            return False
        if adoption.outcome == "adopted":
            # It serves this version already; requests come once the probe has shown that it is the right one.
            mismatch = await self._probe(replica, published)
            replica.adopt_s = clock.time() - replica.fetching_since_s
            replica.num_failures, replica.fetching, replica.fetching_since_s = 0, NO_VERSION, math.inf
            self._generators.adopted(replica, published.version)
            self._telemetry.adopted(adoption.stall_s)
            for round_ in self._rounds:
                if round_.version <= published.version:
                    round_.arrived(replica, adoption, mismatch)
        else:
            replica.fetching, replica.fetching_since_s = NO_VERSION, math.inf
            await self._not_adopted(replica, published, adoption)
        return True

    async def _not_adopted(self, replica: Replica, published: Published, adoption: Adoption) -> None:
        """What was superseded waits for the next version; after a failure the same is tried again, or sent again."""
        if adoption.outcome == "superseded":
            return
        replica.num_failures += 1
        is_mismatch = adoption.outcome == "mismatch"
        stops = is_mismatch and self._config.on_mismatch == "stop"
        if stops or replica.num_failures >= MAX_FAILURES:
            raise WeightsWrong(f"{replica.handle.name} could not adopt version {published.version}: {adoption.reason}")
        self._telemetry.warn(f"{replica.handle.name} tries again to adopt weights: {adoption.reason}")
        self._num_resyncs += 1
        if not is_mismatch:
            await asyncio.sleep(RETRY_S)
            replica.tried = None
        elif published is self._newest and self._has_weights(published.version):
            await self._publish(published.version)
        # Otherwise a step is under way, and its version comes next.

    async def _probe(self, replica: Replica, published: Published) -> Mismatch | None:
        """Raises WeightsWrong when the log-probabilities by the new weights are not the trainer's."""
        if published.probe is None:
            return None
        scored = await self._generators.call(replica, "score", published.probe.sequences)
        if scored is None:  # dead; the next call ends its loop
            return None
        found = mismatch_of(published.probe, scored)
        if not found.mean <= self._config.max_mismatch:
            raise WeightsWrong(
                f"{replica.handle.name} serves version {published.version}, yet its log-probabilities are "
                f"{found.mean:.3g} nats from the trainer's on average "
                f"(weight_sync.max_mismatch = {self._config.max_mismatch:g})"
            )
        return found


def mismatch_of(probe: Probe, scored: Sequence[np.ndarray]) -> Mismatch:
    """How far a generator's log-probabilities are from the trainer's.

    KL(generator || trainer) by the estimator r - 1 - log r of Schulman, "Approximating KL divergence" (2020), r being
    the trainer's probability over the generator's: never negative, and exact in expectation over what was sampled.
    """
    log_ratio = np.concatenate(probe.logprobs).astype(np.float64) - np.concatenate(list(scored)).astype(np.float64)
    if not np.isfinite(log_ratio).all():
        return Mismatch(kl=math.inf, largest=math.inf, mean=math.inf)
    size = np.abs(log_ratio)
    with np.errstate(over="ignore"):
        kl = float(np.mean(np.expm1(log_ratio) - log_ratio))
    return Mismatch(kl=kl, largest=float(size.max(initial=0)), mean=float(size.mean()))
