"""What was learnt from, as JSON lines; a full disk is said once and ends nothing."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest

from llamarl.observability.recorder import RolloutRecorder
from llamarl.observability.sinks import SinkFailure
from llamarl.types import Outcome


def test_a_row_holds_what_the_step_saw(make_group, tmp_path: Path) -> None:
    failures = list[SinkFailure]()
    recorder = RolloutRecorder(tmp_path / "rollouts.jsonl", failures.append)
    group = make_group(3, responses=[(4, 5, 6), ()], outcomes=[Outcome.SCORE, Outcome.INVALID])
    recorder.record(6, [group], {3: np.array([0.25, 0.0])})
    recorder.close()
    first, second = (json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert (first["step"], first["group_id"], first["index"]) == (6, 3, 0)
    assert first["token_ids"] == [4, 5, 6]
    assert first["policy_versions"] == [[3, 2], [4, 1]]
    assert first["staleness"] == 2, "step 6 begins at version 5; the oldest token is of version 3"
    assert (first["reward"], first["advantage"], first["outcome"]) == (0.0, 0.25, "score")
    np.testing.assert_allclose(first["behavior_logprobs"], group.rollouts[0].behavior_logprobs_T, rtol=1e-6)
    assert (second["outcome"], second["token_ids"], second["staleness"]) == ("invalid", [], 0)
    assert failures == []


def test_the_trainers_view_of_the_tokens(make_group, tmp_path: Path) -> None:
    """A column of rollouts that were computed; what is not finite is said, as JSON has no word for it."""
    recorder = RolloutRecorder(tmp_path / "rollouts.jsonl", lambda failure: None)
    group = make_group(3, responses=[(4, 5, 6), (7,)])
    logprobs = {3: {0: np.array([-0.1, float("nan"), -2.5], np.float32)}}
    recorder.record(
        6, [group], {3: np.array([0.25, 0.0])}, {"trainer_logprobs": logprobs, "advantages": {3: {1: np.array([0.5])}}}
    )
    recorder.close()
    first, second = (json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert first["trainer_logprobs"] == [pytest.approx(-0.1), None, -2.5]
    assert "trainer_logprobs" not in second
    assert "advantages" not in first
    assert second["advantages"] == [0.5]


def test_a_full_disk_is_said_once(make_group, tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk: both fail the write with an OSError."""
    failures = list[SinkFailure]()
    recorder = RolloutRecorder(tmp_path / "rollouts.jsonl", failures.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for step in range(20):
            recorder.record(step, [make_group(step)], {step: np.zeros(2)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(failures) == 1
    assert "rollouts.jsonl" in str(failures[0])
    for line in (tmp_path / "rollouts.jsonl").read_text().splitlines():
        json.loads(line)
