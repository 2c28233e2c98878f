"""What a GPU says of this package, in parts that are processes of their own, the most wanted first.

    make gpu-check                                            # the first call: less than 9.5 minutes on one H200
    python benchmarks/gpu/check.py --parts turns-8b attention sanitizer    # what further calls add
    python benchmarks/gpu/check.py --device cpu               # the check itself, at toy size, anywhere
    python benchmarks/gpu/collect.py ROWS.jsonl ...           # benchmarks/results/gpu-DATE.json, of all calls

Needs no network. Rows are written as they come to `gpu-rows-TIME.jsonl` in `--output` ($OUT, else `runs/gpu-check`),
all that parts say to `gpu-output-TIME.txt` beside it. A part that dies, or is late, costs its own remaining rows.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bars

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEEDED = ("torch", "numpy", "pydantic", "rich", "safetensors", "tokenizers", "tomli_w", "xxhash", "math_verify")
NIXL = ("nixl_cu12", "nixl_cu13")
"""Either, by torch's CUDA."""
OPTIONAL = {
    "monarch": "cluster.kind = 'monarch'; 'processes' does without it",
    **dict.fromkeys(NIXL, "weight_sync.transport = 'nixl', if torch is for it"),
    **dict.fromkeys(("pytest", "pytest_timeout", "hypothesis"), "the tests"),
}  # fmt: skip
TESTS = (
    "tests/cuda", *(f"tests/parts/cuda/test_{name}.py" for name in ("decode", "ops", "train", "fingerprint", "engine")),
)  # fmt: skip
"""Those that compute on a GPU where there is one."""
UCX_WAYS = re.compile(r"\b(cuda_ipc|cuda_copy|gdr_copy|rc_mlx5|dc_mlx5|tcp|cma|xpmem|sysv|posix|self)/")
KILLED_WITH_ITS_PARENT = 1, signal.SIGKILL
"""PR_SET_PDEATHSIG."""


@dataclass(frozen=True)
class Part:
    """A process with a time limit."""

    name: str
    limit_s: float
    """What the parts before have left comes on top."""
    command: str
    """Of Python: a file beside this one, which takes `--device`, or `-m`. Options are filled in, and a `{folder}`."""
    is_first: bool = True
    """It belongs to the first call."""


