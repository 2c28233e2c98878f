"""`WeightSync`: published versions on their way to the generators, to all of them and to each.

::

    trainer -> [publish] -> newest -> [adopt, one loop per generator: fetch, probe, retry] -> serves -> [sync: released]
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llamarl.config import RunConfig
from llamarl.controller.flight import NO_VERSION, Replica, Replicas
from llamarl.controller.ports import TrainerPort
from llamarl.controller.progress import SyncReport
from llamarl.controller.restart import Restarted
from llamarl.controller.supervision import Signal, StallWatch, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.executors.probes import Mismatch, Probe
from llamarl.executors.replies import Adoption, Published
from llamarl.journal.writer import Journal
from llamarl.training.result import NonFiniteStep
from llamarl.weight_sync.layout import TensorSpec
from llamarl.weight_sync.select import Selection, sample, select

if TYPE_CHECKING:
    from llamarl.controller.train_loop import TrainedExecutors

MAX_FAILURES = 3
"""Fetches in a row that may fail at one replica before the run ends."""
RETRY_S = 1.0
"""Pause after a fetch that failed."""
RUINED_NATS = 100.0
"""Mean size of the log-probabilities of sampled tokens that no working policy has: one in 1e43."""


class WeightsWrong(RuntimeError):
    """A generator received or serves something else than the trainer published."""


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
        own = float(np.abs(np.concatenate(published.probe.logprobs, dtype=np.float64)).mean())
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


MAX_HELD, MAX_HELD_BY_ALL = 6, 12
"""Versions that generators in service, and all of them, serve or fetch, of 16 that a trainer has room for; two while
they keep up."""


class WeightSync:
    """Brings the trainer's versions to the generators."""

    def __init__(
        self,
        config: RunConfig,
        optimized: TrainedExecutors,
        replicas: Replicas,
        supervisor: Supervisor,
        telemetry: Telemetry,
        watch: StallWatch,
        journal: Journal,
    ) -> None:
        self._settings, self._timeout_s = config.weight_sync, config.cluster.call_timeout_s
        self._optimized, self._replicas, self._supervisor = optimized, replicas, supervisor
        self._telemetry, self._watch, self._journal = telemetry, watch, journal
        self._transports = Transports(config, optimized.trainer, optimized.trainer_hosts, telemetry.chose_transport)
        self._newest: Published | None = None
        """None while the trainer publishes, as it may overwrite what was the newest before, and while it is dead."""
        self._lost: Published | None = None
        """Published version that was the newest when the trainer died."""
        self._num_publishing = 0
        self._asked = NO_VERSION
        """The newest version that was to leave the trainer; one that has ended since is not on record yet."""
        self._published = Signal()
        self._num_resyncs = 0
        self._reports = dict[int, SyncReport]()
        """Reports of the versions that are not released, for whoever adopts them."""
        self._told_of_late = set[Replica]()
        optimized.restore_on_restart(self.lose, self.restore)

    async def begin(self) -> None:
        """Brings the generators to the trainer's version."""
        replicas = list(self._replicas.alive)
        await self._transports.begin(replicas)
        for replica in replicas:
            replica.adopting = self._supervisor.start(self.adoption_loop(replica), f"weights of {replica.name}")
        await self.sync(self._optimized.version, patience_s=self._timeout_s)

    async def sync(self, version: int, patience_s: float | None = None) -> SyncReport:
        """Publishes what the trainer has now as `version`; waits until the generators in service have adopted it, and
        those that can catch up, but no longer than for `weight_sync.patience_s`; releases it. Requests that wait for it
        where it is late go elsewhere."""
        clock, replicas = asyncio.get_running_loop(), self._replicas
        start_s, report = clock.time(), SyncReport()
        self._reports[version], self._asked = report, version
        await self._publish(version)
        report.publish_s = clock.time() - start_s
        hurries, patience_s = patience_s is None, patience_s or self._settings.patience_s
        awaited = [one for one in replicas.alive if one.version < version and replicas.can_follow(one, patience_s)]
        late = await replicas.adoption(version, awaited, patience_s, hurries=hurries)
        if new := late - self._told_of_late:
            self._told_of_late |= new
            self._telemetry.warn_of_late([one.name for one in new], version)
        replicas.release(version)
        for replica in [one for one in replicas.alive if one.version < version]:
            replicas.resume(replicas.withdraw_waiting(replica))
        report.sync_s = clock.time() - start_s
        report.num_late = sum(not replicas.serves(one) for one in replicas.alive)
        await replicas.changed.until(lambda: not report.num_probing)
        del self._reports[version]
        if before := self._journal.published(version, report.fingerprint, report.tensors):
            self._telemetry.warn_of_others(version, before, report.fingerprint)
        report.num_resyncs, self._num_resyncs = self._num_resyncs, 0
        self._watch.progress()
        return report

    async def until_few(self) -> None:
        """Waits until generators hold on to few versions, each of which takes memory of the trainer's. Those in service
        may hold fewer: who does not let go of one is left behind."""
        replicas = self._replicas
        await replicas.changed.until(
            lambda: (
                len(_held_by(filter(replicas.serves, replicas.alive))) <= MAX_HELD
                and len(_held_by(replicas.alive)) <= MAX_HELD_BY_ALL
            )
        )

    async def _publish(self, version: int, trainer: TrainerPort | None = None) -> None:
        """The call leaves before the first wait in here: the trainer may take its next step right after."""
        self._newest, self._num_publishing = None, self._num_publishing + 1
        try:
            in_use = tuple(sorted(_held_by(self._replicas.alive)))
            published = await (trainer or self._optimized.trainer).publish(version, in_use)
        finally:
            self._num_publishing -= 1
            self._replicas.changed.notify()
        assert published.version == version, f"asked for version {version}, published {published.version}"
        # A newer version may have been asked for meanwhile; its answer comes later.
        if self._newest is None or self._newest.version <= version:
            self._newest = published
        self._published.notify()

    async def sleep(self) -> None:
        """Has the generators give their memory to the trainer, until they adopt what it publishes next. None fetches
        from now on: what it would read is about to change."""
        await self._replicas.changed.until(lambda: not self._num_publishing)
        self._newest = None
        await self._replicas.changed.until(lambda: all(one.fetching == NO_VERSION for one in self._replicas.alive))
        waits = [self._replicas.unless_dead(one, one.port.sleep()) for one in self._replicas.alive]
        await asyncio.gather(*waits)

    def lose(self) -> None:
        """The trainer is dead, and what it published with it."""
        self._lost, self._newest = self._newest, None

    async def restore(self, trainer: TrainerPort) -> None:
        """A new trainer has what the old one had; what is to be published next is asked for by others."""
        await self._transports.restore(trainer, self._optimized.trainer_hosts)
        if self._lost is not None and self._lost.version == self._optimized.version:
            await self._publish(self._lost.version, trainer)

    async def adoption_loop(self, replica: Replica) -> None:
        """Consumes published versions, always the newest; waits until `replica` has fetched it and its probe shows that
        it is the right one; produces adoptions; unblocked by `_publish`."""
        clock = asyncio.get_running_loop()
        try:
            if (is_new := await self._replicas.unless_dead(replica, self._transports.choose([replica]))) is None:
                return
            may_leave = self._asked == self._optimized.version and not self._optimized.is_stepping
            if is_new and may_leave:  # else the next version comes by it
                await self._publish(self._asked)
            while True:
                await self._published.until(lambda: self._is_news(replica))
                published = self._newest
                assert published is not None
                replica.tried, replica.fetching, replica.fetching_since_s = published, published.version, clock.time()
                call = replica.port.adopt(published.version, published.addresses[replica.transport])
                adoption = await self._replicas.unless_dead(replica, call)
                if adoption is None:
                    return
                fetched_s = clock.time() - replica.fetching_since_s
                replica.fetching, replica.fetching_since_s = NO_VERSION, math.inf
                self._replicas.changed.notify()
                if adoption.outcome == "adopted":
                    replica.adopt_s, replica.num_failures = fetched_s, 0
                    self._telemetry.adopted(adoption.stall_s)
                    self._replicas.adopted(replica, published.version)
                    await self._probe(replica, published, adoption)
                elif adoption.outcome != "superseded":  # which waits for the next version
                    await self._retry(replica, published, adoption)
        finally:
            self._replicas.changed.notify()

    async def _probe(self, replica: Replica, published: Published, adoption: Adoption) -> None:
        """Looks whether what serves is right; for the report, which waits for it as the release does not."""
        report = self._reports.get(published.version, SyncReport())
        report.num_probing += 1
        try:
            found = probed(replica, published, self._settings.max_mismatch, self._optimized.trainer.outsized)
            report.add(adoption, await self._replicas.unless_dead(replica, found))
        finally:
            report.num_probing -= 1
            self._replicas.changed.notify()

    def _is_news(self, replica: Replica) -> bool:
        newest = self._newest
        is_other = newest is not None and newest is not replica.tried and newest.version > replica.version
        return is_other and replica.transport in newest.addresses

    async def _retry(self, replica: Replica, published: Published, adoption: Adoption) -> None:
        """Fetches the same version again after a failure, and has it sent again after a mismatch."""
        replica.num_failures += 1
        is_mismatch = adoption.outcome == "mismatch"
        if (is_mismatch and self._settings.on_mismatch == "stop") or replica.num_failures >= MAX_FAILURES:
            raise WeightsWrong(f"{replica.name} could not adopt version {published.version}: {adoption.reason}")
        self._telemetry.warn(f"{replica.name} tries again to adopt weights: {adoption.reason}")
        self._num_resyncs += 1
        is_newest = published is self._newest and published.version == self._optimized.version
        if not is_mismatch:
            await asyncio.sleep(RETRY_S)
            replica.tried = None
        elif is_newest and not self._optimized.is_stepping:
            self._supervisor.start(self._publish(published.version), f"publish {published.version} again")
        # Otherwise a step is under way, and its version comes next.


def _held_by(replicas: Iterable[Replica]) -> set[int]:
    """Versions that these serve or fetch: they stay where they lie."""
    return {version for one in replicas for version in (one.version, one.fetching)} - {NO_VERSION}
