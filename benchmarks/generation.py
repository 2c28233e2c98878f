"""Generation by the native engine, vLLM and transformers: the same prompts, one thread each, in turns, on a CPU.

    python benchmarks/generation.py [--quick] [--models 10m] [--rows uniform-32/ours]

Random Llama-shaped models; prompts of 64 to 256 tokens, 128 to 256 new ones, temperature 1, log-probabilities of what
was sampled. Each engine is a process (`peers/`); in each repeat all engines run one after the other, and a row is the
median of its repeats. `make vllm` builds the environment of vLLM; without it those rows are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _record import write_result

from llamarl.kernels import build
from llamarl.kernels.linear import Linear
from llamarl.models.hf import new_model, save_model
from llamarl.models.quantize import quantize_rows
from llamarl.models.shape import ModelShape

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).with_name("peers")
VLLM_PYTHON = os.environ.get("LLAMARL_VLLM_PYTHON") or str(ROOT / ".venv-vllm/bin/python")
MODELS = {
    "10m": ModelShape(
        family="llama", hidden_size=256, num_layers=7, num_heads=4, num_kv_heads=2, head_dim=64,
        intermediate_size=1024, vocab_size=8000, max_position_embeddings=1024, tie_embeddings=True,
    ),
    "35m": ModelShape(
        family="llama", hidden_size=448, num_layers=9, num_heads=7, num_kv_heads=1, head_dim=64,
        intermediate_size=1280, vocab_size=16032, max_position_embeddings=1024, tie_embeddings=False,
    ),
    "100m": ModelShape(
        family="llama", hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=4, head_dim=64,
        intermediate_size=2048, vocab_size=31744, max_position_embeddings=1024, tie_embeddings=True,
    ),
}  # fmt: skip
"""8,933,120, 33,984,832 and 99,896,064 parameters."""
WORKLOADS = {"uniform-32": 32, "long_tail-32": 32, "uniform-128": 128, "grouped": 128, "ungrouped": 128}
"""Name -> decode slots."""
UNIFORM = ("uniform-32", "uniform-128")
OURS_ONLY = ("grouped", "ungrouped")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "int8": "int8"}
HAS_BFLOAT16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
RUN_TIMEOUT_S = 3600.0
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
NOTES = """\
Tokens per CPU-second: new tokens over the CPU time of all threads of the engine's process, prefill included.
ratio_vs_vllm and ratio_vs_transformers compare with the faster of their dtypes on this processor: where it has no
bfloat16 instructions and emulates them, float32. Each is the worst over the batch sizes. One file per kind of
processor: the widest instructions of `LLAMARL_KERNELS` that it offers; `path` in a row is what multiplied. Rows of
engines that take long have fewer repeats (`repeats`), and where a peer emulates its type, prompts and responses of a
fifth of the length (`scale`), which is in its favor: less attention for the same tokens.
Roofline: of one core, from the measured rates: the matmuls of all tokens or the weights read once per step, whichever
takes longer, and then the keys and values of all steps read once.
Profile: share of own time per function of the native engine; kernels count for the function that calls them.
""".splitlines()


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """An engine with one precision."""

    engine: str
    dtype: str
    script: str
    python: str = sys.executable

    @property
    def name(self) -> str:
        return f"{self.engine}-{SHORT[self.dtype]}"


ENGINES = [
    *(Peer(engine="ours", dtype=dtype, script="ours.py") for dtype in SHORT),
    *(Peer(engine="vllm", dtype=dtype, script="vllm_offline.py", python=VLLM_PYTHON) for dtype in list(SHORT)[:2]),
    *(Peer(engine="transformers", dtype=dtype, script="transformers_generate.py") for dtype in list(SHORT)[:2]),
]


class Worker:
    """One engine's process."""

    def __init__(self, peer: Peer, folder: Path, slots: int, *arguments: str) -> None:
        command = [peer.python, str(PEERS / peer.script), str(folder), peer.dtype, str(slots), *arguments]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1
        )

    def run(self, name: str, scale: float, seed: int, timeout_s: float = RUN_TIMEOUT_S) -> dict[str, Any]:
        """What one run took."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"name": name, "scale": scale, "seed": seed}) + "\n")
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-15:])
            raise SystemExit(f"{self.process.args}: no answer to {name} within {timeout_s:.0f} s\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        """Ends at the end of its input; killed when it does not."""
        try:
            self.process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self._log.close()


@contextmanager
def working(peer: Peer, folder: Path, slots: int, *arguments: str) -> Iterator[Worker]:
    worker = Worker(peer, folder, slots, *arguments)
    try:
        yield worker
    finally:
        worker.close()


def measure(model: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one model."""
    rows = []
    for slots in sorted(set(WORKLOADS.values())):
        names = [name for name, count in WORKLOADS.items() if count == slots]
        wanted = {name: [peer for peer in ENGINES if _is_wanted(peer, name, options)] for name in names}
        with ExitStack() as stack:
            workers = dict[str, Worker]()
            for peer in {peer.name: peer for peers in wanted.values() for peer in peers}.values():
                workers[peer.name] = stack.enter_context(working(peer, folder, slots))
                # One after the other: a start compiles, and that is not measured beside others.
                workers[peer.name].run(names[0], min(0.1, options.scale), 1000, START_TIMEOUT_S)
            for name, peers in wanted.items():
                rows += _in_turns(model, name, {peer: workers[peer.name] for peer in peers}, options)
    return rows


