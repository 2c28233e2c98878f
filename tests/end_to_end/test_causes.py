"""Mismatch by cause, in runs in which one cause acts, several, or none."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.kernels import linear
from tests.end_to_end.tiny import llamarl_here, rows, write_toml
from tests.nightly import nightly, some

INLINE = ("--cluster.kind", "inline", "--steps", 4, "--eval.every_steps", 0, "--trainer.learning_rate", 3e-3)
REWARD = ("--reward.parts", "[{name = 'tests.executors.rewards:EvenLength'}]", "--rollout.temperature", 0.7)
SYNCHRONOUS = ("--rollout.max_staleness", 0, "--rollout.window", 1)
CAUSES = {"staleness", "rounding", "quantization", "kernels", "truncation", "kept", "cache"}
NONE = 1e-6


def steps_of(tmp_path: Path, model: Path, *options: object) -> list[dict[str, Any]]:
    output = tmp_path / "runs"
    done = llamarl_here("train", write_toml(tmp_path, model), "--output", output, *INLINE, *REWARD, *options)
    assert done.returncode == 0, done.stderr
    return [row for row in rows(output / "tiny" / "metrics.jsonl") if row["kind"] == "step"]


def by_cause(steps: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Parts of KL, ratio and mismatch, which the fourth step tells."""
    (row,) = [row for row in steps if "extra.kl_from_staleness" in row]
    assert row["step"] == 4 and row["extra.causes_s"] > 0
    starts = {what: f"extra.{what}_from_" for what in ("kl", "ratio", "mismatch")}
    found = {
        what: {name.removeprefix(start): value for name, value in row.items() if name.startswith(start)}
        for what, start in starts.items()
    }
    assert set(found["kl"]) == set(found["ratio"]) == set(found["mismatch"]) | {"staleness"} == CAUSES
    return found


def check(found: dict[str, dict[str, float]], causes: set[str]) -> None:
    kl, ratio = found["kl"], found["ratio"]
    for cause in CAUSES - causes:
        assert abs(ratio[cause]) < NONE and abs(kl[cause]) < NONE, cause
    for cause in causes:
        assert max(abs(ratio[cause]), abs(kl[cause])) > NONE, cause
        assert kl[cause] > 0 or len(causes) > 1, "a part below 0 makes up for another"
    mismatch = sum(found["mismatch"].values())
    assert (mismatch > 1e-4) == bool(causes - {"staleness"})


@pytest.mark.parametrize("cut", some([("top_p", 0.6), ("top_k", 5), ("min_p", 0.2)], 1))
def test_truncation_is_corrected(tmp_path: Path, model: Path, cut: tuple[str, float]) -> None:
    """Steps count among the tokens that the sampler drew from: their ratio is 1, and no cause is left."""
    steps = steps_of(tmp_path, model, *SYNCHRONOUS, f"--rollout.{cut[0]}", cut[1])
    check(by_cause(steps), set())
    learnt = [row for row in steps if row["importance_ratio_mean"] is not None]
    assert len(steps) == 4 and learnt
    for row in learnt:
        assert row["importance_ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert row["importance_ratio_max"] == pytest.approx(1, abs=1e-3) and row["kl_to_behavior"] < 1e-7


@nightly("runs of their own; by day causes are told apart in tests/observability and executors")
def test_quantization_alone(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator's arithmetic is exact, its weights are not, nor are keys and values, which bfloat16 keeps. The sum
    of the parts is what the step's own log-probabilities say."""
    monkeypatch.setattr(linear, "_EXACT", ContextVar("always", default=True))
    steps = steps_of(tmp_path, model, *SYNCHRONOUS, "--generator.dtype", "int8")
    check(found := by_cause(steps), {"quantization", "cache"})
    of_step = [row for row in rows(tmp_path / "runs" / "tiny" / "rollouts.jsonl") if row["step"] == 4]
    first = [row for row in of_step if row["index"] == 0]
    assert len(first) == 2 and all("trainer_logprobs" in row for row in first), "one of them teaches nothing"
    log_ratio_N = np.concatenate([np.subtract(row["trainer_logprobs"], row["behavior_logprobs"]) for row in first])
    assert sum(found["mismatch"].values()) == pytest.approx(np.abs(log_ratio_N).mean(), rel=1e-2)
    assert sum(found["ratio"].values()) == pytest.approx(np.expm1(log_ratio_N).mean(), rel=1e-2)
    assert all(row["extra.difference_same_version"] > 1e-3 and row["extra.stale_share"] == 0 for row in steps)


def test_staleness_alone(tmp_path: Path, model: Path) -> None:
    """Of rollouts that older versions began: one that goes on under newer weights reads what those computed."""
    again = ("--generator.kv_on_update", "recompute")
    check(by_cause(steps_of(tmp_path, model, "--rollout.max_staleness", 2, *again)), {"staleness"})


@nightly("more runs of a kind")
@pytest.mark.parametrize(
    ("options", "causes"),
    [
        ((), set()),
        (("--trainer.dtype", "bfloat16"), {"kernels"}),
        (("--generator.dtype", "int8", "--trainer.dtype", "bfloat16"), {"quantization", "kernels", "cache"}),
        (("--generator.dtype", "bfloat16"), {"quantization", "kernels", "cache"}),
        (("--cluster.placement", "colocated"), set()),
    ],
)
def test_others(tmp_path: Path, model: Path, options: tuple[object, ...], causes: set[str]) -> None:
    found = by_cause(steps_of(tmp_path, model, *SYNCHRONOUS, *options))
    if "generator.dtype" in str(options):  # how much kernels round, the processor decides
        causes = causes - {"kernels"}
        for of in found.values():
            of["kernels"] = 0.0
    check(found, causes)


def test_a_run_that_is_not_probed_says_nothing_of_it(tmp_path: Path, model: Path) -> None:
    steps = steps_of(tmp_path, model, *SYNCHRONOUS, "--weight_sync.probe_every_steps", 0)
    assert not any("_from_" in name or "causes" in name for row in steps for name in row)
