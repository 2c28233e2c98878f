"""`Adopter` fetches published weights beside the decoding; `Adoptions` puts them to use between two engine steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import xxhash
from torch import Tensor

from llamarl.executors.replies import Adoption
from llamarl.generation.backend import GenerationBackend
from llamarl.generation.tensor_parallel import TensorParallelEngine
from llamarl.weight_sync.base import FingerprintMismatch, Room, Subscriber, Superseded, TransferFailed
from llamarl.weight_sync.layout import Address, TensorSpec
from llamarl.weight_sync.select import Reader, open_subscriber, sample

WAIT_S = 0.01
"""An idle engine waits so long for weights before it looks for calls."""


_Fetched = tuple[Adoption, Mapping[str, Tensor]]
"""Outcome of a fetch on this rank, and its tensors; these are empty unless it is adopted."""


class Adopter:
    """One rank's weights. At most one version is being fetched."""

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
            use: points the model to what `hold` gave.
            hold: brings fetched tensors to the model's device, in the background.
            delta: weights may come as changes to the version in use.
            room: on the model's device, for tensors like some specs; None: in this machine's memory.
            subscribe: opens the end that fetches, as `open_subscriber` does.
        """
        options = {"room": room} if room else {}
        self._reader = Reader(specs, rank, subscribe, delta=delta, **options)
        self._sampler = Reader(sample(specs), rank, subscribe, **options)
        self._use, self._hold = use, hold
        self._thread = ThreadPoolExecutor(1, "weights")
        self._fetch: Future[_Fetched] | None = None
        self._fetched: _Fetched | None = None
        """Done, reported and not yet in use."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Tensors that this rank wants to receive."""
        return self._reader.specs

    def try_sample(self, version: int, address: Address) -> None:
        """Fetches a version of a sample of the weights, by a transport that is being tried, and drops it."""
        self._sampler.at(address).fetch(version, address)

    def begin(self, version: int, address: Address) -> None:
        """Starts to fetch a version; one that was fetched and never used is dropped."""
        assert self._fetch is None, "one version at a time"
        self._sampler.close()
        self._fetched = None
        self._fetch = self._thread.submit(self._run, version, address)

    def poll(self, wait_s: float = 0.0) -> Adoption | None:
        """Outcome of the fetch, once, when it is done; waits for that at most so long."""
        if self._fetch is None:
            return None
        wait([self._fetch], wait_s)
        if not self._fetch.done():
            return None
        self._fetched, self._fetch = self._fetch.result(), None
        return self._fetched[0]

    def use(self, version: int) -> None:
        """The model computes with the fetched version from now on."""
        assert self._fetched is not None, "nothing has been fetched"
        adoption, tensors = self._fetched
        assert adoption.version == version, "another version has been fetched"
        self._use(tensors)
        self._fetched = None

    def close(self) -> None:
        """Leaves the weights in use alone."""
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
    """Rank 0's: what becomes of the version that was asked for."""

    def __init__(
        self,
        adopter: Adopter,
        engine: GenerationBackend,
        awake: Callable[[], None] = lambda: None,
        leaving: Callable[[int], None] = lambda version: None,
    ) -> None:
        """`awake` hears of each version that serves, `leaving` of the one before, just before that."""
        self._adopter, self._engine, self._awake, self._leaving = adopter, engine, awake, leaving
        self._asked: tuple[int, Future[Adoption]] | None = None
        self.version = 0
        """The version in use."""

    def begin(self, version: int, address: Address) -> Future[Adoption]:
        """Answers when the version serves, or why it does not."""
        self._adopter.begin(version, address)
        self._asked = version, (reply := Future[Adoption]())
        self.go_on()
        return reply

    @property
    def is_waiting(self) -> bool:
        """Whether a version is on its way."""
        return self._asked is not None

    def go_on(self) -> None:
        """Swaps the weights once all ranks have fetched theirs; an idle engine waits for that, but not long, as calls
        may wait meanwhile."""
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
    """The adoption by all ranks of one generator: the first that failed, or all of them as one."""
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
