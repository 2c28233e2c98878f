"""Executors of the simulator with a ledger, and with values where it has only sizes. No torch; time is virtual.

A script overrides, or assigns, `do_METHOD`: it gives the seconds of a call and its result, or raises an
`ExecutorError`, which is the answer then. Each executor is set up before a run, begins to live in it (`start`), and
tells afterwards.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np

from llamarl.cluster.api import CallTimeout, ExecutorError, HostStatus, RemoteError
from llamarl.config import RunConfig
from llamarl.executors.replies import Adoption, Probe, Published, ScoredResponse
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.simulator.decoding import Decoded
from llamarl.parts.forecast.simulator.draws import ResponseLengths
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.handles import (
    NOWHERE,
    SimulatedGenerator,
    SimulatedHandle,
    SimulatedTrainer,
    World,
)
from llamarl.training.result import PolicyStepResult, StepResult
from llamarl.types import Columns, FinishReason, GenerationRequest, Outcome, Prompt, RewardResult, Rollout, RolloutGroup

RIGHT = RewardResult(outcome=Outcome.SCORE, value=1.0)
WRONG = RewardResult(outcome=Outcome.WRONG, value=0.0)
UNJUDGED = RewardResult(outcome=Outcome.INVALID, value=0.0, reason="the grader is broken")
CONFIG = RunConfig.model_validate({"model": {"path": "nowhere"}, "data": {"train": "jsonl"}})
LENGTHS = ResponseLengths(Costs(), limit_tokens=1 << 60, seed=0)


@dataclass(slots=True)
class Called:
    """A line of the ledger: a call whose turn came."""

    method: str
    args: tuple[Any, ...]
    begin_s: float
    result: Any = None
    end_s: float = math.inf
    """Infinite without an answer."""
    number: int = field(default_factory=itertools.count().__next__)
    """Rises with each turn of any executor."""


@dataclass(eq=False, repr=False)
class Ledgered(SimulatedHandle):
    """Keeps a ledger, gets its arguments through a pickle, and can stand still."""

    hosts: tuple[str, ...] = field(default=("",), kw_only=True)
    ledger: list[Called] = field(default_factory=list, kw_only=True)
    """In the order of their turns, those of its other lives too."""
    token_s: ClassVar[float] = 1.0
    max_running: ClassVar[int] = 1

    def start(self, name: str) -> Self:
        """Begins to live, on the event loop that runs."""
        costs = Costs(decode_base_s=self.token_s, decode_per_rollout_s=0.0, prefill_token_s=0.0, adopt_s=0.0)
        generator = CONFIG.generator.model_copy(update={"max_running": self.max_running})
        config = CONFIG.model_copy(update={"generator": generator})
        world = World(config=config, costs=costs, faults=Faults(), trainer_gpus=1, lengths=LENGTHS)
        super().__init__(name, world)
        self._frozen_s = math.inf
        self._postponed = list[Callable[[], object]]()
        return self

    def another(self) -> Self:
        """One in place of this one, which is dead: as it was set up, and its ledger goes on."""
        return replace(self)

    def calls(self, method: str) -> list[Called]:
        """Calls of it that were answered."""
        return [one for one in self.ledger if one.method == method and one.end_s <= self._loop.time()]

    @property
    def is_stopped(self) -> bool:
        """Whether it was ended in order."""
        return not self.is_alive and not self.failed.done()

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        return await super().call(method, *pickle.loads(pickle.dumps(args)), timeout_s=timeout_s, **kwargs)

    def _run(self, method: str, args: tuple[Any, ...]) -> tuple[float, Any]:
        self.ledger.append(called := Called(method, args, self._loop.time()))
        try:
            seconds, result = super()._run(method, args)
        except ExecutorError as error:
            return 0.0, error
        if not isinstance(result, asyncio.Future):
            called.result, called.end_s = result, self._loop.time() + seconds
        return seconds, (called, result)

    def _answer(self, answer: asyncio.Future[Any], result: Any) -> None:
        if self._frozen_s < math.inf:
            self._postponed.append(partial(self._answer, answer, result))
        elif isinstance(result, ExecutorError):
            answer.done() or answer.set_exception(result)
        elif not isinstance(result[1], asyncio.Future):
            super()._answer(answer, result[1])
        elif result[1].done():
            result[0].result, result[0].end_s = result[1].result(), self._loop.time()
            super()._answer(answer, result[1].result())
        else:
            result[1].add_done_callback(lambda _: self._ended or self._answer(answer, result))

    def _end(self, error: ExecutorError) -> None:
        for called in self.ledger:
            called.end_s = math.inf if called.end_s > self._loop.time() else called.end_s
        super()._end(error)

    def freeze(self) -> None:
        """Stands still, as after SIGSTOP."""
        self._frozen_s = self._loop.time()

    def thaw(self) -> None:
        """Goes on."""
        self._frozen_s = math.inf
        postponed, self._postponed = self._postponed, []
        for act in postponed:
            act()

    def _begin(self) -> None:
        self._when_thawed(super()._begin)

    def _finish(self, answer: asyncio.Future[Any], result: Any) -> None:
        self._when_thawed(partial(super()._finish, answer, result))

    def _when_thawed(self, act: Callable[[], object]) -> None:
        if self._frozen_s < math.inf:
            self._postponed.append(act)
        elif self._ended is None:
            act()

    async def status(self, timeout_s: float) -> HostStatus:
        if self._frozen_s < math.inf and not self._ended:
            await asyncio.sleep(timeout_s)
            raise CallTimeout(self.name, "status", timeout_s, "has not reported yet what it does")
        return await super().status(timeout_s)


def token(group_id: int, index: int, position: int) -> int:
    """What is sampled there, whoever does it."""
    return group_id % 100_000 * 10_000 + index * 1_000 + position


@dataclass(eq=False, repr=False)
class Generator(Ledgered, SimulatedGenerator):
    """Decodes rollouts by the clock, and fetches weights meanwhile."""

    duration_s: Callable[[int, int], float] = lambda group_id, index: 1.0 + index
    """Seconds of a response, by group and index."""
    num_tokens: Callable[[int, int], int] | None = None
    """Its tokens; None: as many as its seconds take."""
    token_s: float = 0.1  # pyrefly: ignore[bad-override]
    """Seconds of a decode step."""
    max_running: int = 1 << 16  # pyrefly: ignore[bad-override]
    """Rollouts at once; siblings of those that wait in line are parked before these."""
    turn_tokens: int = 0
    """Tokens of each turn, where an environment says what follows; 0: there is none."""
    is_cut: bool = False
    """Turns end by length."""
    adopt_s: float | Callable[[int], float] = 0.1
    """Seconds in which a version is fetched."""
    outcomes: list[str] = field(default_factory=list)
    """How the next fetches end; when there are none left, with an adoption."""
    bias: float = 0.0
    """By which its log-probabilities are wrong, in nats."""
    source: Trainer | None = None
    """Whose staging memory it serves from."""
    adopted: list[tuple[float, int]] = field(default_factory=list)
    """(when, version)."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) of each rollout or segment of one."""
    held: set[tuple[int, int]] = field(default_factory=set)
    """Rollouts that wait for their environment, by group and index."""
    slot: int = -1

    def start(self, name: str) -> Self:
        super().start(name)
        self._queue.version = -1
        self._since = list[tuple[int, int]]()  # decode steps before a version, and the version
        self._begun_s = dict[tuple[int, int], float]()
        self._with_turns = set[int]()
        self._sampled_keys = list[tuple[int, int, int]]()
        return self

    @property
    def version(self) -> int:
        return self._queue.version

    @property
    def num_running(self) -> int:
        return self._queue.num_running

    @property
    def sampled(self) -> list[tuple[int, int, int]]:
        """(group, index, position) of every token."""
        now_s = min(self._loop.time(), self.alive_s[1], self._frozen_s)
        left = [*self._ended_rollouts, *self._queue.finished, *self._queue.so_far(now_s)]
        return [*self._sampled_keys, *(key for one in left for key in self._keys(one))]

    def _keys(self, decoded: Decoded) -> Iterable[tuple[int, int, int]]:
        one = decoded.attempt
        return ((one.group_id, one.index, one.earlier_tokens + n) for n in range(one.num_tokens))

    def _starts(self, request: GenerationRequest) -> Iterable[tuple[Rollout, int]]:
        if request.has_turns:
            self._with_turns.add(request.group_id)
        for partial_ in request.starts():
            key = request.group_id, partial_.index
            self.held.discard(key)
            self._begun_s[key] = self._loop.time()
            yield partial_, self._length(partial_)

    def _length(self, partial_: Rollout) -> int:
        if self.turn_tokens:
            is_within = partial_.num_tokens and partial_.turns[-1][0]
            return partial_.num_tokens - (len(partial_.turns[-1][1]) if is_within else 0) + self.turn_tokens
        if self.num_tokens:
            return self.num_tokens(partial_.group_id, partial_.index)
        return max(1, round(self.duration_s(partial_.group_id, partial_.index) / self.token_s))

    def _submit(self, now_s: float, request: GenerationRequest) -> None:
        assert self.source is None or self.source.staging[self.slot] == self.version, "these weights are gone"
        super()._submit(now_s, request)

    def slow_down(self, token_s: float) -> None:
        """A decode step takes so many seconds from now on."""
        self._queue.advance(self._loop.time())
        self._queue.base_s = token_s
        self._schedule()

    def serves(self, slot: int) -> bool:
        """Whether it computes by what is there."""
        return self.is_alive and self.slot == slot and self._queue.has_work

    def _rollout(self, decoded: Decoded, reason: FinishReason) -> Rollout:
        reason = FinishReason.LENGTH if self.is_cut and reason is FinishReason.STOP else reason
        rollout = super()._rollout(decoded, reason)
        key = rollout.group_id, rollout.index
        self.spans.append((self._begun_s.pop(key), decoded.finished_s))
        self._sampled_keys += self._keys(decoded)
        if reason is FinishReason.STOP and rollout.group_id in self._with_turns:
            self.held.add(key)
        return rollout

    def _sampled(self, decoded: Decoded, before: Rollout) -> Columns:
        ids_T = np.array([token(*key) for key in self._keys(decoded)], np.int32)
        steps_T = np.arange(decoded.end_step - len(ids_T), decoded.end_step)
        at_T = np.searchsorted([step for step, _ in self._since], steps_T, side="right") - 1
        versions_T = np.array([version for _, version in self._since], np.int32)[at_T]
        return {"token_ids": ids_T, "behavior_logprobs": ids_T.astype(np.float32), "policy_versions": versions_T}

    def do_adopt(self, version: int, slot: Any) -> tuple[float, Any]:
        """Answered when it is fetched, beside other calls."""
        seconds = self.adopt_s if isinstance(self.adopt_s, float) else self.adopt_s(version)
        fetched = self._loop.create_future()
        serve = partial(self._serve, fetched, version, slot, seconds)
        self._loop.call_later(seconds, self._when_thawed, serve)
        return 0.0, fetched

    def _serve(self, fetched: asyncio.Future[Adoption], version: int, slot: int, seconds: float) -> None:
        if self.source is not None and self.source.staging[slot] != version:
            return fetched.set_result(Adoption(version=version, outcome="superseded"))
        if self.outcomes and (outcome := self.outcomes.pop(0)) != "adopted":
            said = f"w of version {version} on rank 0: {outcome}"
            return fetched.set_result(Adoption(version=version, outcome=outcome, reason=said))
        self.slot = slot
        self._queue.advance(self._loop.time())
        self._since.append((self._queue.num_steps, version))
        super().do_adopt(version, NOWHERE)
        self.adopted.append((self._loop.time(), version))
        return fetched.set_result(
            Adoption(version=version, stall_s=0.001, fetch_s=seconds, num_bytes=1000, fingerprint=f"{version:016x}")
        )

    def do_release(self, rollouts: list[tuple[int, int]]) -> tuple[float, Any]:
        self.held -= set(rollouts)
        return 0.0, None

    def do_score(self, sequences: Sequence[np.ndarray]) -> tuple[float, Any]:
        return 0.0, [np.full(len(sequence) - 1, self.version + self.bias, np.float32) for sequence in sequences]

    def freeze(self) -> None:
        super().freeze()
        self._queue.advance(self._frozen_s)

    def thaw(self) -> None:
        if self._frozen_s < math.inf:
            self._queue.adopt(self._frozen_s, self.version, self._loop.time() - self._frozen_s)
        super().thaw()

    def _wake(self) -> None:
        self._when_thawed(super()._wake)


