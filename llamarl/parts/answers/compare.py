"""Compares two models on the same held-out problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.controller.evaluation import EvalResult, judged
from llamarl.observability.metrics import ERRORS_95, Row, finite, plain
from llamarl.types import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Accuracy of one model minus the accuracy of another on the same problems."""

    name: str | None
    """Name of the set."""
    points: float
    """Mean difference over problems, -1 to 1. NaN means that no problem has a verdict for both."""
    low: float
    """Lower end of the 95 % interval."""
    high: float
    """Upper end of the interval."""
    num_prompts: int
    """Problems with a verdict for both models."""

    def __str__(self) -> str:
        of_set = f"{plain(self.name)}: " if self.name else ""
        if not self.num_prompts:
            return f"{of_set}no problem has a verdict of both"
        low, high, found = (f"{100 * one:+.1f}" for one in (self.low, self.high, self.points))
        is_within = "so they may be equal" if self.low <= 0 <= self.high else "so they differ"
        on = f"on {self.num_prompts:,} problems"
        return f"{of_set}{found} points (95%: {low} to {high}) {on}, {is_within}"

    def to_json(self) -> Row:
        """Returns flat JSON, next to the metrics of an evaluation."""
        found = {"difference": self.points, "difference_low": self.low, "difference_high": self.high}
        return {name: finite(value) for name, value in found.items()}


def compared(results: Sequence[EvalResult], others: Sequence[EvalResult]) -> list[PairedDifference]:
    """Returns the differences of two models, set by set."""
    differences = []
    for one, other in zip(results, others, strict=True):
        theirs = {group.prompt.prompt_id: _share(group) for group in other.groups}  # each model may skip prompts
        pairs = [(_share(group), theirs.get(group.prompt.prompt_id)) for group in one.groups]
        known = [(mine, of_other) for mine, of_other in pairs if mine is not None and of_other is not None]
        points, low, high = paired_difference([mine for mine, _ in known], [of_other for _, of_other in known])
        differences.append(
            PairedDifference(name=one.metrics.name, points=points, low=low, high=high, num_prompts=len(known))
        )
    return differences


def paired_difference(after: Sequence[float], before: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean difference of paired shares and its 95 % interval. NaN means that there are no pairs.

    Pairing cancels the difficulty of a problem. The spread includes two imaginary pairs with differences of 1 and -1,
    after Bonett and Price, J. Educ. Behav. Stat. 37 (2012), so that the interval has a width even if no pair differs.
    """
    num = len(after)
    if not num:
        return math.nan, math.nan, math.nan
    apart = [one - other for one, other in zip(after, before, strict=True)]
    center = sum(apart) / (num + 2)
    spread = (sum(one**2 for one in apart) + 2) / (num + 2) - center**2
    half = ERRORS_95 * math.sqrt(max(spread, 0.0) / (num + 2))
    return sum(apart) / num, max(center - half, -1.0), min(center + half, 1.0)


def _share(group: RolloutGroup) -> float | None:
    """Returns the share of right responses with a verdict. None means that no response has one."""
    num_right, num_judged = judged(group)
    return num_right / num_judged if num_judged else None
