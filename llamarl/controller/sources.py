"""`SourceTallies`: what each source of a mixture gives to the steps, as metrics of a step and of all steps together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from llamarl.observability.metrics import SOURCES
from llamarl.training.packing import is_flat
from llamarl.types import FinishReason, Outcome, RolloutGroup


class SourceTallies:
    """Names of metrics are `source_NAME.LABEL`; without sources there are none."""

    def __init__(self, labels: Iterable[str], *, mask_truncated: bool) -> None:
        self._labels, self._mask_truncated = tuple(labels), mask_truncated
        self._sums, self._weights = Counter[str](), Counter[str]()
        """Sums over groups, and the number of these, by metric."""
        self._num_groups = dict.fromkeys(self._labels, 0)

    def step(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        """Metrics of the groups that a step takes at `version`, which count among all."""
        own = {label: [group for group in groups if group.prompt.source == label] for label in self._labels}
        found = dict[str, float]()
        for label, of in own.items():
            found[f"{SOURCES}share.{label}"] = len(of) / len(groups)
            for name, value in self._measured(of, version).items() if of else ():
                found[f"{SOURCES}{name}.{label}"] = value
                if np.isfinite(value):
                    self._sums[f"{SOURCES}{name}.{label}"] += value * len(of)  # type: ignore[assignment]
                    self._weights[f"{SOURCES}{name}.{label}"] += len(of)
            self._num_groups[label] += len(of)
        return found

    def totals(self) -> dict[str, float]:
        """The same of all steps so far: means over the groups of each source."""
        total = sum(self._num_groups.values())
        shares = {f"{SOURCES}share.{label}": num / total for label, num in self._num_groups.items() if total}
        return shares | {name: value / self._weights[name] for name, value in self._sums.items()}

    def _measured(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        results = [result for group in groups for result in group.results]
        judged = [result.value for result in results if result.outcome is not Outcome.INVALID]
        ages = [version - rollout.oldest_version for rollout in rollouts if rollout.num_tokens]
        return {
            "reward": float(np.mean(judged)) if judged else float("nan"),
            "right": sum(result.is_right for result in results) / len(judged) if judged else float("nan"),
            "invalid": 1 - len(judged) / len(results),
            "flat": float(np.mean([is_flat(group, mask_truncated=self._mask_truncated) for group in groups])),
            "tokens": float(np.mean([rollout.is_sampled_T.sum() for rollout in rollouts])),
            "truncated": float(np.mean([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts])),
            "staleness": float(np.mean(ages or [0])),
        }