@dataclass(eq=False, repr=False)
class Trainer(Ledgered, SimulatedTrainer):
    """Knows nothing but its version; `saved` is the disk, and outlives it."""

    step_s: float = 0.5
    write_s: float = 0.0
    """From `save` to its answer."""
    disk_size: int = 1000
    """Checkpoints that fit on it."""
    version: int = 0
    saved: list[tuple[int, str]] = field(default_factory=list)
    """(trainer's version, the controller's state as JSON) of each checkpoint."""
    published: list[tuple[int, int]] = field(default_factory=list)
    """(name that the weights got, steps that they have had)."""
    staging: list[int | None] = field(default_factory=list)
    """Version in each slot; a slot is written again when nobody uses its version."""
    readers: Sequence[Generator] = ()
    """Who serves from there."""
    consumed: list[RolloutGroup] = field(default_factory=list)
    learnt: list[list[int]] = field(default_factory=list)
    """Group ids of each step: its weights."""
    weights: dict[int, list[list[int]]] = field(default_factory=dict)
    """`learnt` of each checkpoint; as `saved` it is the disk."""
    mirror: dict[int, list[list[int]]] | None = None
    """The newest copies of `learnt`, which outlive it, by step."""
    damage: str = ""
    """What is said of a weight."""

    def start(self, name: str) -> Self:
        version = self.version
        super().start(name)
        self.version = version
        self._given = dict[int, RolloutGroup]()
        return self

    def another(self) -> Self:
        """A new one; its disk, its mirror and what generators hold are there."""
        return replace(self, version=0, learnt=[], consumed=[], staging=list(self.staging))

    @property
    def spans(self) -> list[tuple[float, float]]:
        """(begin, end) of each step."""
        return [(one.begin_s, one.end_s) for one in self.calls("step")]

    def do_add_groups(self, groups: Sequence[RolloutGroup]) -> tuple[float, Any]:
        self._given.update((group.group_id, group) for group in groups)
        return super().do_add_groups(groups)

    def do_step(self, group_ids: Sequence[int], groups: Sequence[RolloutGroup]) -> tuple[float, Any]:
        before = self.version
        _, result = super().do_step(group_ids, groups)
        self.version = before  # until it ends
        self.consumed += [self._given.pop(group_id) for group_id in group_ids]
        return self.step_s, result

    def _finish(self, answer: asyncio.Future[Any], result: Any) -> None:
        if self.is_alive and isinstance(step := result[1], PolicyStepResult):
            self.version = step.policy_version
            self.learnt.append(list(step.advantages))
            if self.mirror is not None:
                self.mirror[self.version] = list(self.learnt)
        super()._finish(answer, result)

    def do_set_layout(self, rank: int, specs: tuple[()]) -> tuple[float, Any]:
        assert (rank, specs) == (0, ())
        return 0.0, None

    def do_publish(self, version: int, in_use: tuple[int, ...]) -> tuple[float, Any]:
        self.published.append((version, self.version))
        newest = max((held for held in self.staging if held is not None), default=None)
        free = [slot for slot, held in enumerate(self.staging) if held not in (*in_use, newest)]
        slot = free[0] if free else len(self.staging)
        assert not any(one.serves(slot) for one in self.readers), "overwritten while it serves"
        self.staging[slot : slot + 1] = [version]
        sequence = np.arange(5, dtype=np.int32)
        probe = Probe(sequences=[sequence], logprobs=[np.full(4, version, np.float32)], is_compared_N=np.ones(4, bool))
        return 0.0, Published(version=version, addresses={"": slot}, probe=probe)  # type: ignore[dict-item]

    def do_outsized(self) -> tuple[float, Any]:
        return 0.0, self.damage

    def do_save(self, state: dict[str, Any]) -> tuple[float, Any]:
        """Answered later, beside other calls."""
        self._written = self.version, json.dumps(state)
        return 0.0, self._later(self.write_s)

    def do_commit(self) -> tuple[float, Any]:
        if len(self.saved) >= self.disk_size:
            raise RemoteError("trainer", "commit", "Traceback") from OSError(errno.ENOSPC, "No space left on device")
        self.saved.append(self._written)
        self.weights[self._written[0]] = self.learnt[: self._written[0]]
        return 0.0, "somewhere"

    def do_restore(self, newest: int) -> tuple[float, Any]:
        left = self.weights | (self.mirror or {})
        self.version = max((step for step in left if step <= newest), default=0)
        self.learnt = list(left.get(self.version, []))
        return 0.0, self.version


