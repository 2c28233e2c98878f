"""Small simulated runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import RunConfig
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.result import Simulation
from llamarl.parts.forecast.simulator.run import simulate
from llamarl.parts.forecast.simulator.split import Split

Simulate = Callable[..., Simulation]


def run_config(*, steps: int = 6, cluster: dict[str, Any] | None = None, seed: int = 0, **rollout: Any) -> RunConfig:
    """A run that no file describes."""
    return RunConfig.model_validate(
        {
            "steps": steps,
            "seed": seed,
            "model": {"path": "none"},
            "data": {"train": {"name": "none"}},
            "rollout": {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 1000} | rollout,
            "checkpoint": {"every_steps": 0},
            "cluster": {"timeout_s": 1e5} | (cluster or {}),
        }
    )


@pytest.fixture
def simulated(tmp_path: Path) -> Simulate:
    """Runs `config` on `replicas` generators of one GPU and a trainer of one GPU."""

    def run(
        config: RunConfig, *, replicas: int = 2, costs: Costs | None = None, faults: Faults | None = None
    ) -> Simulation:
        split = Split(trainer_gpus=1, replicas=replicas, generator_gpus=1)
        metrics = tmp_path / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        return simulate(config, costs or Costs(), faults or Faults(), split, metrics)

    return run
