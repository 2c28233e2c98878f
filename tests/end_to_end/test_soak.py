"""A long run holds no more memory, descriptors and threads than a short one; `benchmarks/soak` takes more steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.tiny import llamarl, rows
from tests.nightly import nightly

STEPS = 1000
BOUNDS = {"rss_bytes": 1e6, "descriptors": 0.5, "threads": 0.5}
"""Per 100 steps, after the first half, which fills caches; Monarch keeps about 1 KB of each call."""


@nightly("a thousand steps")
def test_a_thousand_steps_take_no_more_than_ten(tmp_path: Path, toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("LLAMARL_MEMORY", str(memory))
    done = llamarl("train", toml, "--output", tmp_path, "--steps", STEPS, "--eval.every_steps", 0)
    assert done.returncode == 0, done.stderr
    assert not list(memory.iterdir())
    steps = [row for row in rows(tmp_path / "tiny" / "metrics.jsonl") if row["kind"] == "step"]
    assert len(steps) == STEPS
    for kind, bound in BOUNDS.items():
        names = [name for name in steps[-1] if name.startswith(f"extra.{kind}.")]
        assert len(names) >= 4, "controller, generator, reward and trainer"
        for name in names:
            values = np.array([row[name] for row in steps[STEPS // 2 :]], float)
            slope, _ = np.polyfit(np.arange(len(values)), values, 1)
            assert 100 * slope < bound, f"{name} grows by {100 * slope:.3g} per 100 steps"