def _is_wanted(peer: Peer, name: str, options: argparse.Namespace) -> bool:
    if name in OURS_ONLY and peer.engine != "ours":
        return False
    there = os.access(peer.python, os.X_OK)
    return there and any(part in f"{name}/{peer.name}" for part in options.rows)


def _in_turns(model: str, name: str, workers: dict[Peer, Worker], options: argparse.Namespace) -> list[dict[str, Any]]:
    runs, repeats = defaultdict[Peer, list[dict[str, Any]]](list), dict.fromkeys(workers, options.repeats)
    for repeat in range(options.repeats):
        for peer, worker in workers.items():
            if repeat >= repeats[peer]:
                continue
            run = worker.run(name, _scale(peer, options), repeat)
            runs[peer].append(run)
            repeats[peer] = max(1, min(options.repeats, int(options.row_s / run["wall_s"])))
            print(f"{model} {name} {peer.name}: {run['tokens'] / run['cpu_s']:.0f} tokens/CPU-s", flush=True)
    return [_row(model, name, peer, found, _scale(peer, options)) for peer, found in runs.items()]


def _scale(peer: Peer, options: argparse.Namespace) -> float:
    """Peers that emulate their type get shorter prompts and responses, which their tokens/s hardly feel."""
    is_emulated = peer.engine != "ours" and peer.dtype == "bfloat16" and not HAS_BFLOAT16
    return options.scale * (options.emulated_scale if is_emulated else 1.0)


def _row(model: str, name: str, peer: Peer, runs: list[dict[str, Any]], scale: float) -> dict[str, Any]:
    def median(time_of: str) -> float:
        return statistics.median(run["tokens"] / run[time_of] for run in runs)

    extra = {key: value for key, value in runs[-1].items() if key not in ("cpu_s", "wall_s") and value is not None}
    return {
        "model": model, "workload": name, "engine": peer.engine, "dtype": peer.dtype, "repeats": len(runs),
        "scale": scale, **extra,
        "tokens_per_cpu_s": median("cpu_s"), "tokens_per_s": median("wall_s"),
        "cpu_s": [run["cpu_s"] for run in runs], "wall_s": [run["wall_s"] for run in runs],
    }  # fmt: skip


def machine_rates() -> dict[str, float]:
    """Of one core: bytes read per second, and operations per second of the best matmul here, by dtype."""
    torch.set_num_threads(1)
    numbers = torch.ones(1 << 26)
    rates = {"read_bytes": max(_rate(numbers.nbytes, way, numbers) for way in (torch.sum, partial(torch.dot, numbers)))}
    x, weight = torch.randn(128, 2048), torch.randn(2048, 2048)
    operations = 2 * 128 * 2048 * 2048
    for dtype in SHORT:
        kind = getattr(torch, dtype)
        ours = Linear(*quantize_rows(weight, dtype)) if dtype == "int8" else Linear(weight.to(kind))
        rates[dtype] = _rate(operations, ours, x)
        if dtype != "int8":
            torchs = partial(torch.nn.functional.linear, weight=weight.to(kind))
            rates[dtype] = max(rates[dtype], _rate(operations, torchs, x.to(kind)))
    return rates


def _rate(amount: float, function: Any, argument: torch.Tensor) -> float:
    best_s = float("inf")
    for _ in range(7):
        start_s = time.thread_time()
        function(argument)
        best_s = min(best_s, time.thread_time() - start_s)
    return amount / best_s


