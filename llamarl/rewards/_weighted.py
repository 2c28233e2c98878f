"""Several rewards as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from llamarl.config import ConfigError
from llamarl.rewards._base import Reward, absent, invalid, written
from llamarl.types import Outcome, RewardItem, RewardResult


@dataclass
class WeightedSum(Reward):
    """The weighted sum of its parts: INVALID if any part is, WRONG if all are, otherwise a score.

    A part that returns None, or an absent result, has no opinion about a row and is ignored. The first part with an
    opinion decides whether the response is right. A row without any opinion is INVALID.
    """

    parts: list[Reward]
    weights: list[float]
    """One finite number per part."""
    names: list[str] = field(default_factory=list)
    """Names of the parts' curves. The default is the names of their classes."""

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.weights):
            raise ConfigError(
                f"reward.weights has {len(self.weights)} numbers for {len(self.parts)} parts; give one each"
            )
        names = self.names or [type(part).__name__ for part in self.parts]
        self.names = [f"{name}-{n}" if (n := names[:i].count(name)) else name for i, name in enumerate(names)]
        if not all(map(math.isfinite, self.weights)):
            raise ConfigError(f"reward.weights = {self.weights} must be finite numbers")

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        no_opinion = absent("no opinion")
        columns = [[no_opinion if result is None else result for result in part.score(items)] for part in self.parts]
        return [weighted_sum(self.names, self.weights, results) for results in zip(*columns, strict=True)]

    @property
    def asks_others(self) -> bool:
        return any(getattr(part, "asks_others", False) for part in self.parts)

    def written(self, answer: str) -> str | None:
        return written(self.parts[0], answer)

    def close(self) -> None:
        with ExitStack() as stack:  # closes every part, even if one of them raises
            for part in self.parts:
                stack.callback(part.close)


def weighted_sum(names: Sequence[str], weights: Sequence[float], results: Sequence[RewardResult]) -> RewardResult:
    """Returns one result from the parts' results for one response, without absent ones. If the first part is a sum, its
    first part decides whether the response is right."""
    triples = zip(names, weights, results, strict=True)
    present = [(name, weight, result) for name, weight, result in triples if not result.is_absent]
    if not present:
        return absent("; ".join(f"{name}: {result.reason}" for name, result in zip(names, results, strict=True)))
    names, weights, results = zip(*present, strict=True)
    reasons = [f"{name}: {result.reason}" for name, result in zip(names, results, strict=True) if result.reason]
    outcomes = [result.outcome for result in results]
    if Outcome.INVALID in outcomes:
        broken = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.INVALID]
        return invalid("; ".join(reasons) or f"{broken[0]}: invalid")
    value = sum(weight * result.value for weight, result in zip(weights, results, strict=True))
    all_wrong = all(outcome is Outcome.WRONG for outcome in outcomes)
    return RewardResult(
        outcome=Outcome.WRONG if all_wrong else Outcome.SCORE,
        value=float(value),
        reason="; ".join(reasons),
        first_part=results[0].first_part or results[0],
        parts={**results[0].parts}
        | {name: result.value for name, result in zip(names, results, strict=True) if not result.parts},
    )
