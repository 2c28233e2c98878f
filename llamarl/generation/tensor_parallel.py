"""Several ranks that generate as one: each holds a part of the model and runs the same engine, in lockstep.

    rank 0   TensorParallelEngine.submit, step, ...  -- (method, argument) -->  FollowerRank.follow   other ranks
                                                     <-- report --------------

Rank 0 receives the calls and forwards each to the other ranks before the next forward. So all engines see the same
requests, aborts and weights in the same order, schedule alike, and sample alike, because gathered logits have the same
bits everywhere. With each step rank 0 sends a summary of its engine's work so far. A rank with another summary stops.

Every rank fetches its part of new weights while it decodes, and reports. Once all ranks have theirs, rank 0 points its
model to the new version and calls `set_version`. The other ranks do the same before the same step.

Shape suffixes: R ranks, N packed tokens, V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from llamarl.config.errors import RanksLost
from llamarl.distributed.mesh import Axis, RankMesh
from llamarl.generation.backend import EngineStats
from llamarl.generation.engine import Engine
from llamarl.types import CandidateSets, GenerationRequest, Rollout


class ModelRanks:
    """The collectives of one forward: the `TensorParallel` of `llamarl/generation/model.py`."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self.size, self.rank = axis.size, axis.rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks. May overwrite `x`."""
        return self._axis.sum(x.contiguous())

    def all_gather_vocab(self, logits_N_V: Tensor) -> Tensor:
        """Returns the ranks' parts of the vocabulary side by side, [N, V]."""
        parts_R_N_V = self._axis.gather(logits_N_V).unflatten(0, (self.size, -1))
        return parts_R_N_V.transpose(0, 1).flatten(1)


class OutOfStep(RuntimeError):
    """A rank's engine has computed something else than rank 0's engine."""


class _Steps:
    """Steps of one rank's engine, with a summary that must be the same on all ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._crc = 0

    def done(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Returns the summary: tokens sampled and prefilled, use of the KV cache, and a checksum of the rollouts that
        have left; and what decides whether the next step is captured."""
        stats = self._engine.stats()
        return (stats.decode_tokens, stats.prefill_tokens, stats.kv_use, self._crc), self._engine.graph_state()

    def step(self) -> list[Rollout]:
        rollouts = self._engine.step()
        for rollout in rollouts:
            self._crc = zlib.crc32(rollout.token_ids_T.tobytes(), self._crc)
        return rollouts


class TensorParallelEngine:
    """A `GenerationBackend` on rank 0. After `RanksLost` the ranks must be restarted."""

    def __init__(self, engine: Engine, mesh: RankMesh) -> None:
        assert mesh.links is not None, "there are no other ranks"
        assert mesh.world.rank == 0, "rank 0 leads"
        self.keyed_sampling = engine.keyed_sampling
        self._engine, self._mesh, self._links, self._steps = engine, mesh, mesh.links, _Steps(engine)
        self._reports = dict[int, dict[int, Any]]()
        """Outcome by version and rank."""

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        requests = list(requests)
        self._engine.submit(requests)  # the other ranks need not know a call that it refuses
        self._tell("submit", requests)

    def step(self) -> list[Rollout]:
        with self._mesh.together():
            self._send("step", self._steps.done())
            return self._steps.step()

    def abort(self, group_ids: Iterable[int]) -> list[Rollout]:
        group_ids = list(group_ids)
        self._tell("abort", group_ids)
        return self._engine.abort(group_ids)

    def so_far(self, group_ids: Iterable[int]) -> list[Rollout]:
        return self._engine.so_far(group_ids)

    def release(self, rollouts: Iterable[tuple[int, int]]) -> None:
        rollouts = list(rollouts)
        self._tell("release", rollouts)
        self._engine.release(rollouts)

    def sleep(self) -> None:
        self._tell("sleep", None)
        self._engine.sleep()

    def set_version(self, version: int) -> None:
        """Adopts `version` on all ranks, which have reported that they hold it. This rank's model uses it already."""
        self._tell("set_version", version)
        self._engine.set_version(version)
        self._reports = {other: outcomes for other, outcomes in self._reports.items() if other > version}

    def score(self, sequences: Sequence[np.ndarray], candidates: CandidateSets | None = None) -> list[np.ndarray]:
        with self._mesh.together(ValueError):  # every rank refuses the same sequences, before any forward
            self._send("score", (list(sequences), candidates))
            return self._engine.score(sequences, candidates)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def report(self, version: int, outcome: Any) -> None:
        """Records that this rank has fetched a version, or why it could not. `outcome` is small and can be pickled."""
        self._reports.setdefault(version, {})[0] = outcome

    def reports(self, version: int, wait_s: float = 0.0) -> list[Any] | None:
        """Returns the reports of all ranks on a version, or None while some are missing. Waits up to `wait_s` for
        each."""
        with self._mesh.together():
            for rank in range(1, self._links.size):
                while self._links.poll(rank, 0.0 if rank in self._reports.get(version, {}) else wait_s):
                    reported, outcome = self._links.receive(rank, "report")
                    self._reports.setdefault(reported, {})[rank] = outcome
        outcomes = self._reports.get(version, {})
        return [outcomes[rank] for rank in range(self._links.size)] if len(outcomes) == self._links.size else None

    def close(self) -> None:
        """Stops all ranks' engines. The last call."""
        with suppress(RanksLost):
            self._send("stop", None)
        self._mesh.close()

    def _tell(self, method: str, argument: Any) -> None:
        with self._mesh.together():
            self._send(method, argument)

    def _send(self, method: str, argument: Any) -> None:
        for rank in range(1, self._links.size):
            self._links.send(rank, (method, argument))


