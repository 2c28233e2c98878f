"""Mathematics with the answer in a box."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.rewards._base import Reward, invalid, right, wrong
from llamarl.rewards._math_text import quick_verdict, tidy
from llamarl.rewards._text import after_hashes, last_box
from llamarl.sandbox.pool import Failure, Limits, WorkerPool
from llamarl.sandbox.pool_server import FailureKind
from llamarl.types import RewardItem, RewardResult

MAX_GOLD_CHARS = 4096
"""Longest gold answer: turning digits into numbers takes time quadratic in their count."""
_CACHE_SIZE = 16384
_WARM_UP = [(r"\frac{\sqrt{2}}{2}", [r"\frac{1}{\sqrt{2}}"]), ("(1,2)", ["(1,3)"]), ("x^2+1", ["1+x^2"])]
_REASONS = {
    "different": "not equal to the answer",
    "no answer": "not a mathematical expression",
}

Key = tuple[str, str]


@dataclass
class Math(Reward):
    r"""Right if the last closed `\boxed{...}` (without one: the text behind the last `####`) equals the answer.

    Text and plain numbers are compared here, everything else by math-verify in worker processes with limits. An answer
    that exceeds CPU time or memory is WRONG, like one that is not an expression or would only fool the grader. If other
    limits or the data's answer are at fault, the result is INVALID.
    """

    correct: float = 1.0
    """Reward of a right answer."""
    wrong: float = 0.0
    """Reward of a wrong or missing answer."""
    workers: int = 2
    """Grader processes."""
    cpu_s: int = 1
    """CPU seconds for one comparison. Ordinary ones take milliseconds."""
    wall_s: float = 30.0
    """Seconds for one comparison. Generous, because a busy machine is not the policy's fault."""
    batch_s: float = 60.0
    """Seconds for one call of `score`. Responses that are not compared by then are INVALID."""
    recycle_after: int = 500
    """Comparisons after which a worker is replaced, which bounds leaks."""

    def __post_init__(self) -> None:
        self._pool = WorkerPool(
            "llamarl.rewards._math_worker:compare",
            Limits(num_workers=self.workers, cpu_s=self.cpu_s, wall_s=self.wall_s, recycle_after=self.recycle_after),
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
                if gold is None:  # the data have the plain answer
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
        """Returns a result, or else the pieces that a worker must compare with the gold (none if the cache has the
        result)."""
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
        """Grades each distinct pair once."""
        graded = {}
        answers = self._pool.map([(gold, pieces) for (gold, _), pieces in jobs.items()], self.batch_s)
        heavy = [gold for (gold, _), answer in zip(jobs, answers, strict=True) if _is_heavy(answer)]
        alone = dict(zip(heavy, self._pool.map([(gold, (gold,)) for gold in heavy], self.batch_s), strict=True))
        for key, answer in zip(jobs, answers, strict=True):
            is_own_fault = _is_heavy(answer) and not isinstance(alone[key[0]], Failure)
            graded[key] = wrong(self.wrong, "more than a grader can compute") if is_own_fault else self._result(answer)
            # A comparison that exceeds its CPU time would do so again. Other failures may be the machine's.
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
    """Returns whether a limit ended the comparison, or it ran out of memory. The author of such an answer must not gain
    by it."""
    return isinstance(answer, Failure) and answer.kind in (FailureKind.CPU, FailureKind.ERROR)


def _final(text: str) -> str | None:
    """Returns the tidy answer at the end of a solution, or None without a box and without `####`."""
    answer = last_box(text)
    if answer is None:
        answer = after_hashes(text)
    return None if answer is None else tidy(answer)
