"""Answers to problems of reasoning-gym, by the verifiers of their families."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.rewards._base import Reward, invalid, right, wrong
from llamarl.rewards._text import after_hashes
from llamarl.sandbox.pool import Failure, Limits, WorkerPool
from llamarl.types import RewardItem, RewardResult

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


@dataclass
class ReasoningGym(Reward):
    """A reward by the verifier of the problem's family, 0 to 1.

    The answer is the last `<answer>...</answer>`, else the text behind the last `####`, else the whole response. It is
    right from `right_from` on. Rows come from the source `reasoning_gym`.
    """

    right_from: float = 1.0
    """Reward from which a response is right. Most verifiers return about 0.01 for a wrong answer in the right form."""
    workers: int = 2
    """Verifiers that run in parallel."""
    cpu_s: int = 5
    """CPU seconds of one verification."""
    memory_bytes: int = 1 << 31
    """Address space of one worker."""
    batch_s: float = 120.0
    """Seconds for one call of `score`. Responses that are not judged by then are INVALID."""

    def __post_init__(self) -> None:
        self._pool = WorkerPool(
            "llamarl.rewards._reasoning_gym:verify",
            Limits(num_workers=self.workers, cpu_s=self.cpu_s, memory_bytes=self.memory_bytes),
        )

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        jobs = [
            {**{name: item.metadata[name] for name in ("family", "entry")}, "answer": _answer(item.response)}
            if {"family", "entry"} <= item.metadata.keys()
            else None
            for item in items
        ]
        present = [job for job in jobs if job is not None]
        scores = iter(self._pool.map(present, self.batch_s) if present else ())
        return [
            self._result(next(scores)) if job else invalid("the row is none of the source `reasoning_gym`")
            for job in jobs
        ]  # fmt: skip

    def written(self, answer: str) -> str:
        return f"<answer>{answer}</answer>"

    def close(self) -> None:
        self._pool.close()

    def _result(self, score: float | Failure) -> RewardResult:
        if isinstance(score, Failure):
            return invalid(score.reason)
        return right(score) if score >= self.right_from else wrong(score, f"the verifier gives {score:g}")


def _answer(response: str) -> str:
    tagged = _TAGGED.findall(response)
    return (tagged[-1] if tagged else after_hashes(response) or response).strip().encode(errors="replace").decode()