class FollowerRank:
    """A rank other than 0. It repeats the calls of rank 0."""

    def __init__(self, engine: Engine, mesh: RankMesh, use: Callable[[int], None]) -> None:
        """
        Args:
            use: points this rank's model to its part of a version that it has reported.
        """
        assert mesh.links is not None, "rank 0 must be another process"
        self._engine, self._mesh, self._links = engine, mesh, mesh.links
        self._use, self._steps = use, _Steps(engine)
        self.stopped = False
        """True once rank 0 has closed."""

    def follow(self, wait_s: float = 0.02) -> bool:
        """Repeats the calls of rank 0, up to a step. Waits up to `wait_s` for the first call. Returns False if there
        was none.

        The caller repeats it. Rank 0 may be idle for any time; its death is noticed at once.

        Raises:
            RanksLost: other ranks are gone.
            OutOfStep: the engines have diverged.
        """
        method = ""
        with self._mesh.together():
            while not self.stopped and method != "step" and self._links.poll(0, 0.0 if method else wait_s):
                method, argument = self._links.receive(0, "send a call")
                self._do(method, argument)
        return bool(method)

    def report(self, version: int, outcome: Any) -> None:
        """Reports to rank 0 that this rank has fetched a version, or why it could not. `outcome` is small and can be
        pickled."""
        self._links.send(0, (version, outcome))

    def close(self) -> None:
        """Closes the connection. The next call of rank 0 fails."""
        self.stopped = True
        self._mesh.close()

    def _check(self, summary: tuple[tuple[float, ...], tuple[int, ...]]) -> None:
        """Raises OutOfStep if rank 0's summary is another than this rank's."""
        (done, graphs), (other, others_graphs), rank = self._steps.done(), summary, self._links.rank
        if done != other:
            raise OutOfStep(f"rank 0 has done {other}, rank {rank} {done}")
        if graphs != others_graphs:  # before the step: only one of them would capture it, and run collectives twice
            raise OutOfStep(
                f"rank 0 has CUDA graphs {others_graphs}, rank {rank} {graphs} (captures, weights in use): the memory "
                "of new weights was used before on one of them only; set generator.cuda_graphs = 'off'"
            )

    def _do(self, method: str, argument: Any) -> None:
        engine = self._engine
        match method:
            case "step":
                self._check(argument)
                self._steps.step()
            case "submit":
                engine.submit(argument)
            case "abort":
                engine.abort(argument)
            case "release":
                engine.release(argument)
            case "sleep":
                engine.sleep()
            case "set_version":
                self._use(argument)
                engine.set_version(argument)
            case "score":
                with suppress(ValueError):  # rank 0 raises it for its caller
                    engine.score(*argument)
            case "stop":
                self.stopped = True
