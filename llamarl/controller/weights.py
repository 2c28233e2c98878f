"""Loops 5 and 6 of a run: published versions of the weights on their way to the generators.

::

    trainer -> [publish] -> newest -> [adopt, one loop per generator: fetch, probe, retry] -> in service -> [released]

`WeightSync.sync` handles one version, and `WeightSync.adoption_loop` one generator. No version waits for a slow
generator longer than `weight_sync.patience_s`: it is then released without that generator. Requests go only to
generators that serve the released version or a newer one. Releases decide which generators get work. They do not bound
the staleness: each request names the oldest version that may serve it (`admission.py`, `docs/staleness.md`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from llamarl.cluster.api import ExecutorHandle, port
from llamarl.config import RunConfig
from llamarl.controller.causes import scored_by_generator
from llamarl.controller.flight import Replica, Replicas
from llamarl.controller.ports import TrainerPort
from llamarl.controller.progress import NO_VERSION, SyncReport
from llamarl.controller.restart import Restarted
from llamarl.controller.services import Services
from llamarl.controller.supervision import Signal
from llamarl.executors.replies import Adoption, Mismatch, Probe, Published
from llamarl.training.probe import CauseProbe
from llamarl.training.result import NonFiniteStep
from llamarl.weight_sync.layout import TensorSpec
from llamarl.weight_sync.select import Selection, sample, select

MAX_FAILURES = 3
"""Consecutive fetches of one generator that may fail before the run ends."""
RETRY_S = 1.0
"""Pause after a failed fetch."""
RUINED_NATS = 100.0
"""Mean absolute log-probability of sampled tokens that no working policy has: a probability of 1e-43."""
MAX_HELD, MAX_HELD_BY_ALL = 6, 12
"""Versions that the generators in service, and all generators, may serve or fetch. A trainer has memory for 16
versions, and generators that keep up hold two."""


class WeightsWrong(RuntimeError):
    """A generator received or serves other weights than the trainer published."""


class WeightSync:
    """Publishes the trainer's versions, and has the generators adopt them.

    Example::

        weights = WeightSync(config, executors.trainer, replicas, services)
        await weights.begin()                  # all generators serve the trainer's version
        report = await weights.sync(version)   # after each optimizer step
    """

    def __init__(self, config: RunConfig, trainer: ExecutorHandle, replicas: Replicas, services: Services) -> None:
        self._settings, self._timeout_s = config.weight_sync, config.cluster.timeout_s
        self._handle, self._replicas = trainer, replicas
        self._trainer = port(TrainerPort, trainer, self._timeout_s)
        self._supervisor, self._telemetry, self._watch = services.supervisor, services.telemetry, services.watch
        self._journal, self._progress = services.journal, services.progress
        self._transports = Transports(config, self._trainer, trainer.hosts, self._telemetry.chose_transport)
        self._newest: Published | None = None
        """None while the trainer publishes, which may overwrite the previous version, and while it is dead."""
        self._lost: Published | None = None
        """Newest published version at the death of the trainer."""
        self._num_publishing = 0
        self._published = Signal()
        self._num_resyncs = 0
        self._reports = dict[int, SyncReport]()
        """Reports of versions that are not released yet."""
        self._warned_of_late = set[Replica]()

    async def begin(self) -> None:
        """Chooses transports, and brings all generators to the trainer's version."""
        replicas = list(self._replicas.alive)
        await self._transports.begin(replicas)
        for replica in replicas:
            replica.adopting = self._supervisor.start(self.adoption_loop(replica), f"weights of {replica.name}")
        await self.sync(self._progress.trained, patience_s=self._timeout_s)

    async def sync(self, version: int, patience_s: float | None = None) -> SyncReport:
        """Publishes the trainer's weights as `version`, waits for the generators, and releases the version.

        Waits for generators that are in service or can catch up, up to `weight_sync.patience_s`. Requests that
        wait for the version at a late generator go to others. Returns a report once all probes are answered.
        """
        clock, replicas = asyncio.get_running_loop(), self._replicas
        start_s, report = clock.time(), SyncReport()
        self._reports[version] = report
        await self._publish(version)
        report.publish_s = clock.time() - start_s
        patience_s = patience_s or self._settings.patience_s
        behind = [replica for replica in replicas.alive if replica.version < version]
        awaited = [replica for replica in behind if replicas.can_catch_up(replica, patience_s)]
        late = await replicas.wait_for_adoption(version, awaited, patience_s)
        if new := late - self._warned_of_late:
            self._warned_of_late |= new
            self._telemetry.warn_of_late([replica.name for replica in new], version)
        replicas.release(version)
        for replica in [replica for replica in replicas.alive if replica.version < version]:
            replicas.resume(replicas.withdraw_waiting(replica))
        report.sync_s = clock.time() - start_s
        report.num_late = sum(not replicas.in_service(replica) for replica in replicas.alive)
        await replicas.changed.until(lambda: not report.num_probing)
        del self._reports[version]
        if before := self._journal.published(version, report.fingerprint, report.tensors):
            self._telemetry.warn_of_other_weights(version, before, report.fingerprint)
        report.num_resyncs, self._num_resyncs = self._num_resyncs, 0
        self._watch.progress()
        return report

    async def until_few_held(self) -> None:
        """Waits until the generators hold few versions, each of which takes memory of the trainer. A generator that
        keeps an old version is out of service, and counts less."""
        replicas = self._replicas
        await replicas.changed.until(
            lambda: (
                len(_held_by(filter(replicas.in_service, replicas.alive))) <= MAX_HELD
                and len(_held_by(replicas.alive)) <= MAX_HELD_BY_ALL
            )
        )

    async def score(self, probe: CauseProbe, version: int) -> tuple[np.ndarray, float] | None:
        """Has a generator that serves `version` score `probe` (`causes.py`)."""
        return await scored_by_generator(probe, self._replicas, version)

    async def _publish(self, version: int, trainer: TrainerPort | None = None) -> None:
        """Has the trainer publish. The call leaves before the first wait: the trainer's next step may follow it."""
        self._newest, self._num_publishing = None, self._num_publishing + 1
        try:
            in_use = tuple(sorted(_held_by(self._replicas.alive)))
            published = await (trainer or self._trainer).publish(version, in_use)
        finally:
            self._num_publishing -= 1
            self._replicas.changed.notify()
        assert published.version == version, f"asked for version {version}, published {published.version}"
        # A newer version may be on its way to be published; its answer comes later.
        if self._newest is None or self._newest.version <= version:
            self._newest = published
        self._published.notify()

    async def sleep(self) -> None:
        """Has the generators free their memory for the trainer until they adopt the next version.

        Waits until none fetches: the trainer is about to change the weights that it would read.
        """
        replicas = self._replicas
        await replicas.changed.until(lambda: not self._num_publishing)
        self._newest = None
        await replicas.changed.until(lambda: all(replica.fetching == NO_VERSION for replica in replicas.alive))
        calls = [replicas.unless_dead(replica, replica.port.sleep()) for replica in replicas.alive]
        await asyncio.gather(*calls)

    def trainer_died(self) -> None:
        """Forgets the published weights, which were lost with the trainer's processes."""
        self._lost, self._newest = self._newest, None

    async def trainer_restarted(self, trainer: TrainerPort) -> None:
        """Prepares a new trainer, and has it publish the lost version if that is still the newest one."""
        await self._transports.restore(trainer, self._handle.hosts)
        if self._lost is not None and self._lost.version == self._progress.trained:
            await self._publish(self._lost.version, trainer)

    async def adoption_loop(self, replica: Replica) -> None:
        """Consumes published versions, always the newest; waits until `replica` has fetched it and its probe shows that
        the weights are right; produces adoptions; unblocked by `_publish`."""
        clock, progress = asyncio.get_running_loop(), self._progress
        try:
            is_new = await self._replicas.unless_dead(replica, self._transports.choose([replica]))
            if is_new is None:
                return
            has_newest = progress.made == progress.trained and not progress.is_stepping
            if is_new and has_newest:  # otherwise the trainer publishes the next version through this transport
                await self._publish(progress.made)
            while True:
                await self._published.until(lambda: self._has_newer(replica))
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
                elif adoption.outcome != "superseded":  # a superseded fetch waits for the next version
                    await self._retry(replica, published, adoption)
        finally:
            self._replicas.changed.notify()

    async def _probe(self, replica: Replica, published: Published, adoption: Adoption) -> None:
        """Checks the weights that a replica serves. The report waits for this, the release does not."""
        report = self._reports.get(published.version, SyncReport())
        report.num_probing += 1
        try:
            mismatch = probed(replica, published, self._settings.max_mismatch, self._trainer.outsized)
            report.add(adoption, await self._replicas.unless_dead(replica, mismatch))
        finally:
            report.num_probing -= 1
            self._replicas.changed.notify()

    def _has_newer(self, replica: Replica) -> bool:
        newest = self._newest
        is_newer = newest is not None and newest is not replica.tried and newest.version > replica.version
        return is_newer and replica.transport in newest.addresses

    async def _retry(self, replica: Replica, published: Published, adoption: Adoption) -> None:
        """Prepares another fetch after a failure, or another publish after a mismatch."""
        replica.num_failures += 1
        is_mismatch = adoption.outcome == "mismatch"
        if (is_mismatch and self._settings.on_mismatch == "stop") or replica.num_failures >= MAX_FAILURES:
            raise WeightsWrong(f"{replica.name} could not adopt version {published.version}: {adoption.reason}")
        self._telemetry.warn(f"{replica.name} tries again to adopt weights: {adoption.reason}")
        self._num_resyncs += 1
        is_newest = published is self._newest and published.version == self._progress.trained
        if not is_mismatch:
            await asyncio.sleep(RETRY_S)
            replica.tried = None
        elif is_newest and not self._progress.is_stepping:
            self._supervisor.start(self._publish(published.version), f"publish {published.version} again")
        # Otherwise a step is under way, and its version comes next.


