"""What a GPU says of this package, in parts that are processes of their own, the most wanted first.

    make gpu-check                                            # the first call: less than 9.5 minutes on one H200
    python benchmarks/gpu/check.py --parts contexts attention sanitizer    # what further calls add
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
import queue
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

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import bars  # noqa: E402 - found by the line above

NEEDED = ("torch", "numpy", "pydantic", "rich", "safetensors", "tokenizers", "tomli_w", "xxhash", "math_verify")
NIXL = ("nixl_cu12", "nixl_cu13")
"""Either, by torch's CUDA."""
OPTIONAL = {
    "monarch": "cluster.kind = 'monarch'", **dict.fromkeys(NIXL, "weight_sync.transport = 'nixl', if torch is for it"),
    **dict.fromkeys(("pytest", "pytest_timeout", "hypothesis"), "the tests"),
}  # fmt: skip
TESTS = (
    "cuda", "kernels/test_triton_decode.py", "kernels/test_triton_ops.py", "kernels/test_triton_fingerprint.py",
    "generation/test_triton.py",
)  # fmt: skip
"""Those that compute on a GPU where there is one."""
UCX_WAYS = re.compile(r"\b(cuda_ipc|cuda_copy|gdr_copy|rc_mlx5|dc_mlx5|tcp|cma|xpmem|sysv|posix|self)/")
KILLED_WITH_ITS_PARENT = 1, signal.SIGKILL
"""PR_SET_PDEATHSIG."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A process with a time limit."""

    name: str
    limit_s: float
    """What the parts before have left comes on top."""
    command: Sequence[str]
    """Of Python, a file beside this one or `-m`; `{device}` is filled in."""
    toy: Sequence[str] = ("--models", "toy")
    """Put behind it on a processor."""
    is_first: bool = True
    """It belongs to the first call."""


def decode(name: str, limit_s: float, model: str, *options: str, is_first: bool = True) -> Part:
    toy = "--models", "toy", "--dtypes", "bfloat16", "--batches", "4", *(("--context", "96") if not is_first else ())
    command = "decode.py", "--device", "{device}", "--models", model, *options
    return Part(name=name, limit_s=limit_s, command=command, toy=toy, is_first=is_first)


def train(model: str, limit_s: float) -> Part:
    command = "train.py", "--device", "{device}", "--models", model
    return Part(name=f"train-{model}", limit_s=limit_s, command=command, toy=("--models", "toy", "--tokens", "256"))


def sync(name: str, limit_s: float, *transports: str) -> Part:
    command = "sync.py", "--device", "{device}", "--transports", *transports
    return Part(name=name, limit_s=limit_s, command=command, toy=("--model", "toy"))


def probe(name: str, limit_s: float, model: str = "1b", is_first: bool = True) -> Part:
    command = "probes.py", name, "--device", "{device}", "--model", model
    return Part(name=name, limit_s=limit_s, command=command, toy=("--model", "toy"), is_first=is_first)


