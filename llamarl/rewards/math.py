"""Mathematics with the answer in a box."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.rewards._base import Reward, invalid, right, wrong
from llamarl.rewards._math_text import quick_verdict, tidy
from llamarl.rewards._text import after_hashes, last_box
from llamarl.sandbox.pool import Failure, WorkerPool
from llamarl.sandbox.pool_server import FailureKind
from llamarl.types import RewardItem, RewardResult

MAX_GOLD_CHARS = 4096
"""Turning digits into numbers takes the square of their count."""
_CACHE_SIZE = 16384
_WARM_UP = [(r"\frac{\sqrt{2}}{2}", [r"\frac{1}{\sqrt{2}}"]), ("(1,2)", ["(1,3)"]), ("x^2+1", ["1+x^2"])]
_REASONS = {
    "different": "not equal to the answer",
    "no answer": "not a mathematical expression",
}

Key = tuple[str, str]


@dataclass
class Math(Reward):
    r"""Right when the last closed `\boxed{...}` (without one: what follows the last `####`) equals the answer.

    Text and plain numbers are compared here; the rest by math-verify in worker processes with limits. An answer that
    uses up its CPU time or memory is WRONG, as is what is no answer or would only fool the grader; what other limits
    end, or the data's own answer, is INVALID.
    """

    correct: float = 1.0
    """Reward of a right answer."""
    wrong: float = 0.0
    """Reward of a wrong or missing answer."""
    workers: int = 2
    """Grader processes."""
    cpu_s: int = 1
    """CPU seconds for one comparison; honest ones take milliseconds."""
    wall_s: float = 30.0
    """Seconds for one comparison; generous, as a busy machine is not the policy's fault."""
    batch_s: float = 60.0
    """Seconds for one call of `score`; what is not compared by then is INVALID."""
    recycle_after: int = 500
    """Comparisons after which a worker is replaced, which bounds leaks."""

    def __post_init__(self) -> None:
        self._pool = WorkerPool(
            "llamarl.rewards._math_worker:compare",
            num_workers=self.workers,
            cpu_s=self.cpu_s,
            wall_s=self.wall_s,
            recycle_after=self.recycle_after,
            warm_up=_WARM_UP,
        )
        self._cache: OrderedDict[Key, RewardResult] = OrderedDict()
        self._lock = threading.Lock()

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        with self._lock:
            results: list[RewardResult | None] = []
            keys: list[Key] = []
            jobs: dict[Key, tuple[str, ...]] = {}
            for item in items:
                gold, answer = _final(item.answer), _final(item.response)
                if gold is None:  # the data hold the bare answer
                    gold = tidy(item.answer)
                result, pieces = self._quick(gold, answer)
                results.append(result)
                keys.append((gold, answer or ""))
                if pieces:
                    jobs[keys[-1]] = pieces
            graded = self._grade(jobs)
        return [result or graded[key] for result, key in zip(results, keys, strict=True)]

    def written(self, answer: str) -> str:
        return answer if _final(answer) is not None else rf"\boxed{{{answer}}}"

    def close(self) -> None:
        self._pool.close()

    def _quick(self, gold: str, answer: str | None) -> tuple[RewardResult | None, tuple[str, ...]]:
        """A result, or else what a worker must compare with the gold (nothing when the cache knows)."""
        if not gold:
            return invalid("the data has no answer"), ()
        if len(gold) > MAX_GOLD_CHARS:
            return invalid(f"the data's answer has {len(gold):,} characters, {MAX_GOLD_CHARS:,} at most are read"), ()
        if not answer:
            return wrong(self.wrong, r"no \boxed{} and no #### line" if answer is None else "an empty answer"), ()
        if (gold, answer) in self._cache:
            self._cache.move_to_end((gold, answer))
            return self._cache[gold, answer], ()
        verdict = quick_verdict(gold, answer)
        if verdict.right is None:
            return None, verdict.pieces
        return right(self.correct) if verdict.right else wrong(self.wrong, verdict.reason), ()

    def _grade(self, jobs: dict[Key, tuple[str, ...]]) -> dict[Key, RewardResult]:
        """Each distinct pair once."""
        graded = {}
        answers = self._pool.map([(gold, pieces) for (gold, _), pieces in jobs.items()], self.batch_s)
        heavy = [gold for (gold, _), answer in zip(jobs, answers, strict=True) if _is_heavy(answer)]
        alone = dict(zip(heavy, self._pool.map([(gold, (gold,)) for gold in heavy], self.batch_s), strict=True))
        for key, answer in zip(jobs, answers, strict=True):
            is_own_fault = _is_heavy(answer) and not isinstance(alone[key[0]], Failure)
            graded[key] = wrong(self.wrong, "more than a grader can compute") if is_own_fault else self._result(answer)
            # A comparison over its CPU time will be so again; other failures may be the machine's.
            if not isinstance(answer, Failure) or answer.kind is FailureKind.CPU:
                self._cache[key] = graded[key]
        while len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return graded

    def _result(self, answer: str | Failure) -> RewardResult:
        if isinstance(answer, Failure):
            return invalid(answer.reason)
        if answer == "equal":
            return right(self.correct)
        if answer == "no gold":
            return invalid("the data's answer cannot be read by math-verify, and the response is not the same text")
        return wrong(self.wrong, _REASONS[answer])


def _is_heavy(answer: str | Failure) -> bool:
    """The comparison was ended by a limit, or ran out of memory: who wrote such a thing must gain nothing by it."""
    return isinstance(answer, Failure) and answer.kind in (FailureKind.CPU, FailureKind.ERROR)


def _final(text: str) -> str | None:
    """Answer that a solution ends with, tidy; None without a box and without `####`."""
    found = last_box(text)
    if found is None:
        found = after_hashes(text)
    return None if found is None else tidy(found)
