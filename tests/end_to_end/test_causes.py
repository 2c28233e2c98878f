"""Mismatch by cause, in runs in which one cause acts, several, or none."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

import pytest

from llamarl.kernels import linear
from tests.end_to_end.tiny import llamarl_here, rows, write_toml
from tests.nightly import nightly

INLINE = ("--cluster.kind", "inline", "--steps", 4, "--eval.every_steps", 0, "--trainer.learning_rate", 3e-3)
REWARD = ("--reward.parts", "[{name = 'tests.executors.rewards:EvenLength'}]", "--rollout.temperature", 0.7)
SYNCHRONOUS = ("--rollout.max_staleness", 0, "--rollout.window", 1)
CAUSES = {"staleness", "quantization", "kernels", "truncation"}
NONE = 1e-6


def by_cause(tmp_path: Path, model: Path, *options: object) -> tuple[dict[str, float], dict[str, float], int]:
    """Parts of the KL and of the ratio, and the step that has them."""
    output = tmp_path / "runs"
    done = llamarl_here("train", write_toml(tmp_path, model), "--output", output, *INLINE, *REWARD, *options)
    assert done.returncode == 0, done.stderr
    (row,) = [row for row in rows(output / "tiny" / "metrics.jsonl") if "extra.kl_from_staleness" in row]
    assert row["extra.causes_s"] > 0
    kl, ratio = (
        {name.removeprefix(start): value for name, value in row.items() if name.startswith(start)}
        for start in ("extra.kl_from_", "extra.ratio_from_")
    )
    assert set(kl) == set(ratio) == CAUSES
    return kl, ratio, row["step"]


def check(found: tuple[dict[str, float], dict[str, float], int], causes: set[str]) -> None:
    kl, ratio, step = found
    assert step == (6 if "staleness" in causes else 4)
    for cause in CAUSES - causes:
        assert abs(ratio[cause]) < NONE and abs(kl[cause]) < NONE
    for cause in causes:
        assert min(abs(ratio[cause]), abs(kl[cause])) > NONE
        assert kl[cause] > 0 or len(causes) > 1, "a part below 0 makes up for another"


@pytest.mark.parametrize("cut", [("top_p", 0.6), ("top_k", 5), ("min_p", 0.2)])
def test_truncation_is_corrected(tmp_path: Path, model: Path, cut: tuple[str, float]) -> None:
    """Steps count among the tokens that the sampler drew from: their ratio is 1, and no cause is left."""
    found = by_cause(tmp_path, model, *SYNCHRONOUS, f"--rollout.{cut[0]}", cut[1])
    check(found, set())
    steps = [row for row in rows(tmp_path / "runs" / "tiny" / "metrics.jsonl") if row["kind"] == "step"]
    learnt = [row for row in steps if row["importance_ratio_mean"] is not None]
    assert len(steps) == 4 and learnt
    for row in learnt:
        assert row["importance_ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert row["importance_ratio_max"] == pytest.approx(1, abs=1e-3) and row["kl_to_behavior"] < 1e-7


def test_quantization_alone(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator's arithmetic is exact, its weights are not."""
    monkeypatch.setattr(linear, "_EXACT", ContextVar("always", default=True))
    check(by_cause(tmp_path, model, *SYNCHRONOUS, "--generator.dtype", "int8"), {"quantization"})


def test_staleness_alone(tmp_path: Path, model: Path) -> None:
    """Rollouts of two steps before: version 4 is asked again at version 6."""
    check(by_cause(tmp_path, model, "--steps", 6, "--rollout.max_staleness", 2), {"staleness"})


@nightly("more runs of a kind")
@pytest.mark.parametrize(
    ("options", "causes"),
    [
        ((), set()),
        (("--trainer.dtype", "bfloat16"), {"kernels"}),
        (("--generator.dtype", "int8", "--trainer.dtype", "bfloat16"), {"quantization", "kernels"}),
        (("--generator.dtype", "int8", "--rollout.min_p", 0.2), {"quantization", "kernels", "truncation"}),
    ],
)
def test_others(tmp_path: Path, model: Path, options: tuple[object, ...], causes: set[str]) -> None:
    kl, ratio, step = by_cause(tmp_path, model, *SYNCHRONOUS, *options)
    if "int8" in options:  # how much kernels round, the processor decides
        causes, kl["kernels"], ratio["kernels"] = causes - {"kernels"}, 0.0, 0.0
    check((kl, ratio, step), causes)


def test_a_run_that_is_not_probed_says_nothing_of_it(tmp_path: Path, model: Path) -> None:
    output, steps = tmp_path / "runs", ("--weight_sync.probe_every_steps", 0)
    done = llamarl_here(
        "train", write_toml(tmp_path, model), "--output", output, *INLINE, *REWARD, *SYNCHRONOUS, *steps
    )
    assert done.returncode == 0, done.stderr
    assert not any(
        "_from_" in name or "causes" in name for row in rows(output / "tiny" / "metrics.jsonl") for name in row
    )
