"""Two models on the same held-out problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.controller.evaluation import EvalResult, judged
from llamarl.observability.metrics import ERRORS_95, Row, finite, plain
from llamarl.types import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Accuracy of one model less that of another, on the same problems."""

    name: str | None
    """Name of the set."""
    points: float
    """Mean difference over problems, -1 to 1; NaN: there is no problem that both judged."""
    low: float
    """Lower end of its interval of 95 %."""
    high: float
    """Upper end of it."""
    num_prompts: int
    """Problems with a judged response of each."""

    def __str__(self) -> str:
        of_set = f"{plain(self.name)}: " if self.name else ""
        if not self.num_prompts:
            return f"{of_set}no problem has a verdict of both"
        low, high, found = (f"{100 * one:+.1f}" for one in (self.low, self.high, self.points))
        is_within = "so they may be equal" if self.low <= 0 <= self.high else "so they differ"
        on = f"on {self.num_prompts:,} problems"
        return f"{of_set}{found} points (95%: {low} to {high}) {on}, {is_within}"

    def to_json(self) -> Row:
        """Flat JSON, to stand beside the metrics of an evaluation."""
        found = {"difference": self.points, "difference_low": self.low, "difference_high": self.high}
        return {name: finite(value) for name, value in found.items()}


def compared(results: Sequence[EvalResult], others: Sequence[EvalResult]) -> list[PairedDifference]:
    """Differences of two models on the same sets of problems, set by set."""
    differences = []
    for one, other in zip(results, others, strict=True):
        theirs = {group.prompt.prompt_id: _share(group) for group in other.groups}  # each may skip prompts of its own
        pairs = [(_share(group), theirs.get(group.prompt.prompt_id)) for group in one.groups]
        known = [(mine, of_other) for mine, of_other in pairs if mine is not None and of_other is not None]
        points, low, high = paired_difference([mine for mine, _ in known], [of_other for _, of_other in known])
        differences.append(
            PairedDifference(name=one.metrics.name, points=points, low=low, high=high, num_prompts=len(known))
        )
    return differences


def paired_difference(after: Sequence[float], before: Sequence[float]) -> tuple[float, float, float]:
    """Mean difference of shares on the same problems, with its interval of 95 %; NaN where there are none.

    What both find hard cancels. Two pairs that differ by all, one each way, are counted with the spread, after Bonett
    and Price, J. Educ. Behav. Stat. 37 (2012), whose interval this is for one sample each: it has a width where nothing
    differs.
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
    """Share of right responses among those that were judged; None: none was."""
    num_right, num_judged = judged(group)
    return num_right / num_judged if num_judged else None