def add_roofline(row: dict[str, Any], rates: dict[str, float]) -> None:
    """The share of the least time that a core could take for these tokens."""
    sys.path.insert(0, str(PEERS))
    from work import workload

    shape, dtype = MODELS[row["model"]], row["dtype"]
    work = workload(row["workload"], shape.vocab_size, row["scale"], 0)
    layer = shape.hidden_size * (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layers = shape.num_layers * (layer + 3 * shape.hidden_size * shape.intermediate_size)
    head, new = shape.vocab_size * shape.hidden_size, work.num_new_tokens
    operations = 2 * layers * (new + sum(map(len, work.prompts))) + 2 * head * new
    full = 4 if dtype == "float32" else 2
    weight_bytes = layers * (1 if dtype == "int8" else full) + head * full
    lengths = zip(work.prompts, work.new_tokens, strict=True)
    seen = sum(work.group_size * count * (len(prompt) + count / 2) for prompt, count in lengths)
    kv_bytes = seen * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * full
    steps = new / WORKLOADS[row["workload"]]
    least_s = (
        max(operations / rates[dtype], steps * weight_bytes / rates["read_bytes"]) + kv_bytes / rates["read_bytes"]
    )
    row["roofline_tokens_per_s"] = new / least_s
    row["roofline_share"] = row["tokens_per_cpu_s"] / row["roofline_tokens_per_s"]


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of tokens per CPU-second; what was not measured is missing."""
    speed = {(r["model"], r["workload"], r["engine"], r["dtype"]): r["tokens_per_cpu_s"] for r in rows}

    def worst(model: str, dtype: str, workloads: tuple[str, ...], engine: str) -> float | None:
        ratios = []
        for name in workloads:
            peers = [speed[key] for other in SHORT if (key := (model, name, engine, other)) in speed]
            if peers and (model, name, "ours", dtype) in speed:
                ratios.append(speed[model, name, "ours", dtype] / max(peers))
        return min(ratios) if len(ratios) == len(workloads) else None

    figures = dict[str, Any]()
    for engine in ("vllm", "transformers"):
        for prefix, workloads in (("", UNIFORM), ("long_tail_", ("long_tail-32",))):
            figures[f"{prefix}ratio_vs_{engine}"] = {
                f"{model}_{SHORT[dtype]}": ratio
                for model in MODELS
                for dtype in SHORT
                if (ratio := worst(model, dtype, workloads, engine)) is not None
            }
    figures["grouped_ratio"] = {
        f"{model}_{SHORT[dtype]}": value / speed[model, "ungrouped", "ours", dtype]
        for (model, name, _, dtype), value in speed.items()
        if name == "grouped" and (model, "ungrouped", "ours", dtype) in speed
    }
    fills = {f"{r['model']}_{SHORT[r['dtype']]}": r["slot_fill"] for r in rows if "slot_fill" in r}
    return figures | {"slot_fill_long_tail": fills}


def profile(folder: Path, scale: float) -> list[list[Any]]:
    """Where the native engine's own time goes, in bfloat16."""
    with working(ENGINES[1], folder, 128, "profile") as worker:
        worker.run("uniform-128", min(0.1, scale), 1000, START_TIMEOUT_S)
        return worker.run("uniform-128", scale, 0)["profile"]


def on_cpu(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures so far, after each model."""
    rates = machine_rates()
    print(json.dumps(rates), flush=True)
    rows, profiles = list[dict[str, Any]](), dict[str, Any]()
    if options.add_to:
        before = json.loads(options.add_to.read_text(encoding="utf-8"))
        rows += [row for row in before["rows"] if row["model"] not in (options.models or MODELS)]
        profiles |= before["profile"]
    with tempfile.TemporaryDirectory() as temporary:
        for model in options.models or MODELS:
            folder = Path(temporary) / model
            save_model(new_model(MODELS[model], seed=0, std=0.02), folder, None)
            rows += measure(model, folder, options)
            profiles[model] = profile(folder, options.scale)
            for row in rows:
                if "roofline_share" not in row:
                    add_roofline(row, rates)
            yield {**summarize(rows), "machine_rates": rates, "rows": rows, "profile": profiles}


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="10m 35m 100m; default: all")
    parser.add_argument(
        "--rows", nargs="+", default=[""], metavar="TEXT", help="only rows with one of these in WORKLOAD/ENGINE"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--row-s", type=float, default=300.0, help="seconds for all repeats of a row; one always runs")
    parser.add_argument("--add-to", type=Path, metavar="FILE", help="a result whose rows of other models are kept")
    parser.add_argument("--scale", type=float, default=1.0, help="shortens prompts and responses")
    parser.add_argument(
        "--emulated-scale", type=float, default=0.2, help="--scale of peers in a type that this processor emulates"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: --scale 0.1 --repeats 1, nothing written")
    options = parser.parse_args()
    if options.quick:
        options.scale, options.repeats = 0.1, 1
    for figures in on_cpu(options):
        print(json.dumps({key: value for key, value in figures.items() if key != "rows"}, indent=2), flush=True)
        if not options.quick:
            settings = json.loads(json.dumps(vars(options), default=str))
            print(write_result(f"generation-{build.offered()[0]}", settings, figures, NOTES), flush=True)


if __name__ == "__main__":
    main()