PYTEST = "-m pytest -v -rfE --tb=short -p no:cacheprovider -o minversion=0 -o addopts=--import-mode=importlib"
"""A test's name and outcome are a line, as it ends; an older pytest does, and plugins that lack a setting."""
PARALLEL = "-n 6 --dist load" if importlib.util.find_spec("xdist") else ""
"""Most of their time is compiling."""
DEMO = (
    "-m llamarl train configs/demo.toml --cluster.kind inline --trainer.device {device} --generator.device {device} "
    "--steps {steps} --output {folder} --screen.kind lines --eval.every_steps 0 --model.path {base}"
)
PARTS = (
    Part("decode-8b-bfloat16", 75, "decode.py --model 8b"),
    Part("train-8b", 40, "train.py --model 8b"),
    Part("train-1b", 25, "train.py --model 1b"),
    Part("sync-nixl", 30, "sync.py --model 8b --transports nixl"),
    Part("sync-host", 35, "sync.py --model 1b --transports shared_memory p2p"),
    Part("tests", 80, f"{PYTEST} {PARALLEL} {' '.join(TESTS)}"),
    Part("mismatch", 25, "probes.py mismatch"),
    Part("decode-8b-fp8", 35, "decode.py --model 8b --dtype fp8 --batches 64 256"),
    Part("decode-8b-int8", 30, "decode.py --model 8b --dtype int8 --batches 64"),
    Part("decode-1b", 30, "decode.py --model 1b --batches 64 512"),
    Part("prefill", 20, "probes.py prefill"),
    Part("profile", 40, "probes.py profile --model 8b"),
    Part("demo", 90, DEMO),
    Part("turns-8b", 90, "turns.py --model 8b --steps 8", is_first=False),
    Part("turns-1b", 60, "turns.py --model 1b", is_first=False),
    Part("contexts", 120, "decode.py --model 8b --batches 16 64 --context 8192", is_first=False),
    Part("contexts-32k", 120, "decode.py --model 8b --batches 16 --context 32768", is_first=False),
    Part("attention", 90, "probes.py attention --model 8b", is_first=False),
    Part("sanitizer", 240, f"{PYTEST} {' '.join(TESTS[1:5])}", is_first=False),
)


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--parts", nargs="+", choices=names, default=[part.name for part in PARTS if part.is_first])
    parser.add_argument("--steps", type=int, default=60, help="of the demo")
    parser.add_argument("--base", type=Path, default=ROOT / "runs/base/demo", help="the demo's base model")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "runs/gpu-check"))
    options = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gpu-check needs {', '.join(missing)}; WHEELS=folder installs them from wheels", file=sys.stderr)
        return 2
    machine = described(options.device)
    if options.device != "cpu" and not machine["gpu"]:
        print("gpu-check: torch sees no GPU; --device cpu tries the check itself", file=sys.stderr)
        return 2
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # past every `finally`, which ends the part
    options.output.mkdir(parents=True, exist_ok=True)
    said = Said(options.output)
    said.row({"machine": machine, "command": sys.argv})
    print("\n".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    parts = [part for part in PARTS if part.name in options.parts]
    deadline_s = time.monotonic() + sum(part.limit_s for part in parts)
    for number, part in enumerate(parts):
        limit_s = deadline_s - time.monotonic() - sum(later.limit_s for later in parts[number + 1 :])
        print(f"{part.name}: {run(part, options, max(limit_s, 1.0), said)}", flush=True)
    print("\n".join(bars.table(said.rows)))
    print(said.path)
    ends = [str(row["ended"]) for row in said.rows if "ended" in row]
    return int(any("failure" in row for row in said.rows) or not all(end.startswith(("done", "skip")) for end in ends))


class Said:
    """Rows and output of all parts, on disk as they come."""

    def __init__(self, folder: Path) -> None:
        stamp, self._start_s = time.strftime("%Y%m%d-%H%M%S"), time.monotonic()
        self.rows = list[dict[str, Any]]()
        self.path, self._output = folder / f"gpu-rows-{stamp}.jsonl", folder / f"gpu-output-{stamp}.txt"

    def row(self, row: dict[str, Any]) -> None:
        self.rows.append(row | {"at_s": round(time.monotonic() - self._start_s, 1)})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")

    def line(self, part: str, line: str) -> None:
        """A row, if it is one."""
        with self._output.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{part}: {line}\n")
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                self.row({"part": part} | json.loads(line))


def run(part: Part, options: argparse.Namespace, limit_s: float, said: Said) -> str:
    """How it ended."""
    start_s, lines = time.monotonic(), list[str]()

    def heard(line: str) -> None:
        lines.append(line)
        said.line(part.name, line)

    with tempfile.TemporaryDirectory() as folder:
        command = command_of(part, options, folder)
        ended = finish(command, limit_s, heard) if command else "skipped: there is no compute-sanitizer"
        if part.name == "demo" and (summary := Path(folder, "demo/summary.json")).exists():
            said.row({"part": "demo"} | json.loads(summary.read_text()))
    if outcomes := outcomes_of(lines):
        failed = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
        passed = sum(outcome == "PASSED" for _, outcome in outcomes)
        counts = {"tests": len(outcomes), "passed": passed, "num_failed": len(failed)}
        said.row({"part": part.name, **counts, "failed": failed})
    if ways := ways_of_reads(lines):
        said.row({"part": part.name, "ucx_ways": ways})
    part_s = time.monotonic() - start_s
    said.row({"part": part.name, "ended": ended, "part_s": part_s})
    return f"{ended} in {part_s:.0f} s"


def outcomes_of(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Tests and how they ended, of pytest alone or of its processes."""
    kinds, text = "(PASSED|FAILED|ERROR|SKIPPED|XFAIL)", "\n".join(lines)
    alone = re.findall(rf"^(\S+::.+?) {kinds}", text, re.MULTILINE)
    return alone + [
        (name, kind) for kind, name in re.findall(rf"^\[gw\d+\] \[ *\d+%\] {kinds} (\S+::.+?) *$", text, re.MULTILINE)
    ]


def ways_of_reads(lines: Sequence[str]) -> list[str]:
    """What UCX reads by, from which memory into which: NIXL reads weights. Other messages may go other ways."""
    ways, operation = set[str](), ""
    for line in lines:
        if " by ucp_" in line:
            operation = line.partition("| ")[2].strip(" |")
        elif "ucp_get" in operation and (way := UCX_WAYS.search(line)):
            ways.add(f"{operation}: {way[1]}")
    return sorted(ways)


def command_of(part: Part, options: argparse.Namespace, folder: str) -> list[str] | None:
    """None: a program is missing."""
    words = [word.format(folder=folder, **vars(options)) for word in part.command.split()]
    if words[0].endswith(".py"):
        words = [str(HERE / words[0]), *words[1:], "--device", options.device]
    command = [sys.executable, *words]
    if part.name != "sanitizer":
        return command
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    return [program, "--error-exitcode", "9", *command] if program else None


def finish(command: Sequence[str], limit_s: float, heard: Callable[[str], None]) -> str:
    """Runs it, telling each line; how it ended. Nothing that it has started is left, whatever ends this process."""
    paths = (str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "UCX_PROTO_INFO": "y"}
    deadline_s, last, process_control = time.monotonic() + limit_s, "", ctypes.CDLL(None).prctl
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, preexec_fn=lambda: process_control(*KILLED_WITH_ITS_PARENT),  # noqa: PLW1509
    )  # fmt: skip

    def read() -> None:
        nonlocal last
        assert process.stdout is not None
        for line in map(str.rstrip, process.stdout):
            heard(line)
            last = line if line and not line.startswith("{") else last

    reader = threading.Thread(target=read, daemon=True)  # who has left the session may hold the pipe for longer
    reader.start()
    try:
        reader.join(limit_s)
        code = process.wait(timeout=max(deadline_s - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(1.0)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "done" if code == 0 else f"exit code {code}: {last[:300]}"


def described(device: str) -> dict[str, Any]:
    """The machine."""
    import torch

    gpu = torch.cuda.get_device_properties(0) if device != "cpu" and torch.cuda.is_available() else None
    lacking = [f"{name} ({why})" for name, why in OPTIONAL.items() if importlib.util.find_spec(name) is None]
    driver, commit = Path("/proc/driver/nvidia/version"), None
    with suppress(OSError):  # a copy of the repository may come without git
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or None
    return {
        "gpu": gpu.name if gpu else None,
        "gpu_bytes": gpu.total_memory if gpu else None,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "commit": commit,
        "missing": ", ".join(lacking) or None,
    }


if __name__ == "__main__":
    sys.exit(main())
