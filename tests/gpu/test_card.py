"""The calls of one card's 15 minutes: parts that die, short time, and what a call brings; at toy size at night."""

from __future__ import annotations

import argparse
import json
import lzma
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from llamarl.models.hf import new_model, save_model
from llamarl.models.shape import ModelShape
from llamarl.parts.sft.bpe import train_byte_bpe
from tests.nightly import nightly

EXAMPLE = Path(__file__).parents[2] / "examples/real"
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


@nightly("by day its other parts are tested alone")
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


def small_model(folder: Path) -> Path:
    """In the place of SmolLM2, with a tokenizer of its problems."""
    texts = [json.loads(line)["question"] for line in (EXAMPLE / "svamp_sums.jsonl").read_text().splitlines()]
    tokenizer = train_byte_bpe(texts * 2, folder.with_name("tokenizer"), 800)
    shape = ModelShape(
        family="llama", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
        vocab_size=tokenizer.vocab_size, max_position_embeddings=1024, tie_embeddings=True,
        stop_token_ids=tokenizer.eos_token_ids,
    )  # fmt: skip
    save_model(new_model(shape, seed=1, std=0.1), folder, tokenizer.folder)
    settings = folder / "tokenizer_config.json"
    template = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
    known = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps(known | {"chat_template": template}))
    return folder


@nightly("it rehearses two calls at toy size")
@pytest.mark.timeout(900)
def test_the_runs_on_a_model_are_rehearsed_and_continue_after_a_cut(tmp_path: Path) -> None:
    """The second run of call 2 is killed with its call. The same command keeps the first row and runs the second.
    Call 3 has trainer and generator in processes."""
    environment = os.environ | {"OUT": str(tmp_path / "out")}
    common = ["--device", "cpu", "--kept", str(tmp_path / "kept"), "--model", str(small_model(tmp_path / "model"))]

    def command(call: int, *parts: str) -> list[str]:
        return [sys.executable, str(GPU / "card.py"), str(call), *common, "--parts", *parts]

    kept = tmp_path / "out/real-rows.jsonl"
    with subprocess.Popen(command(2, "asynchronous", "synchronous"), env=environment, text=True) as cut:
        second = tmp_path / "out/runs/synchronous/logs"
        deadline_s = time.monotonic() + 400.0
        while not second.exists():
            assert cut.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        cut.send_signal(signal.SIGTERM)
    first = kept.read_text()
    assert [json.loads(line)["run"] for line in first.splitlines()] == ["asynchronous"]
    for call, parts in ((2, ("asynchronous", "synchronous")), (3, ("processes", "sharing"))):
        done = subprocess.run(
            command(call, *parts), env=environment, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert kept.read_text().startswith(first)
    rows = {row["run"]: row for row in map(json.loads, kept.read_text().splitlines())}
    assert rows.keys() == {"asynchronous", "synchronous", "processes"}
    assert all(row["steps"] == 2 and row["samples_per_s"] > 0 for row in rows.values())
    assert rows["processes"]["options"][-1] in ("monarch", "processes")
    written = [json.loads(line) for path in (tmp_path / "out").glob("gpu-rows-*.jsonl") for line in path.open()]
    assert {row["part"] for row in written if row.get("ended") == "done"} == {*rows, "sharing"}
    assert any(row.get("run") == "sharing" and row["sum_of_shares"] > 0 for row in written)


@nightly("it trains with TRL, where that is installed")
@pytest.mark.timeout(600)
def test_trl_s_run_is_rehearsed(tmp_path: Path) -> None:
    """It writes a row with its speed after each step, and one at the end."""
    pytest.importorskip("trl")
    command = [sys.executable, str(GPU / "trl_on_card.py"), "--device", "cpu", "--steps", "3", "--prompts", "1"]
    command += ["--model", str(small_model(tmp_path / "model"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"run"')]
    assert [row.get("steps") for row in rows] == [2, 3, 3], done.stdout[-2000:] + done.stderr[-2000:]
    assert all(row["run"] == "trl" and row["samples_per_s"] > 0 for row in rows) and len(rows[-1]["rewards"]) == 3