def _held_by(replicas: Iterable[Replica]) -> set[int]:
    """Returns the versions that these serve or fetch, which the trainer must not overwrite."""
    return {version for replica in replicas for version in (replica.version, replica.fetching)} - {NO_VERSION}


class Transports:
    """Chooses a transport for each replica: one for those on the trainer's host, and one for the others.

    Example::

        transports = Transports(config, trainer, trainer_hosts, telemetry.chose_transport)
        await transports.begin(replicas)
        replicas[0].transport    # "shared_memory"
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: TrainerPort,
        trainer_hosts: Sequence[str],
        on_choice: Callable[[Selection], None],
    ) -> None:
        """
        Args:
            trainer_hosts: hosts of its ranks. A trainer on several hosts shares memory with no generator.
            on_choice: called with each choice and its reason.
        """
        self._pinned, self._is_inline = config.weight_sync.transport, config.cluster.kind == "inline"
        self._trainer, self._on_choice = trainer, on_choice
        self._host = _single(trainer_hosts)
        self._chosen = dict[bool, str]()
        """Transports to replicas on the trainer's host (True) and to others (False)."""
        self._choosing = asyncio.Lock()
        self._num_tries = 0
        self._layouts: Sequence[tuple[TensorSpec, ...]] = ()
        """Tensors that each rank of a replica receives, the same for all replicas."""

    async def begin(self, replicas: Sequence[Replica]) -> None:
        """Sends the layout of the replicas' weights to the trainer, and chooses their transports."""
        self._layouts, *others = await asyncio.gather(*(replica.port.weight_specs() for replica in replicas))
        assert all(layouts == self._layouts for layouts in others), "replicas disagree on the weights they receive"
        for rank, specs in enumerate(self._layouts):
            await self._trainer.set_layout(rank, specs)
        await self.choose(replicas)

    async def restore(self, trainer: TrainerPort, hosts: Sequence[str]) -> None:
        """Has a new trainer publish like the old one. If it is on another host, the transport within a host is chosen
        again."""
        if (host := _single(hosts)) != self._host:
            self._host = host
            self._chosen.pop(True, None)
        for rank, specs in enumerate(self._layouts):
            await trainer.set_layout(rank, specs)
        for same_host, transport in self._chosen.items():
            await trainer.choose(transport, same_host)

    async def choose(self, replicas: Sequence[Replica]) -> bool:
        """Sets the transport of each replica: the pinned one, or the fastest one for a sample of the real weights.

        Returns:
            Whether the trainer uses a new transport, through which earlier versions are not available.
        """
        if not any(self._layouts):  # simulated generators receive nothing
            return False
        async with self._choosing:
            before = set(self._chosen.values())
            for same_host in (True, False):
                alike = [replica for replica in replicas if (replica.handle.hosts == (self._host,)) == same_host]
                while alike and same_host not in self._chosen:
                    with suppress(Restarted):  # the trainer died during a trial
                        self._chosen[same_host] = await self._fastest(alike, same_host)
                for replica in alike:
                    replica.transport = self._chosen[same_host]
            return not before.issuperset(self._chosen.values())

    async def _fastest(self, replicas: Sequence[Replica], same_host: bool) -> str:
        async def try_transport(transport: str) -> None:
            self._num_tries += 1
            version = self._num_tries
            address = await self._trainer.publish_sample(version, transport)
            await asyncio.gather(*(replica.port.try_sample(version, address) for replica in replicas))

        sample_bytes = sum(spec.num_bytes for specs in self._layouts for spec in sample(specs))
        names = await self._trainer.transports(same_host, self._is_inline)
        selection = await select(self._pinned, names, try_transport, len(replicas) * sample_bytes)
        await self._trainer.choose(selection.transport, same_host)
        self._on_choice(replace(selection, same_host=same_host))
        return selection.transport


