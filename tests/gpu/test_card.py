"""The calls of one card's 15 minutes: parts that die, short time, and what a call brings; at toy size at night."""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.nightly import nightly

GPU = Path(__file__).parents[2] / "benchmarks/gpu"
sys.path.insert(0, str(GPU))

import bars  # noqa: E402 - found by the line above
import card  # noqa: E402
from check import Part, Said  # noqa: E402

SCRIPTS = {
    "first": "print('{\"first\": 1}')",
    "dies": "import os; print('{\"before\": 1}', flush=True); os.kill(os.getpid(), 9)",
    "late": "import time; print('{\"soon\": 1}', flush=True); time.sleep(600)",
    "last": "print('{\"last\": 1}')",
}


def asked(folder: Path, *names: str, limit_s: float = 20.0, dropped: int = 0) -> list[card.Asked]:
    for name in names:
        (folder / f"{name}.py").write_text(SCRIPTS[name])
    return [
        card.Asked(Part(name, 2.0 if name == "late" else limit_s, str(folder / f"{name}.py")), dropped)
        for name in names
    ]


def rows_in(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("gpu-rows-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@nightly("a part is waited for until it is late")
def test_a_part_that_dies_or_is_late_costs_its_own_rows(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    options, said = argparse.Namespace(device="cpu", kept=tmp_path), Said(output)
    parts = asked(tmp_path, "first", "dies", "late", "last")
    assert card.call(parts, options, said, sum(one.part.limit_s for one in parts)) == 1
    rows = rows_in(output)
    ended = {row["part"]: row["ended"] for row in rows if "ended" in row}
    assert ended["first"] == ended["last"] == "done" and ended["dies"] == "killed by SIGKILL"
    assert ended["late"].startswith("not done after")
    assert all(any(row.get(key) == 1 for row in rows) for key in ("first", "before", "soon", "last"))


def test_parts_are_left_out_when_time_is_short(tmp_path: Path) -> None:
    parts = [*asked(tmp_path, "first"), *asked(tmp_path, "dies", dropped=1), *asked(tmp_path, "last", dropped=2)]
    for left_s, names in ((60.0, ["first", "dies", "last"]), (45.0, ["first", "dies"]), (1.0, ["first"])):
        assert [part.name for part in card.kept_parts(parts, left_s)] == names


def test_the_calls_fit_into_the_time_and_none_is_forgotten() -> None:
    """540 s each, and 15 minutes together but for what is dropped first."""
    limits = {number: sum(one.part.limit_s for one in parts) for number, parts in card.CALLS.items()}
    assert max(limits.values()) <= 540 and sum(limits.values()) <= 900
    order = [one.part.name for parts in card.CALLS.values() for one in sorted(parts, key=lambda one: -one.dropped)]
    assert order.index("turns-1b") < order.index("processes")
    assert {"turns-1b", "processes", "trl", "sync-ipc", "asynchronous"} <= {*order}
    assert {bar.name for bar in bars.BARS} >= set(bars.CHANGED)


def test_what_a_call_brings_is_kept(tmp_path: Path) -> None:
    """Pieces of the model, a wheel, and a library that was compressed on its own."""
    carried, kept = tmp_path / "carried", tmp_path / "kept"
    (carried / "model/0").mkdir(parents=True)
    (carried / "model/0/piece").write_bytes(b"abc")
    with lzma.open(carried / "some--deep--library.so.xz", "wb") as file:
        file.write(b"library")
    with zipfile.ZipFile(carried / "thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing.py", "X = 1\n")
        wheel.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        wheel.writestr(
            "thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("thing-1.0.dist-info/RECORD", "")
    assert card.keep(carried, kept) == ["model", "some--deep--library.so.xz", "thing-1.0-py3-none-any.whl"]
    assert (kept / "model/0/piece").read_bytes() == b"abc"
    assert (kept / "site/some/deep/library.so").read_bytes() == b"library"
    assert (kept / "site/thing.py").exists()
    assert card.keep(None, kept) == []


@nightly("it rehearses a call at toy size")
@pytest.mark.timeout(900)
def test_a_call_is_rehearsed(tmp_path: Path) -> None:
    parts = ["decode-8b-bfloat16", "sync-ipc", "train-1b", "profile-1b"]
    command = [
        sys.executable, str(GPU / "card.py"), "1", "--device", "cpu", "--output", str(tmp_path), "--kept",
        str(tmp_path / "kept"), "--parts", *parts,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["part"] for row in rows_in(tmp_path) if row.get("ended") == "done"} == {*parts}
