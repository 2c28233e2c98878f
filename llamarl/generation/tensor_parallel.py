"""Several ranks that generate as one: each holds a part of the model and runs the same engine, in lockstep.

    rank 0   TensorParallelEngine.submit, step, ...  -- (method, argument) -->  Follower.follow   other ranks
                                                     <-- report, failure -----

Rank 0 owns the calls and tells the others of each before the next forward. So all engines see the same requests, aborts
and weights in the same order, schedule alike, and, as gathered logits are the same bits everywhere, sample alike. With
each step rank 0 sends what its engine has done so far; a rank that has done anything else stops.

Every rank fetches its own part of new weights while it decodes, and reports. Once all have it, rank 0 points its model
to the new version and calls `set_version`; the others do the same before the same step.

Shape suffixes: R ranks, N packed tokens, V vocabulary.
"""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from torch import Tensor

from llamarl.distributed.groups import RankGroup, RanksLost
from llamarl.generation.backend import EngineStats
from llamarl.generation.engine import Engine
from llamarl.types import GenerationRequest, Rollout

LAST_WORDS_S = 2.0
"""When ranks are lost, rank 0 waits for so long to hear why."""


class ModelRanks:
    """The collectives of one forward; the `TensorParallel` of `llamarl/generation/model.py`."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.size, self.rank = group.size, group.rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks; may overwrite `x`."""
        return self._group.all_reduce(x, "add up hidden states")

    def all_gather_vocab(self, logits_N_V: Tensor) -> Tensor:
        """The ranks' parts of the vocabulary side by side, [N, V]."""
        parts_R_N_V = self._group.all_gather(logits_N_V, "gather logits")
        return parts_R_N_V.transpose(0, 1).flatten(1)


class OutOfStep(RuntimeError):
    """A rank's engine has done something else than rank 0's."""