def _single(hosts: Sequence[str]) -> str | None:
    return hosts[0] if len(hosts) == 1 else None


async def probed(
    replica: Replica, published: Published, max_mismatch: float, outsized: Callable[[], Awaitable[str]]
) -> Mismatch | None:
    """Compares log-probabilities of a replica with those of the trainer. Returns their distance, or None if the trainer
    sent no probe.

    Args:
        outsized: returns text that names a damaged weight of the trainer, or an empty string.

    Raises:
        WeightsWrong: the distance exceeds `weight_sync.max_mismatch`.
        NonFiniteStep: the trainer's log-probabilities show that its weights are ruined.
    """
    if published.probe is None:
        return None
    mismatch = mismatch_of(published.probe, await replica.port.score(published.probe.sequences))
    if not mismatch.mean <= max_mismatch:
        compared_N = np.concatenate(published.probe.logprobs, dtype=np.float64)[published.probe.is_compared_N]
        trainer_nats = float(np.abs(compared_N).mean())
        if not trainer_nats < RUINED_NATS:
            fix = "lower trainer.learning_rate or trainer.max_grad_norm, and resume from an earlier checkpoint"
            raise NonFiniteStep(
                f"training has diverged: after step {published.version} the trainer's own log-probabilities are "
                f"{trainer_nats:.3g} nats on average; {await outsized() or fix}"
            )
        raise WeightsWrong(
            f"{replica.name} serves version {published.version}, yet its log-probabilities are {mismatch.mean:.3g} "
            f"nats from the trainer's on average (weight_sync.max_mismatch = {max_mismatch:g})"
        )
    return mismatch


def mismatch_of(probe: Probe, scored: Sequence[np.ndarray]) -> Mismatch:
    """Returns the distance of a generator's log-probabilities from the trainer's.

    KL(generator || trainer) by the estimator r - 1 - log r of Schulman, "Approximating KL divergence" (2020), where r
    is the trainer's probability over the generator's. The estimate is never negative, and exact in expectation over
    the sampled tokens.
    """
    log_ratio = np.concatenate(probe.logprobs).astype(np.float64) - np.concatenate(list(scored)).astype(np.float64)
    log_ratio = log_ratio[probe.is_compared_N]
    if not np.isfinite(log_ratio).all():
        return Mismatch(kl=math.inf, largest=math.inf, mean=math.inf)
    size = np.abs(log_ratio)
    with np.errstate(over="ignore"):
        kl = float(np.mean(np.expm1(log_ratio) - log_ratio))
    return Mismatch(kl=kl, largest=float(size.max(initial=0)), mean=float(size.mean()))
