"""The check of a GPU, tried on the processor at toy size."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import devices
from tests.nightly import nightly

GPU = Path(__file__).parents[2] / "benchmarks/gpu"
sys.path.insert(0, str(GPU))

import bars  # noqa: E402 - found by the line above
import check  # noqa: E402
import sync  # noqa: E402
import wheels  # noqa: E402

ON_CPU = argparse.Namespace(device="cpu")


def rows_in(folder: Path) -> list[dict[str, Any]]:
    paths = folder.glob("gpu-rows-*.jsonl")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.endswith("}")]


def wait_for(what: Callable[[], Any], limit_s: float = 240.0) -> Any:
    deadline_s = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline_s, "nothing came"
        time.sleep(0.02)
    return found


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(GPU / "check.py"), "--device", "cpu", "--output", str(folder), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@nightly("it starts all parts of a check that is made for a machine with a GPU")
@pytest.mark.timeout(900)
def test_all_parts_have_rows_but_one_that_is_killed(tmp_path: Path) -> None:
    process = started(tmp_path, "--steps", "3", "--parts", *(part.name for part in check.PARTS))
    first = wait_for(lambda: [row for row in rows_in(tmp_path) if row.get("part") == "train-8b" and "mfu" in row])
    (part,) = children_of(process.pid)
    os.kill(part, signal.SIGKILL)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 1 and first, said
    rows = rows_in(tmp_path)
    ended = {row["part"]: row["ended"] for row in rows if "ended" in row}
    assert ended.pop("train-8b") == "killed by SIGKILL" and ended.pop("sanitizer").startswith("skipped")
    assert ended.keys() == {part.name for part in check.PARTS} - {"train-8b", "sanitizer"}
    assert set(ended.values()) == {"done"}, ended
    found = {row["part"] for row in rows if "part" in row and "ended" not in row}
    assert found == ended.keys() | {"train-8b"}
    (ways,) = (row["ucx_ways"] for row in rows if "ucx_ways" in row)
    assert ways and all("remote memory read by ucp_get" in way for way in ways)
    (tests,) = (row for row in rows if row.get("tests"))
    assert tests["tests"] > 50 and tests["failed"] == []
    profiled = {row["step"]: row["kernels"] for row in rows if row.get("probe") == "profile"}
    assert profiled.keys() == {"decode", "train"} and all(10 < len(kernels) <= 20 for kernels in profiled.values())
    assert {row["stages"] for row in rows if row.get("probe") == "attention"} == {3, 5}
    collected = [
        sys.executable,
        str(GPU / "collect.py"),
        *map(str, tmp_path.glob("*.jsonl")),
        "--output",
        str(tmp_path),
    ]
    subprocess.run(collected, check=True, capture_output=True, timeout=240)
    (path,) = tmp_path.glob("gpu-toy-*.json")
    result = json.loads(path.read_text())
    assert len(result["rows"]) == len(rows) - 1 and len(result["machines"]) == 1


@nightly("starts the whole check; by day its parts are tested alone")
def test_rows_are_on_disk_as_they_come_and_nothing_survives_its_end(tmp_path: Path) -> None:
    """Killed from outside in the middle of a part."""
    process = started(tmp_path, "--parts", "train-8b")
    wait_for(lambda: [row for row in rows_in(tmp_path) if "mfu" in row])
    machine = rows_in(tmp_path)[0]["machine"]
    assert machine["torch"] and machine["cores"] and machine["gpu"] is None
    process.terminate()
    (part,) = children_of(process.pid) or [0]
    process.communicate(timeout=240)
    assert process.returncode in (143, 0)  # the part may have been faster
    wait_for(lambda: not part or not Path(f"/proc/{part}").exists())


@nightly("parts that take their time; by day parts are late and named")
def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    """When it is late, and when this process is told to end."""
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time; other = subprocess.Popen(['sleep', '600']); "
        f"open({str(pids)!r}, 'a').write(f'{{other.pid}}\\n'); print('{{\"a\": 1}}'); time.sleep(600)"
    )
    heard = list[str]()
    assert check.finish([sys.executable, "-c", code], 8.0, heard.append) == "not done after 8 s"
    assert heard == ['{"a": 1}']
    run = (
        f"import sys; sys.path.insert(0, {str(GPU)!r}); import check, signal; "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
        f"check.finish([sys.executable, '-c', {code!r}], 600, lambda line: None)"
    )
    process = subprocess.Popen([sys.executable, "-c", run])
    wait_for(lambda: len(pids.read_text().split()) == 2)
    process.terminate()
    assert process.wait(timeout=240) == 143
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()))


@nightly("parts that take their time; by day parts are late and named")
def test_a_part_that_never_falls_silent_is_late() -> None:
    start_s = time.monotonic()
    assert check.finish([sys.executable, "-c", "while True: print('a')"], 1.0, lambda _: None).startswith("not done")
    assert time.monotonic() - start_s < 60


@nightly("starts the whole check; by day its parts are tested alone")
def test_a_part_dies_with_a_check_that_is_killed(tmp_path: Path) -> None:
    process = started(tmp_path, "--parts", "train-8b")
    (part,) = wait_for(lambda: children_of(process.pid) if list(tmp_path.iterdir()) else [])
    process.kill()
    process.communicate(timeout=240)
    wait_for(lambda: not Path(f"/proc/{part}").exists())


def test_a_check_needs_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert check.described("cpu")["commit"] is None


def test_the_way_of_reads_is_told_apart_from_others() -> None:
    """Small messages go by TCP even where weights go from GPU to GPU."""
    table = (
        "[1] [vm:7:0]   | 8ea3 self cfg#0 |",
        "[1] [vm:7:0]   | active message by ucp_am_send* from host memory |",
        "[1] [vm:7:0]   | 16516..inf | multi-frag copy-in | tcp/lo |",
        "[1] [vm:7:0]   | remote memory read by ucp_get*(multi) into cuda/GPU0 memory from cuda |",
        "[1] [vm:7:0]   | 0..inf | zero-copy | cuda_ipc/cuda |",
    )
    assert check.ways_of_reads(table) == [
        "remote memory read by ucp_get*(multi) into cuda/GPU0 memory from cuda: cuda_ipc"
    ]


def test_how_a_part_ends_is_told() -> None:
    def end(code: str) -> str:
        return check.finish([sys.executable, "-c", code], 60, lambda line: None)

    assert end("pass") == "done"
    assert end("import os; os.kill(os.getpid(), 11)") == "killed by SIGSEGV"
    assert end("raise SystemExit('no such device')") == "exit code 1: no such device"


@nightly("runs tests that fail; by day parts that fail have names")
def test_failed_tests_have_names(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n"
        "@pytest.fixture\ndef gone(): raise OSError\ndef test_broken(gone): pass\n"
    )
    part, said = check.Part("tests", 1, f"{check.PYTEST} {tmp_path}"), check.Said(tmp_path)
    assert check.run(part, ON_CPU, 60.0, said).startswith("exit code 1: ")
    assert failed_of(said) == ["test_bad", "test_broken"]
    assert rows_in(tmp_path) == said.rows
    (path,) = tmp_path.glob("gpu-output-*.txt")
    output = path.read_text().splitlines()
    assert all(line.startswith("tests: ") for line in output) and any("assert 0" in line for line in output)


def test_failed_tests_of_a_late_part_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: list[str], limit_s: float, heard: Callable[[str], None]) -> str:
        for line in ("a.py::test_good PASSED [ 10%]", "a.py::test_bad[x-1] FAILED [ 20%]", "a.py::test_slow "):
            heard(line)
        return "not done after 1 s"

    monkeypatch.setattr(check, "finish", late)
    part, said = check.Part("tests", 1, check.PYTEST), check.Said(tmp_path)
    assert check.run(part, ON_CPU, 1.0, said).startswith("not done after 1 s")
    assert failed_of(said) == ["test_bad[x-1]"]


def failed_of(said: check.Said) -> list[str]:
    (row,) = (row for row in said.rows if "tests" in row)
    assert row["passed"] == 1
    return [name.rpartition("::")[2] for name in row["failed"]]


def test_figures_stand_beside_their_bars() -> None:
    rows = [
        {"model": "8b", "dtype": dtype, "graphs": graphs, "batch": 64, "context": 1024, "step_s": step_s,
         "bandwidth_share": 0.55}
        for dtype, graphs, step_s in (("bfloat16", False, 0.02), ("bfloat16", True, 0.01), ("fp8", True, 0.008))
    ]  # fmt: skip
    rows += [
        {"transport": "nixl", "model": "8b", "failure": "no such device"},
        {"part": "tests", "num_failed": 1, "failed": ["a"]},
    ]
    rows.append({"part": "train-8b", "model": "toy", "mfu": 0.9})
    lines = bars.table(rows)
    assert [line for line in lines if line.endswith("of the roofline")] == [
        "MISSED        decode 8B bf16, 64 rows, 1k: bandwidth: 0.55 (>= 0.78, estimated 0.82); 55% of the roofline",
        "reached       decode 8B: eager over graphs: 2 (>= 1.3, estimated 2); 55% of the roofline",
        "reached       decode 8B: bf16 over fp8: 1.25 (>= 1.25, estimated 1.25); 55% of the roofline",
    ]
    assert "not measured  8B bf16 by nixl: fetched and proved, s (<= 0.06, estimated 0.02)" in lines
    assert "not measured  training 8B, packed 4k: MFU (>= 0.45, estimated 0.46)" in lines, "a toy is no 8B"
    assert "MISSED        tests failed: 1 (<= 0)" in lines


class Says:
    """One end of a connection, which hears this."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    def poll(self, _: float) -> bool:
        return True

    def recv(self) -> Any:
        return next(self._answers)

    def send(self, _: Any) -> None:
        pass


