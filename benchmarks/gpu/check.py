"""What a GPU says of this package: its tests, the demo, decoding, training, log-probs, weight sync; each with its bar.

    make gpu-check                                          # all parts, at most 9 minutes on one H200
    python benchmarks/gpu/check.py --parts decode sync      # some
    python benchmarks/gpu/check.py --device cpu             # the check itself, at toy size, anywhere

Needs no network. Each part is a process with a time limit, so one that fails leaves the others alone, and what was
measured is written after each of them to `benchmarks/results/gpu-DATE.json`. Missing packages are named, and what needs
them is skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from _record import RESULTS, write_result  # noqa: E402 - found by the line above

NEEDED = ("torch", "numpy", "pydantic", "rich", "safetensors", "tokenizers", "tomli_w", "xxhash", "math_verify")
NIXL = ("nixl_cu12", "nixl_cu13")
"""Either, by torch's CUDA."""
OPTIONAL = {
    "monarch": "cluster.kind = 'monarch'", **dict.fromkeys(NIXL, "weight_sync.transport = 'nixl', if torch is for it"),
    **dict.fromkeys(("pytest", "pytest_timeout", "hypothesis"), "the tests"),
}  # fmt: skip
TOTAL_S = 540.0
TESTS = (
    "cuda", "kernels/test_triton_decode.py", "kernels/test_triton_ops.py", "kernels/test_triton_fingerprint.py",
    "generation/test_triton.py",
)  # fmt: skip
"""Those that compute on a GPU where there is one."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a figure should reach."""

    name: str
    value: Callable[[dict[str, Any]], float]
    """From the figures of a part. Raises KeyError, StopIteration or TypeError where they lack it."""
    bar: float
    at_least: bool = True
    estimate: float | None = None
    """For one H200, written before any GPU had run this."""


def row(figures: dict[str, Any], **wanted: Any) -> dict[str, Any]:
    return next(one for one in figures["rows"] if all(one[key] == value for key, value in wanted.items()))


def decode(figures: dict[str, Any], dtype: str, graphs: bool) -> dict[str, Any]:
    return row(figures, model="8b", dtype=dtype, graphs=graphs, batch=64)


BARS: dict[str, tuple[Bar, ...]] = {
    "tests": (Bar(name="CUDA tests failed", value=lambda f: f["failed"], bar=0, at_least=False),),
    "decode": (
        Bar(
            name="decode 8B bf16, 64 rows, 1k tokens: share of bandwidth",
            value=lambda f: decode(f, "bfloat16", True)["bandwidth_share"],
            bar=0.6,
            estimate=0.68,
        ),
        Bar(
            name="CUDA graphs over eager",
            value=lambda f: decode(f, "bfloat16", False)["step_s"] / decode(f, "bfloat16", True)["step_s"],
            bar=1.3,
            estimate=2.0,
        ),
        Bar(
            name="fp8 over bf16",
            value=lambda f: decode(f, "bfloat16", True)["step_s"] / decode(f, "fp8", True)["step_s"],
            bar=1.4,
            estimate=1.35,
        ),
    ),
    "train": (
        Bar(name="training 8B, packed 4k: MFU", value=lambda f: f["8b"]["mfu"], bar=0.40, estimate=0.42),
        Bar(name="training 1B, packed 4k: MFU", value=lambda f: f["1b"]["mfu"], bar=0.35, estimate=0.35),
        Bar(
            name="log-probs by tiles over plain: time",
            value=lambda f: f["logprobs"]["time_ratio"],
            bar=1.15,
            estimate=1.1,
            at_least=False,
        ),
    ),
    "sync": (
        Bar(
            name="8B bf16 by nixl: fetched and proved, s",
            value=lambda f: f["nixl"]["fetch_s"],
            bar=0.06,
            estimate=0.02,
            at_least=False,
        ),
        Bar(
            name="published to served, s",
            value=lambda f: f["nixl"]["served_s"],
            bar=0.06,
            estimate=0.045,
            at_least=False,
        ),
        Bar(
            name="longest step while weights come, s",
            value=lambda f: f["nixl"]["slowest_step_s"] - f["nixl"]["quiet_step_s"],
            bar=0.05,
            estimate=0.015,
            at_least=False,
        ),
    ),
    "demo": (Bar(name="accuracy gained by the demo", value=lambda f: f["gained"], bar=0.3),),
}
LIMITS_S = {"tests": 120.0, "decode": 170.0, "train": 90.0, "sync": 100.0, "demo": 60.0}
"""Of `TOTAL_S`, for each part at least; what the parts before have left comes on top."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=tuple(BARS), default=tuple(BARS))
    parser.add_argument("--steps", type=int, default=60, help="of the demo")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gpu-check needs {', '.join(missing)}; WHEELS=folder installs them from wheels", file=sys.stderr)
        return 2
    if options.device != "cpu" and not _sees_gpu():
        print("gpu-check: torch sees no GPU; --device cpu tries the check itself", file=sys.stderr)
        return 2
    lacking = {name: what for name, what in OPTIONAL.items() if importlib.util.find_spec(name) is None}
    for name, what in lacking.items():
        print(f"{name} is missing: without {what}")
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    found, path, deadline_s = dict[str, Any](), None, time.monotonic() + TOTAL_S
    for part in options.parts:
        start_s, later = time.monotonic(), options.parts[options.parts.index(part) + 1 :]
        limit_s = deadline_s - start_s - sum(LIMITS_S[one] for one in later)
        found[part] = run_part(part, options, limit_s, lacking.keys() >= {*NIXL})
        found[part]["part_s"] = time.monotonic() - start_s
        figures = {"device": _device(options.device), "missing": list(lacking), **found, "bars": table(found)}
        path = write_result("gpu" if options.device != "cpu" else "gpu-toy", settings, figures, [], options.output)
        print(f"{part}: {found[part].get('failure', 'done')} in {found[part]['part_s']:.0f} s", flush=True)
    for line in table(found):
        print(line)
    print(path)
    return int(any("failure" in figures for figures in found.values()))


def run_part(part: str, options: argparse.Namespace, limit_s: float, without_nixl: bool) -> dict[str, Any]:
    """Its figures, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        command = commands(options, Path(folder), without_nixl)[part]
        try:
            code, out, err = finish(command, max(limit_s, 1.0))
        except subprocess.TimeoutExpired as late:
            return partly(late.output or "") | {"failure": f"not done after {limit_s:.0f} s"}
        if part == "tests":
            return tests(code, out)
        if code != 0:
            return {"failure": (err.strip() or out.strip() or f"exit code {code}").splitlines()[-1]}
        return demo(Path(folder)) if part == "demo" else json.loads(out.strip().splitlines()[-1])