class _Steps:
    """Steps of one rank's engine, and what must then be the same on all ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._crc = 0

    def done(self) -> tuple[float, ...]:
        """Tokens sampled and prefilled, use of the KV cache, and a checksum over the rollouts that have left."""
        stats = self._engine.stats()
        return stats.decode_tokens, stats.prefill_tokens, stats.kv_use, self._crc

    def step(self) -> list[Rollout]:
        rollouts = self._engine.step()
        for rollout in rollouts:
            self._crc = zlib.crc32(rollout.token_ids_T.tobytes(), self._crc)
        return rollouts


class TensorParallelEngine:
    """A `GenerationBackend` on rank 0. When it raises `RanksLost`, the ranks must be started anew."""

    def __init__(self, engine: Engine, group: RankGroup) -> None:
        assert group.rank == 0, "other ranks follow"
        self.keyed_sampling = engine.keyed_sampling
        self._engine, self._group, self._steps = engine, group, _Steps(engine)
        self._reports = dict[int, dict[int, Any]]()
        """Version -> rank -> outcome."""
        self._lost = dict[int, str]()
        """Rank -> cause; empty when it failed because others did."""

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        requests = list(requests)
        self._engine.submit(requests)  # what it refuses, the others need not hear of
        self._tell("submit", requests)

    def step(self) -> list[Rollout]:
        with self._in_step():
            self._tell("step", self._steps.done())
            return self._steps.step()

    def abort(self, group_ids: Iterable[int]) -> list[Rollout]:
        group_ids = list(group_ids)
        self._tell("abort", group_ids)
        return self._engine.abort(group_ids)

    def set_version(self, version: int) -> None:
        """All ranks have reported that they hold `version`, and this one's model uses it."""
        self._tell("set_version", version)
        self._engine.set_version(version)
        self._reports = {other: outcomes for other, outcomes in self._reports.items() if other > version}

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        with self._in_step():
            self._tell("score", list(sequences))
            try:
                return self._engine.score(sequences)
            except ValueError as error:  # every rank refuses alike, before any forward
                refusal = error
        raise refusal

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def report(self, version: int, outcome: Any) -> None:
        """This rank has fetched a version, or why not: anything small that can be pickled."""
        self._reports.setdefault(version, {})[0] = outcome

    def reports(self, version: int, wait_s: float = 0.0) -> list[Any] | None:
        """What each rank has reported of a version; None while some have not. Waits for each at most so long."""
        with self._in_step():
            for rank in range(1, self._group.size):
                while self._group.poll(rank, 0.0 if rank in self._reports.get(version, {}) else wait_s):
                    self._hear(rank)
        outcomes = self._reports.get(version, {})
        return [outcomes[rank] for rank in range(self._group.size)] if len(outcomes) == self._group.size else None

    def close(self) -> None:
        """Ends all ranks' engines; the last call."""
        with suppress(RanksLost):
            self._tell("stop", None)
        self._group.close()

    def _tell(self, method: str, argument: Any) -> None:
        try:
            for rank in range(1, self._group.size):
                self._group.send(rank, (method, argument))
        except RanksLost as error:
            raise self._cause(error) from error

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Work that needs all ranks; whatever ends it on this one ends it on the others, and the other way around."""
        try:
            yield
        except RanksLost as error:
            raise self._cause(error) from error
        except BaseException:
            self._group.close()
            raise

    def _hear(self, rank: int) -> None:
        try:
            kind, *content = self._group.receive(rank, "report")
        except RanksLost:
            self._lost.setdefault(rank, f"rank {rank} is gone")
            raise
        if kind == "failed":
            self._lost[rank] = f"rank {rank} failed: {content[0]}" if content[0] else ""
            raise RanksLost(f"rank {rank} failed")
        version, outcome = content
        self._reports.setdefault(version, {})[rank] = outcome

    def _cause(self, consequence: RanksLost) -> RanksLost:
        """Why ranks were lost; one that has only lost others does not know."""
        deadline_s = time.monotonic() + LAST_WORDS_S
        for rank in range(1, self._group.size):
            with suppress(RanksLost):
                while rank not in self._lost and self._group.poll(rank, max(0.0, deadline_s - time.monotonic())):
                    self._hear(rank)
        self._group.close()
        return RanksLost("; ".join(filter(None, self._lost.values())) or str(consequence))


class Follower:
    """A rank other than 0; runs what rank 0 tells it."""

    def __init__(self, engine: Engine, group: RankGroup, use: Callable[[int], None]) -> None:
        """
        Args:
            use: points this rank's model to its part of a version that it has reported.
        """
        self._engine, self._group, self._use, self._steps = engine, group, use, _Steps(engine)
        self.stopped = False
        """Rank 0 has closed."""

    def follow(self, wait_s: float = 0.02) -> bool:
        """What rank 0 has told, up to a step; waits at most so long for a first word. False: there was none.

        Call it again and again. Rank 0 may be idle for as long as it likes; that it is gone shows at once.

        Raises:
            RanksLost: others are gone.
            OutOfStep: the engines no longer do the same.
        """
        method = ""
        while not self.stopped and method != "step" and self._group.poll(0, 0.0 if method else wait_s):
            method, argument = self._group.receive(0, "go on")
            try:
                self._do(method, argument)
            except BaseException as error:
                with suppress(RanksLost):
                    self._group.send(0, ("failed", "" if isinstance(error, RanksLost) else traceback.format_exc()))
                self._group.close()
                raise
        return bool(method)

    def report(self, version: int, outcome: Any) -> None:
        """As `TensorParallelEngine.report`."""
        self._group.send(0, ("report", version, outcome))

    def close(self) -> None:
        """Ends it; rank 0 fails when it goes on."""
        self.stopped = True
        self._group.close()

    def _do(self, method: str, argument: Any) -> None:
        engine = self._engine
        match method:
            case "step":
                if argument != (done := self._steps.done()):
                    raise OutOfStep(f"rank 0 has done {argument}, rank {self._group.rank} {done}")
                self._steps.step()
            case "submit":
                engine.submit(argument)
            case "abort":
                engine.abort(argument)
            case "set_version":
                self._use(argument)
                engine.set_version(argument)
            case "score":
                with suppress(ValueError):  # rank 0 tells its caller
                    engine.score(argument)
            case "stop":
                self.stopped = True
