"""The check of a GPU, tried on the processor at toy size."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nightly import nightly

GPU = Path(__file__).parents[2] / "benchmarks/gpu"
sys.path.insert(0, str(GPU))

import check  # noqa: E402 - found by the line above


@nightly("it starts all parts of a check that is made for a machine with a GPU")
@pytest.mark.timeout(300)
def test_parts_can_be_run_alone(tmp_path: Path) -> None:
    parts = ["decode", "train", "sync"]
    command = [sys.executable, str(GPU / "check.py"), "--device", "cpu", "--output", str(tmp_path), "--parts", *parts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    (row,) = found["decode"]["rows"]
    assert row["tokens_per_s"] > 0 and 0 < row["bandwidth_share"] < 1
    assert 0 < found["train"]["toy"]["mfu"] < 1 and found["train"]["logprobs"]["time_ratio"] > 0
    for transport in ("shared_memory", "p2p", "nixl"):
        assert found["sync"][transport]["bytes_per_s"] > 0, found["sync"][transport]
    assert "not measured  CUDA graphs over eager (>= 1.3, estimated 2)" in found["bars"]
    assert any("published to served" in line and "<= 0.06" in line for line in done.stdout.splitlines())


def test_figures_stand_beside_their_bars() -> None:
    rows = [
        {"model": "8b", "dtype": dtype, "graphs": graphs, "batch": 64, "step_s": step_s, "bandwidth_share": 0.55}
        for dtype, graphs, step_s in (("bfloat16", False, 0.02), ("bfloat16", True, 0.01), ("fp8", True, 0.008))
    ]
    assert check.table({"decode": {"rows": rows}, "sync": {"nixl": {"failure": "no such device"}}}) == [
        "MISSED        decode 8B bf16, 64 rows, 1k tokens: share of bandwidth: 0.55 (>= 0.6, estimated 0.68)",
        "reached       CUDA graphs over eager: 2 (>= 1.3, estimated 2)",
        "MISSED        fp8 over bf16: 1.25 (>= 1.4, estimated 1.35)",
        "not measured  8B bf16 by nixl: fetched and proved, s (<= 0.06, estimated 0.02)",
        "not measured  published to served, s (<= 0.06, estimated 0.045)",
        "not measured  longest step while weights come, s (<= 0.05, estimated 0.015)",
    ]


def test_all_parts_have_their_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever those before them take, and more where they leave some."""
    limits = dict[str, float]()
    monkeypatch.setattr(check, "run_part", lambda part, options, limit_s, *_: limits.setdefault(part, limit_s) and {})
    monkeypatch.setattr(sys, "argv", ["check.py", "--device", "cpu", "--output", str(tmp_path)])
    assert check.main() == 0 and limits.keys() == check.LIMITS_S.keys() == check.BARS.keys()
    assert sum(check.LIMITS_S.values()) <= check.TOTAL_S == pytest.approx(limits["demo"], abs=5)
    assert limits["tests"] == pytest.approx(check.LIMITS_S["tests"], abs=5)


@pytest.mark.parametrize(
    ("line", "failed"), [("3 passed, 1 skipped in 2.0s", 0), ("2 failed, 3 passed, 1 error in 4s", 3)]
)
def test_failed_tests_are_counted(line: str, failed: int) -> None:
    assert check.tests(int(failed > 0), f"...\n{line}\n")["failed"] == failed


@pytest.mark.parametrize(("code", "line"), [(1, ""), (0, "7 skipped in 1s"), (2, "1 error in 1s")])
def test_tests_that_have_not_run_have_not_passed(code: int, line: str) -> None:
    assert check.table({"tests": check.tests(code, line)}) == ["not measured  CUDA tests failed (<= 0)"]


def test_of_a_part_that_is_late_what_it_has_said_counts() -> None:
    said = '{"batch": 64, "step_s": 1}\n{"batch": 256, "step_s": 2}\nhalf a li'
    assert [row["step_s"] for row in check.partly(said)["rows"]] == [1, 2]
    assert check.partly(b'{"nixl": {"fetch_s": 1}}\n{"p2p": {}}')["nixl"]["fetch_s"] == 1


def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    start_s = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        check.finish([sys.executable, "-c", code], 1.0)
    assert time.monotonic() - start_s < 20


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "NEEDED", ("torch", "no_such_package"))
    monkeypatch.setattr(sys, "argv", ["check.py", "--device", "cpu"])
    assert check.main() == 2
    assert "gpu-check needs no_such_package; WHEELS=folder installs them" in capsys.readouterr().err
