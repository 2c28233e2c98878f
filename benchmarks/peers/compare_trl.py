"""llamarl against TRL's GRPOTrainer: same model, data, reward, group size and optimizer, same machine, runs in turn.

    python3.11 -m venv .venv-trl && .venv-trl/bin/pip install -r benchmarks/peers/trl-constraints.txt pydantic
    python benchmarks/peers/compare_trl.py --trl-python .venv-trl/bin/python [--pairs 3] [--steps 60]
    python benchmarks/peers/compare_trl.py --trl-python .venv-trl/bin/python --config examples/real/svamp.toml --name \
        peers-real --pairs 1 --steps 6 --no-accuracy --trl-accumulation 8

Each system has the whole machine: TRL one process with `--trl-threads`, llamarl one thread per executor. Speed is
samples per second of the training loop, without imports and evaluation. Memory is the peak of the summed proportional
set size of all processes of a run. Both final models are judged by
`llamarl eval`, greedy, on the same held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from _record import write_result

from llamarl.config import load_config
from llamarl.run.prepare import train_prompts

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs/demo.toml"
CONTEXT, MOST_PROMPTS = 8192, 4096
"""Tokens of a prompt, and prompts for TRL, at most."""
SAMPLE_S = 0.25
"""Between two looks at the memory of a run."""
TIMEOUT_S = 3600


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended
        return []
    return [pid, *(one for child in children for one in tree(child))]


def memory_bytes(pid: int) -> int:
    """Proportional set size of a process tree: shared pages are counted once."""
    total = 0
    for one in tree(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def run(command: list[str], env: dict[str, str], log: Path) -> int:
    """Runs a command in a session of its own; its peak memory in bytes."""
    peak, ended = 0, threading.Event()
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | env, stdout=output, stderr=subprocess.STDOUT)

        def watch() -> None:
            nonlocal peak
            while not ended.wait(SAMPLE_S):
                peak = max(peak, memory_bytes(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            process.wait(TIMEOUT_S)
        finally:
            ended.set()
            watcher.join()
            process.kill()
    if process.returncode:
        raise SystemExit(f"{command[:4]} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return peak


def accuracy(model: Path, options: argparse.Namespace) -> float | None:
    """Share of held-out prompts that a model answers, greedily. None where it is not asked for."""
    if options.no_accuracy:
        return None
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "responses.jsonl"
        command = [
            sys.executable,
            "-m",
            "llamarl",
            "eval",
            str(model),
            "--config",
            str(options.config),
            "--output",
            str(output),
        ]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
        rows = [json.loads(line) for line in output.read_text().splitlines()]
    return statistics.mean(bool(row["right"]) for row in rows)


def llamarl_run(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "llamarl", "train", str(options.config), "--name", "ours", "--output", str(folder),
        "--seed", str(seed), "--steps", str(options.steps), "--eval.every_steps", "0", "--checkpoint.every_steps", "0",
        "--screen.kind", "lines",
    ]  # fmt: skip
    peak = run(command, {"OMP_NUM_THREADS": "1"}, folder / "ours.log")
    summary = json.loads((folder / "ours/summary.json").read_text())
    subprocess.run(
        [sys.executable, "-m", "llamarl", "export", str(folder / "ours"), str(folder / "ours-hf")],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "ours/metrics.jsonl").read_text().splitlines()]
    return {
        "system": "llamarl",
        "seed": seed,
        "samples_per_s": summary["samples_per_s"],
        "wall_s": summary["wall_s"],
        "peak_memory_bytes": peak,
        "train_rewards": [row["reward_mean"] for row in rows if row["kind"] == "step"],
        "accuracy": accuracy(folder / "ours-hf", options),
    }


def trl_run(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    config, steps = load_config(options.config, []), options.steps
    prompts = folder / "prompts.jsonl"
    with prompts.open("w") as file:
        for one in train_prompts(config, CONTEXT, most=MOST_PROMPTS).prompts:
            file.write(json.dumps({"prompt": one.text, "answer": one.answer}) + "\n")
    settings = config.rollout.model_dump() | config.trainer.model_dump(mode="json") | {
        "steps": steps, "seed": seed, "accumulation": options.trl_accumulation,
        "reward": "gsm8k" if options.config == DEMO else "calculation",
    }  # fmt: skip
    output = folder / "trl"
    command = [
        options.trl_python, str(Path(__file__).with_name("trl_grpo.py")), "--model", str(ROOT / config.model.path),
        "--prompts", str(prompts), "--settings", json.dumps(settings), "--output", str(output),
    ]  # fmt: skip
    peak = run(command, {"OMP_NUM_THREADS": str(options.trl_threads), "PYTHONPATH": str(ROOT)}, folder / "trl.log")
    figures = json.loads((output / "figures.json").read_text())
    samples = steps * config.rollout.prompts_per_step * config.rollout.group_size
    return {
        "system": "trl",
        "seed": seed,
        "samples_per_s": samples / figures["wall_s"],
        "wall_s": figures["wall_s"],
        "peak_memory_bytes": peak,
        "train_rewards": figures["rewards"],
        "accuracy": accuracy(output, options),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="interpreter of TRL's environment")
    parser.add_argument("--trl-threads", type=int, default=os.cpu_count(), help="of TRL's one process")
    parser.add_argument(
        "--trl-accumulation", type=int, default=1, help="TRL's microbatches of a step; 8 for svamp.toml"
    )
    parser.add_argument("--config", type=Path, default=DEMO, help="the run of both")
    parser.add_argument("--name", default="peers", help="of the result")
    parser.add_argument("--no-accuracy", action="store_true", help="do not judge the final models")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    base = load_config(arguments.config, []).model.path
    if arguments.config == DEMO and not (ROOT / base).exists():
        subprocess.run([sys.executable, "-m", "llamarl", "sft", "configs/demo_sft.toml"], cwd=ROOT, check=True)
    rows = list[dict[str, Any]]()
    for seed in range(arguments.pairs):
        with tempfile.TemporaryDirectory(prefix="peers-") as name:
            rows.append(llamarl_run(arguments, seed, Path(name)))
            rows.append(trl_run(arguments, seed, Path(name)))
        for row in rows[-2:]:
            print({key: value for key, value in row.items() if key != "train_rewards"}, flush=True)
    ours, theirs = ([row for row in rows if row["system"] == system] for system in ("llamarl", "trl"))

    def ratio(key: str) -> float:
        return statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))

    def reward(row: dict[str, Any]) -> float:
        return statistics.mean(row["train_rewards"]) if row["accuracy"] is None else row["accuracy"]

    figures = {
        "ratio_vs_trl": {"samples_per_s": ratio("samples_per_s"), "peak_memory": ratio("peak_memory_bytes")},
        "reward_ours": statistics.median(reward(row) for row in ours),
        "reward_trl": statistics.median(reward(row) for row in theirs),
        "rows": rows,
    }
    versions = subprocess.run(
        [arguments.trl_python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True, timeout=60
    ).stdout
    wanted = ("trl", "transformers", "torch", "accelerate")
    settings = {
        "config": str(arguments.config),
        "pairs": arguments.pairs,
        "steps": arguments.steps,
        "trl_threads": arguments.trl_threads,
        "trl_versions": {row["name"]: row["version"] for row in json.loads(versions) if row["name"] in wanted},
    }
    notes = [
        "reward: greedy accuracy on held-out prompts, or the mean training reward without accuracy",
        "peak_memory: ours over TRL's, all processes together",
        "TRL generates with transformers, its default; vLLM beside it was not tried",
    ]
    print(write_result(arguments.name, settings, figures, notes))


if __name__ == "__main__":
    main()
