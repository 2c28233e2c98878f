"""A policy that training has ruined, beside a sync that works."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamarl.executors.replies import Published
from llamarl.training.result import NonFiniteStep
from tests.controller.fakes import Run, config
from tests.executors.ledger import Generator


@pytest.mark.parametrize("damage", ["", "model.norm.weight holds 1.7e+37, as of damaged memory"])
@pytest.mark.parametrize("size", [math.nan, -math.inf, -1e30])
def test_a_policy_that_has_diverged_is_no_fault_of_the_sync(tmp_path: Path, size: float, damage: str) -> None:
    """As by a learning rate of 1e300, or one bit of the trainer's memory: the generator serves the very same."""
    run = Run(config(tmp_path), tmp_path, [Generator(bias=math.nan)])
    publish = run.trainer.do_publish

    def diverged(version: int, in_use: tuple[int, ...]) -> tuple[float, Published]:
        seconds, published = publish(version, in_use)
        logprobs = [np.full_like(logprobs_T, size) for logprobs_T in published.probe.logprobs]
        return seconds, replace(published, probe=replace(published.probe, logprobs=logprobs))

    run.trainer.do_publish, run.trainer.damage = diverged, damage
    with pytest.raises(NonFiniteStep, match=r"training has diverged: after step 0 .* nats on average; (.*)") as failed:
        run.train()
    assert ("lower trainer.learning_rate" in str(failed.value)) == (not damage) and damage in str(failed.value)
