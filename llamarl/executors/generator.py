"""The generator: an engine that decodes between calls, and weights that it adopts between two engine steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import xxhash
from torch import Tensor

from llamarl.cluster.api import Executor
from llamarl.config.ref import part
from llamarl.config.schema import GeneratorConfig, RunConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.distributed.links import Rendezvous
from llamarl.distributed.mesh import join_mesh, set_up_device
from llamarl.executors.replies import (
    GROUPS_INTERVAL_S,
    LATEST_S,
    NO_TRAINER,
    REPLY_INTERVAL_S,
    Adoption,
    Collected,
    GeneratorStats,
    Partnership,
)
from llamarl.executors.rescorer import Rescorer
from llamarl.generation.backend import GenerationBackend
from llamarl.generation.engine import Engine, EngineSettings, kv_budget
from llamarl.generation.model import AdapterMerger, load_generator_model
from llamarl.generation.tensor_parallel import FollowerRank, ModelRanks, TensorParallelEngine
from llamarl.kernels.build import keep_choices_in
from llamarl.models.hf import open_model
from llamarl.observability.notes import note
from llamarl.types import CandidateSets, GenerationRequest, Rollout
from llamarl.weight_sync.base import FingerprintMismatch, Room, Subscriber, Superseded, TransferFailed
from llamarl.weight_sync.layout import Address, TensorSpec
from llamarl.weight_sync.select import Reader, open_subscriber, sample

WAIT_S = 0.01
"""Longest wait of an idle engine for weights before it looks for calls, in seconds."""


_Fetched = tuple[Adoption, Mapping[str, Tensor]]
"""Outcome of a fetch on this rank, and its tensors, which are empty if the fetch failed."""


class Adopter:
    """Fetches published weights for one rank in the background while the engine decodes. At most one version at a
    time."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        use: Callable[[Mapping[str, Tensor]], None],
        rank: int = 0,
        *,
        hold: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda tensors: tensors,
        delta: bool = False,
        room: Callable[[Sequence[TensorSpec]], Room] | None = None,
        subscribe: Callable[..., Subscriber] = open_subscriber,
    ) -> None:
        """
        Args:
            use: makes the model use the tensors that `hold` returned.
            hold: copies fetched tensors to the model's device, in the background.
            delta: weights may come as changes of the version in use.
            room: allocates memory on the model's device for given specs. None means this machine's memory.
            subscribe: opens the receiving end, as `open_subscriber` does.
        """
        options = {"room": room} if room else {}
        self._reader = Reader(specs, rank, subscribe, delta=delta, **options)
        self._sampler = Reader(sample(specs), rank, subscribe, **options)
        self._use, self._hold = use, hold
        self._thread = ThreadPoolExecutor(1, "weights")
        self._fetch: Future[_Fetched] | None = None
        self._fetched: _Fetched | None = None
        """Fetched and reported, but not in use."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Tensors that this rank receives."""
        return self._reader.specs

    def try_sample(self, version: int, address: Address) -> None:
        """Fetches a sample of published weights by a transport that is being measured, and drops it."""
        self._sampler.at(address).fetch(version, address)

    def begin(self, version: int, address: Address) -> None:
        """Starts to fetch a version. Drops a fetched version that was never used."""
        assert self._fetch is None, "one version at a time"
        self._sampler.close()
        self._fetched = None
        self._fetch = self._thread.submit(self._run, version, address)

    def poll(self, wait_s: float = 0.0) -> Adoption | None:
        """Returns the outcome of the fetch once, after it is done. Waits at most `wait_s`."""
        if self._fetch is None:
            return None
        wait([self._fetch], wait_s)
        if not self._fetch.done():
            return None
        self._fetched, self._fetch = self._fetch.result(), None
        return self._fetched[0]

    def use(self, version: int) -> None:
        """Makes the model use the fetched version."""
        assert self._fetched is not None, "nothing has been fetched"
        adoption, tensors = self._fetched
        assert adoption.version == version, "another version has been fetched"
        self._use(tensors)
        self._fetched = None

    def close(self) -> None:
        """Ends the fetch. The weights in use stay."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._sampler.close()
        self._reader.close()

    def _run(self, version: int, address: Address) -> _Fetched:
        start_s = time.monotonic()
        tensors: Mapping[str, Tensor] = {}
        try:
            subscriber = self._reader.at(address)
            tensors = self._hold(subscriber.fetch(version, address))
            adoption = Adoption(
                version=version, fingerprint=subscriber.fingerprint, tensors=subscriber.tensors,
                num_bytes=subscriber.received_bytes,
            )  # fmt: skip
        except Superseded as error:
            adoption = Adoption(version=version, outcome="superseded", reason=str(error))
        except FingerprintMismatch as error:
            adoption = Adoption(version=version, outcome="mismatch", reason=str(error))
        except TransferFailed as error:
            adoption = Adoption(version=version, outcome="failed", reason=str(error))
        return replace(adoption, fetch_s=time.monotonic() - start_s), tensors


class Adoptions:
    """State on rank 0: the adoption in progress and its reply. Swaps weights between two engine steps."""

    def __init__(
        self,
        adopter: Adopter,
        engine: GenerationBackend,
        awake: Callable[[], None] = lambda: None,
        leaving: Callable[[int], None] = lambda version: None,
    ) -> None:
        """`awake` is called after each adoption, `leaving` with the old version just before it."""
        self._adopter, self._engine, self._awake, self._leaving = adopter, engine, awake, leaving
        self._asked: tuple[int, Future[Adoption]] | None = None
        self.version = 0
        """The version in use."""

    def begin(self, version: int, address: Address) -> Future[Adoption]:
        """Starts an adoption. The reply comes when the version is in use, or says why it is not."""
        self._adopter.begin(version, address)
        self._asked = version, (reply := Future[Adoption]())
        self.proceed()
        return reply

    @property
    def is_waiting(self) -> bool:
        """Returns whether an adoption is in progress."""
        return self._asked is not None

    def proceed(self) -> None:
        """Swaps the weights once all ranks have fetched theirs. An idle engine waits briefly for them, as calls may
        wait."""
        if self._asked is None:
            return
        version, reply = self._asked
        wait_s = 0.0 if self._engine.has_work else WAIT_S
        found = self._adopter.poll(wait_s)
        everywhere = [found] if found else None
        if isinstance(self._engine, TensorParallelEngine):
            if found:
                self._engine.report(version, found)
            everywhere = self._engine.reports(version, wait_s)
        if everywhere is not None:
            self._asked = None
            self._answer(reply, together(everywhere))

    def _answer(self, reply: Future[Adoption], adoption: Adoption) -> None:
        if adoption.outcome == "adopted":
            start_s = time.monotonic()
            self._leaving(self.version)
            self._adopter.use(adoption.version)
            self._engine.set_version(adoption.version)
            self.version = adoption.version
            self._awake()
            adoption = replace(adoption, stall_s=time.monotonic() - start_s)
        if reply.set_running_or_notify_cancel():
            reply.set_result(adoption)


def together(adoptions: list[Adoption]) -> Adoption:
    """Combines the adoptions of a generator's ranks: returns the first failed one, or all of them as one."""
    for adoption in adoptions:
        if adoption.outcome != "adopted":
            return adoption
    if len(adoptions) == 1:
        return adoptions[0]
    digest = xxhash.xxh3_64("".join(adoption.fingerprint for adoption in adoptions).encode()).hexdigest()
    return replace(
        adoptions[0],
        fetch_s=max(adoption.fetch_s for adoption in adoptions),
        num_bytes=sum(adoption.num_bytes for adoption in adoptions),
        fingerprint=digest,
        tensors="".join(adoption.tensors for adoption in adoptions),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedEngine:
    """One rank's engine with everything that belongs to it."""

    engine: GenerationBackend
    adopter: Adopter
    describe: Callable[[], str]
    """Returns text for the log on which kernels compute."""
    follower: FollowerRank | None = None
    """Follower of rank 0, on the other ranks."""
    clock: Callable[[], float] | None = None
    """Clock for the duration of forward passes. None means that forward passes cannot be observed."""
    close: Callable[[], None] | None = None
    """Ends everything that outlives the last reference."""


class Backend(Protocol):
    """An engine of a part: the `joint` of the part with the name of `generator.backend`."""

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError if the engine is not installed or does not support the config."""

    def settings(self, config: RunConfig, logs: Path, number: int) -> Any:
        """Returns the settings that go to the process of one generator."""

    def open_engine(self, model_path: str, settings: Any, delta: bool) -> OpenedEngine:
        """Opens the engine in that process. Raises ConfigError."""


def open_native(
    model_path: str,
    config: GeneratorConfig,
    rendezvous: Rendezvous | None = None,
    partnership: Partnership = NO_TRAINER,
) -> OpenedEngine:
    """Opens the native engine, on one rank or several.

    Raises:
        ConfigError: there is no such device or model, or this machine cannot run it like this.
        RanksLost: some ranks did not arrive.
    """
    device = set_up_device(config.device, config.threads, "generator.device")
    mesh = join_mesh({"tp": config.tensor_parallel}, rendezvous, device)
    rank, size = mesh.tp.rank, mesh.tp.size
    ranks = ModelRanks(mesh.tp) if size > 1 else None
    model = load_generator_model(
        model_path, config.dtype, device, ranks, config.kv_dtype, asleep=partnership.sleeps and partnership.lora is None
    )
    receiver = model
    if partnership.lora:
        base, weights = open_model(model_path)
        receiver = AdapterMerger(model, base, partnership.lora, weights.read)
    kv_bytes = config.kv_cache_bytes
    if size > 1 and kv_bytes is None:  # all ranks have the same number of blocks
        kv_bytes = min(mesh.exchange(kv_budget(model, config.max_running, size, prefill_tokens=config.prefill_tokens)))
    settings = EngineSettings(
        max_running=config.max_running,
        prefill_tokens=config.prefill_tokens,
        kv_bytes=kv_bytes,
        kv_on_update=config.kv_on_update,
        graphs=False if config.cuda_graphs == "off" else None,
        records_routes=config.router_replay,
        asleep=partnership.sleeps,
        beside_bytes=partnership.beside_bytes,
    )
    native = Engine(model, settings, decode=Tokenizer(model_path).decode)
    room = model.room if device.type == "cuda" else None
    adopter = Adopter(receiver.specs(), model.use, rank, delta=partnership.delta, hold=receiver.hold, room=room)
    opened = OpenedEngine(
        engine=native, adopter=adopter, describe=native.describe,
        clock=time.thread_time if device.type == "cpu" else time.monotonic,
    )  # fmt: skip
    if size == 1:
        return opened
    if rank:
        follower = FollowerRank(native, mesh, adopter.use)
        return replace(opened, follower=follower, close=follower.close)
    leader = TensorParallelEngine(native, mesh)
    return replace(opened, engine=leader, close=leader.close)


REPLY_TOKENS, REPLY_ROUTES_BYTES = 1 << 20, 64 << 20
"""Size at which a reply takes no more rollouts: tokens, and bytes of their experts. A fleet that parks everything at
once needs several replies."""


class GeneratorExecutor(Executor):
    """Decodes whenever there are requests. `submit`, `adopt` and `abort` run between two engine steps.

    All ranks of a generator get all calls. Rank 0 queues requests and answers. On the other ranks `_follower` is set:
    they fetch their part of the weights, and take every engine step and decision from rank 0.
    """

    SPANS: ClassVar[dict[str, str]] = {"work": "generate", "adopt": "weight_sync", "score": "weight_sync"}

    def __init__(
        self,
        model_path: str,
        config: GeneratorConfig,
        rendezvous: Rendezvous | None = None,
        partnership: Partnership = NO_TRAINER,
        backend: Any = None,
        choices: str = "",
    ) -> None:
        """
        Args:
            rendezvous: meeting point of several ranks. None means one rank.
            backend: settings of the part that replaces the native engine. None means the native engine.
            choices: folder of the run with the choice of kernels. Empty means that choices are not kept.
        """
        keep_choices_in(Path(choices) if choices else None)
        if backend:
            opened = part(config.backend, "open_engine")(model_path, backend, partnership.delta)
        else:
            opened = open_native(model_path, config, rendezvous, partnership)
        self._engine, self._adopter, self._follower = opened.engine, opened.adopter, opened.follower
        self._close, self._work_clock = opened.close, opened.clock
        self._describe, self._told = opened.describe, ""
        self._tell()
        self._rescorer = Rescorer(self._engine)
        self._adoptions = Adoptions(self._adopter, self._engine, self._tell, self._rescorer.update)
        self._early = list[GenerationRequest]()
        """Requests that wait for a later version."""
        self._owed = Counter[int]()
        """Unfinished rollouts by group, in the engine or queued."""
        self._finished = list[Rollout]()
        self._num_whole = self._num_wanted = 0
        """Requests that have finished since the last reply, and the number that `collect` waits for."""
        self._needed = set[int]()
        """Unfinished groups that the next step requires."""
        self._reply: Future[Collected] | None = None
        self._replied_s = 0.0
        self._work = GeneratorStats()
        self._left_s: float | None = None
        """End of the last forward pass on the work clock. None means that the engine was idle since."""

    def _tell(self) -> None:
        """Logs which kernels compute, whenever that changes."""
        if self._told != (said := self._describe()):
            self._told = said
            note(said)

    def sleep(self) -> None:
        """Releases the memory of weights, keys and values until the next adoption. Nothing decodes meanwhile."""
        if not self._follower:
            self._engine.sleep()

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Returns the tensors that this rank receives."""
        return self._adopter.specs

    def try_sample(self, version: int, address: Address) -> None:
        """Fetches a sample of published weights. Raises the errors of `fetch`."""
        self._adopter.try_sample(version, address)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests. `collect` returns their rollouts. Requests for a later version start when it is in use."""
        if self._follower:
            return
        for request in requests:
            self._owed[request.group_id] += len(request.indices)
        self._rescorer.submitted(requests)
        self._early += [request for request in requests if request.from_version > self._adoptions.version]
        self._engine.submit([request for request in requests if request.from_version <= self._adoptions.version])

    def abort(self, group_ids: Iterable[int]) -> None:
        """Ends these groups. `collect` returns their partial rollouts."""
        if self._follower:
            return
        group_ids = set(group_ids)
        self._begin(lambda request: request.group_id in group_ids)
        self._take(self._engine.abort(group_ids))
        self._hand_over()

    def so_far(self, group_ids: Sequence[int]) -> list[Rollout]:
        """Returns the current state of rollouts of these groups that are decoding."""
        if self._follower:
            return []
        return self._engine.so_far(group_ids)

    def _begin(self, may_begin: Callable[[GenerationRequest], bool]) -> None:
        """Moves early requests that need not wait any longer to the engine."""
        if requests := list(filter(may_begin, self._early)):
            self._early = [request for request in self._early if not may_begin(request)]
            self._engine.submit(requests)

    def _take(self, rollouts: Sequence[Rollout]) -> None:
        """Accepts rollouts that have left the engine."""
        self._finished += self._rescorer.left(rollouts, self._adoptions.version)
        for rollout in rollouts:
            self._owed[rollout.group_id] -= 1
            if not self._owed[rollout.group_id]:
                del self._owed[rollout.group_id]
                self._needed.discard(rollout.group_id)
                self._num_whole += 1

    def release(self, rollouts: Sequence[tuple[int, int]]) -> None:
        """Drops rollouts, by group and index, that waited for their environment and do not return."""
        if self._follower:
            return
        self._engine.release(rollouts)

    def collect(self, num_wanted: int, needed: Sequence[int] = ()) -> Future[Collected] | None:
        """Replies with finished rollouts as soon as `num_wanted` requests are done (0 means one rollout), and all
        `needed` groups that are here. Replies after a timeout with the rollouts that are done by then."""
        if self._follower:
            return None
        assert self._reply is None, "one collect at a time"
        self._num_wanted, self._needed = num_wanted, {one for one in needed if one in self._owed}
        self._reply = reply = Future[Collected]()
        self._hand_over()
        return reply

    def adopt(self, version: int, address: Address) -> Future[Adoption] | None:
        """Adopts published weights. The reply comes when they are in use.

        They are fetched and verified in the background while decoding continues. They then replace the weights in use
        between two steps, so no step sees a mixture. Tokens sampled before keep their version.
        """
        if self._follower:
            self._adopter.begin(version, address)
            return None
        return self._adoptions.begin(version, address)

    def score(self, sequences: Sequence[np.ndarray], candidates: CandidateSets | None = None) -> list[np.ndarray]:
        """Returns log-probabilities of given tokens by the weights in use."""
        if self._follower:
            return []
        return self._engine.score(sequences, candidates)

    def work(self) -> bool:
        if self._follower:
            return self._follow(self._follower)
        # The time since the last forward pass (calls, the loop around them) counts as part of the next one.
        between_s = self._work_clock() - self._left_s if self._work_clock and self._left_s is not None else 0.0
        self._adoptions.proceed()
        self._begin(lambda request: request.from_version <= self._adoptions.version)
        if not self._engine.has_work:
            self._left_s = None
            return self._adoptions.is_waiting  # nothing else would wake this executor
        if self._work_clock is None:  # forward passes cannot be observed
            self._take(self._engine.step())
            self._hand_over()
            return True
        before, start_s = self._engine.stats(), self._work_clock() - between_s
        self._take(self._engine.step())
        self._hand_over()
        after, end_s = self._engine.stats(), self._work_clock()
        self._left_s = end_s
        self._work = self._work.forward(
            after.decode_tokens - before.decode_tokens, after.prefill_tokens - before.prefill_tokens, end_s - start_s
        )
        return True

    def _follow(self, follower: FollowerRank) -> bool:
        if found := self._adopter.poll():
            follower.report(found.version, found)
        follower.follow()
        return not follower.stopped

    def close(self) -> None:
        keep_choices_in(None)
        self._adopter.close()
        if self._close is not None:
            self._close()

    def _is_due(self, now_s: float) -> bool:
        """Returns whether finished rollouts are handed over now."""
        is_all = self._num_wanted and self._num_whole >= self._num_wanted and not self._needed
        if is_all or not self._engine.has_work:
            return True
        is_parked = any(not one.finish_reason.is_final for one in self._finished)
        if not self._num_wanted or is_parked:  # another generator may continue it
            return now_s - self._replied_s >= REPLY_INTERVAL_S
        return now_s - self._replied_s >= (GROUPS_INTERVAL_S if self._num_whole else LATEST_S)

    def _hand_over(self) -> None:
        now = time.monotonic()
        if self._reply is None or not self._finished or not self._is_due(now):
            return
        reply, self._reply, self._replied_s = self._reply, None, now
        if reply.set_running_or_notify_cancel():  # if the caller has given up, the rollouts stay for the next call
            count = np.searchsorted(np.cumsum([*_sizes(self._finished)]), 1.0) + 1
            rollouts, self._finished = self._finished[:count], self._finished[count:]
            self._num_whole = self._num_whole if self._finished else 0
            stats = self._engine.stats()
            reply.set_result(
                Collected(
                    rollouts=rollouts,
                    stats=self._work._replace(
                        num_running=stats.running,
                        num_waiting=stats.waiting + sum(len(request.indices) for request in self._early),
                        generated_tokens=stats.decode_tokens,
                        background_s=time.process_time() - time.thread_time(),
                        recomputed_tokens=stats.recomputed_tokens,
                        recompute_s=stats.recompute_s,
                    ),
                )
            )


def _sizes(rollouts: Sequence[Rollout]) -> Iterator[float]:
    """Yields the share of a reply that each rollout takes. The first rollout with a prompt counts the prompt's
    experts."""
    counted = set[int]()
    for one in rollouts:
        prompt = one.prompt_routes if id(one.prompt_routes) not in counted else None
        counted.add(id(prompt))
        num_bytes = one.routes_bytes + (0 if prompt is None else prompt.nbytes)
        yield one.num_tokens / REPLY_TOKENS + num_bytes / REPLY_ROUTES_BYTES