def commands(options: argparse.Namespace, folder: Path, without_nixl: bool) -> dict[str, list[str]]:
    python, device, is_toy = sys.executable, options.device, options.device == "cpu"
    models = ["--models", "toy"] if is_toy else []
    transports = ["--transports", *([] if without_nixl else ["nixl"]), "shared_memory", "p2p"]  # it has the bars
    one = "cpu" if is_toy else f"{device.split(':')[0]}:0"
    return {
        "tests": [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"{ROOT}/tests/{path}" for path in TESTS)],
        "demo": [
            python, "-m", "llamarl", "train", str(ROOT / "configs/demo.toml"), "--cluster.kind", "inline",
            "--trainer.device", one, "--generator.device", one, "--steps", str(options.steps), "--output", str(folder),
            "--screen.kind", "lines", "--eval.every_steps", "0",
        ],
        "decode": [
            python, str(HERE / "decode.py"), "--device", device, *models,
            *(["--dtypes", "bfloat16", "--batches", "4"] if is_toy else []),
        ],
        "train": [
            python, str(HERE / "train.py"), "--device", device, *models, *(["--tokens", "256"] if is_toy else []),
        ],
        "sync": [
            python, str(HERE / "sync.py"), "--device", device, *(["--model", "toy"] if is_toy else []), *transports,
        ],
    }  # fmt: skip


def finish(command: list[str], limit_s: float) -> tuple[int, str, str]:
    """Exit code and output; nothing that it has started is left. Raises TimeoutExpired."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit_s)
        return process.returncode, out, err
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def partly(out: str | bytes) -> dict[str, Any]:
    """What a part has said so far: a line for each row, or for each model or transport."""
    found = dict[str, Any]()
    for line in (out.decode() if isinstance(out, bytes) else out).splitlines():
        with suppress(json.JSONDecodeError):
            said = json.loads(line)
            found |= {"rows": [*found.get("rows", ()), said]} if "batch" in said else said
    return found


def tests(code: int, out: str) -> dict[str, Any]:
    """Of pytest's last line."""
    last = out.strip().splitlines()[-1] if out.strip() else ""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    found = {"failed": counts.get("failed", 0) + counts.get("error", 0), "counts": counts}
    has_run = code in (0, 1) and counts.keys() & {"passed", "failed", "error"}
    return found if has_run else {"failure": last or f"pytest ended with {code}"}


def demo(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "demo/summary.json").read_text())
    names = ("accuracy_before", "accuracy_after", "samples_per_s", "wall_s", "extra.stall_p99_s")
    found = {name: summary.get(name) for name in names}
    return found | {"gained": summary["accuracy_after"] - summary["accuracy_before"]}


def table(found: dict[str, Any]) -> list[str]:
    """A line per bar of the parts that have run."""
    lines = []
    for part, bars in ((part, BARS[part]) for part in found):
        for bar in bars:
            sign = ">=" if bar.at_least else "<="
            estimated = "" if bar.estimate is None else f", estimated {bar.estimate:g}"
            try:
                value = bar.value(found[part])
            except (KeyError, StopIteration, TypeError):
                lines.append(f"not measured  {bar.name} ({sign} {bar.bar:g}{estimated})")
                continue
            reached = value >= bar.bar if bar.at_least else value <= bar.bar
            lines.append(
                f"{'reached' if reached else 'MISSED ':<12}  {bar.name}: {value:.3g} ({sign} {bar.bar:g}{estimated})"
            )
    return lines


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _device(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device != "cpu" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