@dataclass(eq=False, repr=False)
class Reward(Ledgered):
    """Judges responses one by one."""

    judge: Callable[[Rollout], RewardResult] = lambda rollout: RIGHT if rollout.index else WRONG
    score_s: float = 0.05

    def do_score(self, groups: list[tuple[Prompt, list[Rollout]]]) -> tuple[float, Any]:
        return self.score_s, [
            [ScoredResponse(response="r", result=self.judge(rollout)) for rollout in rollouts] for _, rollouts in groups
        ]


PIECES = 4
"""Microbatches of a critic's step."""


@dataclass(eq=False, repr=False)
class Model(Ledgered):
    """A reference, critic or reward model; `says` is its answer about one rollout."""

    says: Callable[[Rollout], Any]
    learn_s: float = 0.1
    learning: list[tuple[float, list[int], list[RolloutGroup]]] = field(default_factory=list)
    """(begin of each step, its groups' ids, its groups)."""
    learnt: list[tuple[float, list[int]]] = field(default_factory=list)
    """(end of each step, its groups' ids)."""
    saved: list[int] = field(default_factory=list)
    taught: list[list[int]] = field(default_factory=list)
    """Group ids of each step: its weights."""
    weights: dict[int, list[list[int]]] = field(default_factory=dict)
    """`taught` of each checkpoint."""
    first: int | None = 0
    """Step that it was resumed at; None: some other."""
    skips: int = 0
    """Step that is not finite."""

    def start(self, name: str) -> Self:
        super().start(name)
        self._pieces = list[tuple[int, list[int], int]]()  # steps under way: number, groups' ids, microbatches left
        self._results = dict[int, StepResult]()
        self._given = dict[int, RolloutGroup]()
        return self

    def another(self) -> Self:
        """A new one; its disk and what it was asked are there."""
        return replace(self, learning=[], taught=[])

    @property
    def asked(self) -> list[int]:
        """Groups that it was asked about."""
        return [rollouts[0].group_id for one in self.calls("score") for _, rollouts in one.args[0]]

    def do_score(self, groups: list[tuple[Prompt, list[Rollout]]]) -> tuple[float, Any]:
        return 0.01, [[self.says(rollout) for rollout in rollouts] for _, rollouts in groups]

    def do_add_groups(self, groups: list[RolloutGroup]) -> tuple[float, Any]:
        self._given.update((group.group_id, group) for group in groups)
        return 0.0, None

    def do_restore(self, newest: int) -> tuple[float, Any]:
        step = max((step for step in self.weights if step <= newest), default=0)
        self.taught = list(self.weights.get(step, []))
        return 0.0, step

    def do_learn(self, step: int, group_ids: list[int]) -> tuple[float, Any]:
        groups = [self._given.pop(group_id) for group_id in group_ids]
        self.learning.append((self._loop.time(), group_ids, groups))
        self._pieces.append((step, group_ids, PIECES))
        return 0.0, None

    def do_learn_on(self, step: int) -> tuple[float, Any]:
        seconds = 0.0 if step in self._results else self._advance()
        return seconds, self._results.pop(step, None)

    def _advance(self) -> float:
        """Learns one microbatch; its seconds."""
        first, group_ids, left = self._pieces[0]
        self._pieces[0] = first, group_ids, left - 1
        if left == 1:
            self._pieces.pop(0)
            self.taught.append(list(group_ids))
            self.learnt.append((self._loop.time() + self.learn_s / PIECES, group_ids))
            self._results[first] = StepResult(
                policy_version=first, skipped=first == self.skips, cause="nan",
                metrics={"value_loss": float(len(self.learnt))},
            )  # fmt: skip
        return self.learn_s / PIECES

    def do_save(self, step: int) -> tuple[float, Any]:
        seconds = 0.0
        while self._pieces:
            seconds += self._advance()
        assert self.first is None or len(self.taught) + self.first == step, "trainer and critic take the same steps"
        self.saved.append(step)
        self._copied = step, list(self.taught)
        return seconds, None

    def do_commit(self) -> tuple[float, Any]:
        step, taught = self._copied
        self.weights[step] = taught
        return 0.0, "somewhere"


def values(rollout: Rollout) -> np.ndarray:
    return np.full(rollout.num_tokens, rollout.group_id + 0.25, np.float32)


def logprobs(rollout: Rollout) -> np.ndarray:
    return np.full(rollout.num_tokens, -rollout.index - 0.5, np.float32)