PYTEST = "-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-o", "minversion=0"
"""A test's name and outcome are a line, as it ends; an older pytest does."""
PARTS = (
    decode("decode-8b-bfloat16", 75, "8b", "--dtypes", "bfloat16"),
    train("8b", 40),
    train("1b", 25),
    sync("sync-nixl", 40, "nixl"),
    sync("sync-host", 30, "shared_memory", "p2p"),
    Part(name="tests", limit_s=70, command=(*PYTEST, *(f"{ROOT}/tests/{path}" for path in TESTS)), toy=()),
    probe("mismatch", 25),
    decode("decode-8b-fp8", 35, "8b", "--dtypes", "fp8", "--batches", "64", "256"),
    decode("decode-8b-int8", 35, "8b", "--dtypes", "int8", "--batches", "64"),
    decode("decode-1b", 30, "1b", "--dtypes", "bfloat16", "--batches", "64", "512"),
    probe("prefill", 20),
    probe("profile", 40, "8b"),
    Part(name="demo", limit_s=90, command=(), toy=()),
    decode("contexts", 120, "8b", "--dtypes", "bfloat16", "--batches", "16", "64", "--context", "8192", is_first=False),
    decode("contexts-32k", 120, "8b", "--dtypes", "bfloat16", "--batches", "16", "--context", "32768", is_first=False),
    probe("attention", 90, "8b", is_first=False),
    Part(name="sanitizer", limit_s=240, command=(), toy=(), is_first=False),
)
TOTAL_S = sum(part.limit_s for part in PARTS if part.is_first)


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
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
    stamp = time.strftime("%H%M%S")
    rows, output = (
        options.output / f"gpu-{name}-{stamp}.{end}" for name, end in (("rows", "jsonl"), ("output", "txt"))
    )
    said = Said(rows, output)
    said.row({"machine": machine, "command": sys.argv})
    print("\n".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    parts = [part for part in PARTS if part.name in options.parts]
    deadline_s = time.monotonic() + sum(part.limit_s for part in parts)
    for number, part in enumerate(parts):
        limit_s = deadline_s - time.monotonic() - sum(later.limit_s for later in parts[number + 1 :])
        print(f"{part.name}: {run(part, options, max(limit_s, 1.0), said)}", flush=True)
    print("\n".join(bars.table(said.rows)))
    print(rows)
    ends = [str(row["ended"]) for row in said.rows if "ended" in row]
    return int(any("failure" in row for row in said.rows) or not all(end.startswith(("done", "skip")) for end in ends))


class Said:
    """Rows and output of all parts, on disk as they come."""

    def __init__(self, rows: Path, output: Path) -> None:
        self.rows = list[dict[str, Any]]()
        self._paths, self._start_s = (rows, output), time.monotonic()

    def row(self, row: dict[str, Any]) -> None:
        self.rows.append(row | {"at_s": round(time.monotonic() - self._start_s, 1)})
        with self._paths[0].open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")

    def line(self, part: str, line: str) -> None:
        """A row, if it is one."""
        with self._paths[1].open("a", encoding="utf-8", errors="replace") as file:
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
        command = command_of(part, options, Path(folder))
        ended = finish(command, limit_s, heard) if command else "skipped: there is no compute-sanitizer"
        if part.name == "demo" and (summary := Path(folder, "demo/summary.json")).exists():
            said.row({"part": "demo"} | json.loads(summary.read_text()))
    if outcomes := re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)", "\n".join(lines), re.MULTILINE):
        failed = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
        passed = sum(outcome == "PASSED" for _, outcome in outcomes)
        said.row({"part": part.name, "tests": len(outcomes), "passed": passed, "failed": failed})
    if ways := sorted({way for line in lines for way in UCX_WAYS.findall(line)}):
        said.row({"part": part.name, "ucx_ways": ways})
    ended = f"{ended} in {time.monotonic() - start_s:.0f} s"
    said.row({"part": part.name, "ended": ended.rpartition(" in ")[0], "part_s": time.monotonic() - start_s})
    return ended


def command_of(part: Part, options: argparse.Namespace, folder: Path) -> list[str] | None:
    """None: a program is missing."""
    is_toy, python = options.device == "cpu", [sys.executable]
    if part.name == "demo":
        one = "cpu" if is_toy else f"{options.device.split(':')[0]}:0"
        return [
            *python, "-m", "llamarl", "train", str(ROOT / "configs/demo.toml"), "--cluster.kind", "inline",
            "--trainer.device", one, "--generator.device", one, "--steps", str(options.steps), "--output", str(folder),
            "--screen.kind", "lines", "--eval.every_steps", "0", "--model.path", str(options.base),
        ]  # fmt: skip
    if part.name == "sanitizer":
        program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        tests = [f"{ROOT}/tests/{path}" for path in TESTS[1:4]]
        return [program, "--error-exitcode", "9", *python, *PYTEST, *tests] if program else None
    file, *arguments = part.command
    first = [str(HERE / file)] if file.endswith(".py") else [file]
    given = [argument.format(device=options.device) for argument in arguments]
    return [*python, *first, *given, *(part.toy if is_toy else ())]


def finish(command: Sequence[str], limit_s: float, heard: Callable[[str], None]) -> str:
    """Runs it, telling each line; how it ended. Nothing that it has started is left, whatever ends this process."""
    paths = (str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "UCX_PROTO_INFO": "y"}
    lines, process_control = queue.Queue[str | None](), ctypes.CDLL(None).prctl
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, preexec_fn=lambda: process_control(*KILLED_WITH_ITS_PARENT),  # noqa: PLW1509
    )  # fmt: skip

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    deadline_s, last = time.monotonic() + limit_s, ""
    try:
        while (line := lines.get(timeout=max(deadline_s - time.monotonic(), 0.0))) is not None:
            heard(line)
            last = line if line.strip() and not line.startswith("{") else last
        code = process.wait(timeout=max(deadline_s - time.monotonic(), 1.0))
    except (queue.Empty, subprocess.TimeoutExpired):
        return f"not done after {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "done" if code == 0 else f"exit code {code}: {last[:300]}"


def described(device: str) -> dict[str, Any]:
    """The machine."""
    import torch

    gpu = torch.cuda.get_device_properties(0) if device != "cpu" and torch.cuda.is_available() else None
    lacking = [f"{name} ({why})" for name, why in OPTIONAL.items() if importlib.util.find_spec(name) is None]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    driver = Path("/proc/driver/nvidia/version")
    return {
        "gpu": gpu.name if gpu else None,
        "gpu_bytes": gpu.total_memory if gpu else None,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "commit": commit.stdout.strip() or None,
        "missing": ", ".join(lacking) or None,
    }


if __name__ == "__main__":
    sys.exit(main())
