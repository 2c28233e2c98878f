"""What microbatches add up to."""

from __future__ import annotations

import torch

from llamarl.training.totals import Totals


def test_counts_that_float32_does_not_have_stay_exact() -> None:
    """They are read together with numbers in float32."""
    totals, count = Totals(), (1 << 24) + 1
    for loss in (1.0, 0.25):
        totals.add({"loss": torch.tensor(loss), "tokens": torch.tensor(count)}, {"length": torch.tensor(count)})
    logged, losses = totals.read()
    assert logged.sums == {"loss": 1.25, "tokens": 2.0 * count} and losses == [1.0, 0.25]
    assert logged.maxima == {"length": float(count)}