def test_a_slow_transport_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the versions that there was time for. Bytes are read, written, and read again; a copy's count twice."""
    row = {"fetch_s": 0.5, "stall_s": 0.25, "quiet_step_s": 0.01, "slowest_step_s": 0.02}
    specs = (argparse.Namespace(num_bytes=600), argparse.Namespace(num_bytes=400))
    for enough_s, versions in ((0.0, 1), (60.0, sync.VERSIONS)):
        monkeypatch.setattr(sync, "ENOUGH_S", enough_s)
        train, generate = Says(*[(0.125, "address")] * versions), Says(specs, *[row] * versions)
        found = sync._rounds(train, generate, bandwidth=60_000.0)  # pyrefly: ignore
        assert found["versions"] == versions and found["num_bytes"] == 1000 and found["served_s"] == 0.875
        assert found["fetch_share"] == pytest.approx(0.1) and found["bytes_per_s"] == 2000


def test_all_parts_have_their_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever those before them take, and more where they leave some."""
    limits = dict[str, float]()
    monkeypatch.setattr(check, "run", lambda part, _, limit_s, __: limits.setdefault(part.name, limit_s) and "done")
    monkeypatch.setattr(sys, "argv", ["check.py", "--device", "cpu", "--output", str(tmp_path)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert check.main() == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    first = [part for part in check.PARTS if part.is_first]
    assert [*limits] == [part.name for part in first] and first[0].name == "decode-8b-bfloat16"
    total_s = sum(part.limit_s for part in first)
    assert total_s < 560 and limits["demo"] == pytest.approx(total_s, abs=5)
    assert limits["decode-8b-bfloat16"] == pytest.approx(first[0].limit_s, abs=5)
    assert next(part for part in first if part.name == "demo").limit_s >= 90


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "NEEDED", ("torch", "no_such_package"))
    monkeypatch.setattr(sys, "argv", ["check.py", "--device", "cpu"])
    assert check.main() == 2
    assert "gpu-check needs no_such_package; WHEELS=folder installs them" in capsys.readouterr().err


def test_results_go_where_the_machine_wants_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["check.py", "--device", "cpu", "--parts", "demo"])
    monkeypatch.setattr(check, "run", lambda *_: "done")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert check.main() == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert rows_in(tmp_path)[0]["machine"]


def test_wheels_are_stripped_of_what_nobody_opens(tmp_path: Path) -> None:
    wheel, record = tmp_path / "nixl_cu13-1-cp312-cp312-linux_x86_64.whl", "nixl_cu13-1.dist-info/RECORD"
    files = {"nixl_cu13/api.py": "1", "nixl_ep_cu13/kernels.so": "2" * 1000, "libs/libplugin_UCX.so": "3"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(record, "".join(f"{name},,\n" for name in (*files, record)))
    wheels.strip(wheel, wheels.STRIPPED)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist() == ["nixl_cu13/api.py", "libs/libplugin_UCX.so", record]
        assert archive.read(record).decode().split() == [
            "nixl_cu13/api.py,,", "libs/libplugin_UCX.so,,", f"{record},,",
        ]  # fmt: skip


def test_a_gpu_of_any_number_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch has the last word, in a process of its own."""
    monkeypatch.setattr(devices, "DEVICES", tmp_path)
    monkeypatch.setattr(devices.sys, "executable", "/bin/true")
    assert not devices.has_gpu()
    (tmp_path / "nvidia3").touch()
    assert devices.has_gpu()
    monkeypatch.setattr(devices.sys, "executable", "/bin/false")
    assert not devices.has_gpu()
