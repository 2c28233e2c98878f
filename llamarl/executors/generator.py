"""The generator: an engine that decodes between calls, and weights that change between two of its steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llamarl.cluster.api import Executor
from llamarl.config.ref import part
from llamarl.config.schema import GeneratorConfig
from llamarl.config.trainer import LoraConfig
from llamarl.distributed.links import Rendezvous
from llamarl.distributed.mesh import own_rank
from llamarl.executors.adoption import Adoptions
from llamarl.executors.backends import open_native
from llamarl.executors.replies import GROUPS_INTERVAL_S, LATEST_S, REPLY_INTERVAL_S, Adoption, Collected, GeneratorStats
from llamarl.executors.rescorer import Rescorer
from llamarl.kernels.build import keep_choices_in
from llamarl.observability.notes import note
from llamarl.types import CandidateSets, GenerationRequest, Rollout
from llamarl.weight_sync.layout import Address, TensorSpec

REPLY_TOKENS, REPLY_ROUTES_BYTES = 1 << 20, 64 << 20
"""Tokens, and bytes of their experts, from which on a reply takes no more rollouts; those of a fleet that parks at once
come in several."""


class GeneratorExecutor(Executor):
    """Decodes whenever requests are there; `submit`, `adopt` and `abort` run between two engine steps.

    With several ranks, rank 0 answers the calls and the others, each a `GeneratorFollower`, do as it does.
    """

    SPANS: ClassVar[dict[str, str]] = {"work": "generate", "adopt": "weight_sync", "score": "weight_sync"}

    def __new__(cls, model_path: str, config: GeneratorConfig, *_: Any, **__: Any) -> GeneratorExecutor:
        follows = config.tensor_parallel > 1 and own_rank()[0] > 0
        return object.__new__(GeneratorFollower if follows else cls)

    def __init__(
        self,
        model_path: str,
        config: GeneratorConfig,
        rendezvous: Rendezvous | None = None,
        delta: bool = False,
        backend: Any = None,
        lora: LoraConfig | None = None,
        choices: str = "",
        sleeps: bool = False,
        beside_bytes: int = 0,
    ) -> None:
        """
        Args:
            rendezvous: where several ranks meet.
            delta: weights may come as changes to the version in use.
            backend: settings of the part that computes in place of the native engine.
            lora: adapters come instead of weights.
            choices: folder of the run that keeps which kernels serve; empty: none.
            sleeps: takes memory only from a version on until the next call of `sleep`.
            beside_bytes: what the trainer will take of the device after its first step, while this one works.
        """
        keep_choices_in(Path(choices) if choices else None)
        if backend:
            opened = part(config.backend, "open_engine")(model_path, backend, delta)
        else:
            opened = open_native(model_path, config, rendezvous, delta, lora, sleeps, beside_bytes)
        self._engine, self._adopter, self._follower = opened.engine, opened.adopter, opened.follower
        self._close, self._work_clock = opened.close, opened.clock
        self._describe, self._told = opened.describe, ""
        self._tell()
        self._rescorer = Rescorer(self._engine)
        self._adoptions = Adoptions(self._adopter, self._engine, self._tell, self._rescorer.update)
        self._early = list[GenerationRequest]()
        """Requests that wait for a version to come."""
        self._owed = Counter[int]()
        """Rollouts of each request, by group, that the engine has or will have."""
        self._finished = list[Rollout]()
        self._num_whole = self._num_wanted = 0
        """Requests of which all rollouts have finished since the last reply, and how many are waited for."""
        self._needed = set[int]()
        """Groups among them that nobody can do without and that have not finished."""
        self._reply: Future[Collected] | None = None
        self._replied_s = 0.0
        self._work = GeneratorStats()
        self._left_s: float | None = None
        """End of the last forward on the work clock; None when there was nothing to do since."""

    def _tell(self) -> None:
        """Says in the log what computes what, once it is known."""
        if self._told != (said := self._describe()):
            self._told = said
            note(said)

    def sleep(self) -> None:
        """Gives the memory of weights, keys and values back until the next version is adopted; nothing decodes."""
        self._engine.sleep()

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Tensors that this rank wants to receive."""
        return self._adopter.specs

    def try_sample(self, version: int, address: Address) -> None:
        """Fetches a sample of published weights. Raises what `fetch` does."""
        self._adopter.try_sample(version, address)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests; their rollouts come out of `collect`. Those for a version to come begin when it serves."""
        for request in requests:
            self._owed[request.group_id] += len(request.indices)
        self._rescorer.submitted(requests)
        self._early += [request for request in requests if request.from_version > self._adoptions.version]
        self._engine.submit([request for request in requests if request.from_version <= self._adoptions.version])

    def abort(self, group_ids: Iterable[int]) -> None:
        """Ends these groups; their partial rollouts come out of `collect`."""
        group_ids = set(group_ids)
        self._begin(lambda request: request.group_id in group_ids)
        self._take(self._engine.abort(group_ids))
        self._hand_over()

    def so_far(self, group_ids: Sequence[int]) -> list[Rollout]:
        """Rollouts of these groups that decode now, as they are."""
        return self._engine.so_far(group_ids)

    def _begin(self, may_begin: Callable[[GenerationRequest], bool]) -> None:
        """Early requests that wait for no version any more go to the engine."""
        if requests := list(filter(may_begin, self._early)):
            self._early = [request for request in self._early if not may_begin(request)]
            self._engine.submit(requests)

    def _take(self, rollouts: Sequence[Rollout]) -> None:
        """These have left the engine."""
        self._finished += self._rescorer.left(rollouts, self._adoptions.version)
        for rollout in rollouts:
            self._owed[rollout.group_id] -= 1
            if not self._owed[rollout.group_id]:
                del self._owed[rollout.group_id]
                self._needed.discard(rollout.group_id)
                self._num_whole += 1

    def release(self, rollouts: Sequence[tuple[int, int]]) -> None:
        """Rollouts, by group and index, that waited for their environment and do not come back."""
        self._engine.release(rollouts)

    def collect(self, num_wanted: int, needed: Sequence[int] = ()) -> Future[Collected] | None:
        """The next finished rollouts: as soon as so many requests are done (0: as soon as one rollout is), and all that
        are `needed` of those that are here; or after a while those that are done by then."""
        assert self._reply is None, "one collect at a time"
        self._num_wanted, self._needed = num_wanted, {one for one in needed if one in self._owed}
        self._reply = reply = Future[Collected]()
        self._hand_over()
        return reply

    def adopt(self, version: int, address: Address) -> Future[Adoption] | None:
        """Takes over published weights; answers when they serve.

        They are fetched and checked in the background while decoding goes on, and then take the place of those in use,
        so no step ever sees a mixture; tokens sampled before keep their version.
        """
        return self._adoptions.begin(version, address)

    def score(self, sequences: Sequence[np.ndarray], candidates: CandidateSets | None = None) -> list[np.ndarray]:
        """Log-probabilities of given tokens by the weights that serve."""
        return self._engine.score(sequences, candidates)

    def work(self) -> bool:
        # What this thread did since its last forward (calls, the loop around them) is part of the next one's time.
        between_s = self._work_clock() - self._left_s if self._work_clock and self._left_s is not None else 0.0
        self._adoptions.go_on()
        self._begin(lambda request: request.from_version <= self._adoptions.version)
        if not self._engine.has_work:
            self._left_s = None
            return self._adoptions.is_waiting  # nobody else would wake it
        if self._work_clock is None:  # forwards are not ours to count
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

    def close(self) -> None:
        keep_choices_in(None)
        self._adopter.close()
        if self._close is not None:
            self._close()

    def _is_due(self, now_s: float) -> bool:
        """Whether what has finished is handed over now."""
        is_all = self._num_wanted and self._num_whole >= self._num_wanted and not self._needed
        if is_all or not self._engine.has_work:
            return True
        is_parked = any(not one.finish_reason.is_final for one in self._finished)
        if not self._num_wanted or is_parked:  # somebody else may go on with it
            return now_s - self._replied_s >= REPLY_INTERVAL_S
        return now_s - self._replied_s >= (GROUPS_INTERVAL_S if self._num_whole else LATEST_S)

    def _hand_over(self) -> None:
        now = time.monotonic()
        if self._reply is None or not self._finished or not self._is_due(now):
            return
        reply, self._reply, self._replied_s = self._reply, None, now
        if reply.set_running_or_notify_cancel():  # a caller that gave up gets nothing, and nothing is lost
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
    """Part of a reply that each takes; the experts of a prompt count for the first of those that share them."""
    counted = set[int]()
    for one in rollouts:
        prompt = one.prompt_routes if id(one.prompt_routes) not in counted else None
        counted.add(id(prompt))
        num_bytes = one.routes_bytes + (0 if prompt is None else prompt.nbytes)
        yield one.num_tokens / REPLY_TOKENS + num_bytes / REPLY_ROUTES_BYTES


class GeneratorFollower(GeneratorExecutor):
    """A rank other than 0: gets the same calls and leaves all to what rank 0 tells, but for its part of the weights."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Rank 0 tells."""

    def abort(self, group_ids: Iterable[int]) -> None:
        """Rank 0 tells."""

    def release(self, rollouts: Sequence[tuple[int, int]]) -> None:
        """Rank 0 tells."""

    def sleep(self) -> None:
        """Rank 0 tells."""

    def so_far(self, group_ids: Sequence[int]) -> list[Rollout]:
        """Rank 0 answers."""
        return []

    def collect(self, num_wanted: int, needed: Sequence[int] = ()) -> None:
        """Rank 0 answers."""

    def adopt(self, version: int, address: Address) -> None:
        """Fetches this rank's part; rank 0 tells when to use it."""
        self._adopter.begin(version, address)

    def score(self, sequences: Sequence[np.ndarray], candidates: CandidateSets | None = None) -> list[np.ndarray]:
        """Rank 0 answers."""
        return []

    def work(self) -> bool:
        assert self._follower is not None, "this is not rank 0"
        if found := self._adopter.poll():
            self._follower.report(found.version, found)
        self._follower.follow()
        return not self._follower.stopped
