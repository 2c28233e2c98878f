"""A real model learns a real task on two cores: SmolLM2-135M on SVAMP, by seed and by precision.

    python benchmarks/real.py [--ways bfloat16 float32 stochastic] [--seeds 3] [--steps 50] [--more RESULT]
    python benchmarks/real.py --more RESULT --against CHECKOUT --pairs 3    # seconds of a step, paired

Runs `examples/real/svamp.toml` as `make demo-real` does (`examples/real/make_model.py` makes the model). The result is
written after each run, so a stopped script continues with `--more` of its own file. With seed 0 of the default way the
export is evaluated, too, and must answer as the run's last evaluation did.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from _real_picture import PICTURE, draw
from _record import write_result

ROOT = Path(__file__).parents[1]
CONFIG = "examples/real/svamp.toml"
WAYS = {
    "bfloat16": [],
    "float32": ["--trainer.dtype", "float32", "--generator.dtype", "float32"],
    "stochastic": ["--trainer.weights", "bfloat16"],
}
"""The default: bfloat16 with float32 masters; float32 on both sides; bfloat16 weights, rounded stochastically."""
NOTES = [
    "accuracy: greedy, of 200 held-out problems; a standard error is about 2 points.",
    "minutes: of the run without making the model; runs may have shared the machine, see load_average.",
    "mismatch_mean_max: largest mean difference of log-probabilities between generator and trainer after a sync, nats.",
    "step_s: median seconds of a step.  speedup: median over pairs of the other checkout's step_s over this one's.",
]  # fmt: skip


def train(checkout: Path, name: str, options: list[str], output: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics."""
    command = [
        sys.executable, "-P", "-m", "llamarl", "train", str(ROOT / CONFIG), "--name", name, "--output", str(output),
        "--overwrite", "--screen.kind", "lines", *options,
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{ROOT}"}  # the reward is a file of this checkout
    subprocess.run(command, check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, timeout=5400)
    return metrics_of(output / name)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def values_of(steps: list[dict[str, Any]], key: str) -> list[float]:
    return [round(row[key], 4) for row in steps if row.get(key) is not None]


def tens(steps: list[dict[str, Any]], key: str) -> list[float]:
    """Returns means over ten steps each."""
    parts = (values_of(steps[at : at + 10], key) for at in range(0, len(steps), 10))
    return [round(statistics.mean(part), 4) for part in parts if part]


def run(way: str, seed: int, output: Path, only: list[str]) -> dict[str, Any]:
    """Returns the row of one run. `only` are options that make it shorter."""
    start_s, name = time.monotonic(), f"{way}-{seed}"
    rows = train(ROOT, name, ["--seed", str(seed), *WAYS[way], *only], output)
    steps = [row for row in rows if row["kind"] == "step"]
    accuracy = {row["step"]: row["accuracy"] for row in rows if row["kind"] == "eval"}
    last = max(accuracy)
    return {
        "way": way,
        "seed": seed,
        "accuracy": {str(step): round(value, 4) for step, value in accuracy.items()},
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[last],
        "fall_points": 100 * (max(accuracy.values()) - accuracy[last]),
        "minutes": (time.monotonic() - start_s) / 60,
        "mismatch_mean_max": max(values_of(steps, "extra.mismatch_mean"), default=0.0),
        "step_s": statistics.median(row["step_s"] for row in steps),
        "reward": tens(steps, "reward_mean"),
        "entropy": tens(steps, "extra.entropy_mean"),
        "unserved": values_of(steps, "extra.unserved"),
        "load_average": os.getloadavg()[1],
    }  # fmt: skip


def export_equals_run(name: str, output: Path) -> dict[str, Any]:
    """Evaluates the run's folder and its export, and compares them response by response and with the run itself."""
    export = output / f"{name}-export"
    subprocess.run(
        [sys.executable, "-m", "llamarl", "export", str(output / name), str(export)], check=True, cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    found = []
    for model in (output / name, export):
        rows = output / "responses.jsonl"
        command = [sys.executable, "-m", "llamarl", "eval", str(model), "--config", str(output / name / "config.toml"),
                   "--output", str(rows)]  # fmt: skip
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        found.append({row["prompt_id"]: (row["response"], row["right"]) for row in map(json.loads, rows.open())})
    right = [sum(one for _, one in answers.values()) / len(answers) for answers in found]
    summary = json.loads((output / name / "summary.json").read_text())
    return {
        "export_equals_run": found[0] == found[1] and abs(right[1] - summary["accuracy_after"]) < 1e-9,
        "accuracy_of_run": summary["accuracy_after"], "accuracy_of_export": right[1],
    }  # fmt: skip


def forecast(name: str, output: Path) -> dict[str, float]:
    """Returns the seconds of a step by the dry run, and measured. Only groups with a gradient are trained on, and the
    dry run counts all, so the measured ones are those of the line through the run's steps at its full number."""
    command = [sys.executable, "-m", "llamarl", "train", CONFIG, "--dry-run"]
    said = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    found = re.search(r"([\d.]+) s, if every group has a gradient", said)
    assert found, "the dry run forecasts no step"
    steps = [row for row in metrics_of(output / name) if row["kind"] == "step"][1:]
    per_step = tomllib.loads((ROOT / CONFIG).read_text())["rollout"]["prompts_per_step"]
    trained = [per_step - row["extra.flat_groups"] for row in steps]
    line = statistics.linear_regression(trained, [row["extra.train_s"] for row in steps])
    measured_s = line.intercept + line.slope * per_step
    forecast_s = float(found[1])
    return {"dry_run_step_s": forecast_s, "full_step_s": measured_s, "dry_run_ratio": forecast_s / measured_s}


def paired(against: Path, pairs: int, output: Path) -> list[dict[str, float]]:
    """Returns the median seconds of a step here and in another checkout, in turns."""
    options = ["--steps", "8", "--eval.every_steps", "0", "--eval.max_prompts", "1", "--checkpoint.every_steps", "0",
               "--weight_sync.max_mismatch", "100"]  # fmt: skip
    found = []
    for pair in range(pairs):
        row = {}
        for who, checkout in (("here", ROOT), ("other", against)):
            steps = [row for row in train(checkout, f"speed-{who}", [*options, "--seed", str(pair)], output)
                     if row["kind"] == "step"]  # fmt: skip
            # The first steps wait for the first rollouts; asynchronous steps vary, so all later seconds count.
            row[who] = (steps[-1]["wall_s"] - steps[1]["wall_s"]) / (len(steps) - 2)
        found.append(row | {"ratio": row["other"] / row["here"], "load_average": os.getloadavg()[0]})
        print(json.dumps(found[-1]), flush=True)
    return found


def figures(runs: list[dict[str, Any]], others: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in dict.fromkeys(row["way"] for row in runs):
        own = [row for row in runs if row["way"] == way]
        keys = ("accuracy_before", "accuracy_after", "fall_points", "minutes", "step_s")
        of_way = {key: statistics.median(row[key] for row in own) for key in keys} | {"seeds": len(own)}
        of_way["mismatch_mean_max"] = max(row["mismatch_mean_max"] for row in own)
        if way == "bfloat16":
            found |= of_way
        found.setdefault("precision", {})[way] = of_way
    # Shorter runs have the same schedule of the learning rate, so they are compared at the last step that all have.
    common = str(min(max(map(int, row["accuracy"])) for row in runs))
    for way, of_way in found["precision"].items():
        own = [row for row in runs if row["way"] == way]
        of_way["accuracy_at"] = {common: statistics.median(row["accuracy"][common] for row in own)}
    if others.get("speed_pairs"):
        found["speedup"] = statistics.median(row["ratio"] for row in others["speed_pairs"])
    return found | others | {"runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["bfloat16"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="end runs earlier, on the same schedule of the learning rate")
    parser.add_argument("--more", type=Path, help="a result whose runs are taken over")
    parser.add_argument("--against", type=Path, help="another checkout, to compare the seconds of a step with, only")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--picture", action="store_true", help="draw docs/pictures/real.svg from --more, only")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/real")
    options = parser.parse_args()
    before = json.loads(options.more.read_text()) if options.more else {}
    runs: list[dict[str, Any]] = before.get("runs", [])
    kept = (
        "dry_run_step_s",
        "full_step_s",
        "dry_run_ratio",
        "speed_pairs",
        "export_equals_run",
        "accuracy_of_run",
        "accuracy_of_export",
        "ratio_vs_trl",
    )
    others = {key: before[key] for key in kept if key in before}
    settings = {"config": CONFIG, "ways": WAYS}
    if options.picture:
        PICTURE.write_text(draw(runs), encoding="utf-8")
        return
    if options.against:
        others["speed_pairs"] = paired(options.against, options.pairs, options.output)
        print(write_result("real", settings, figures(runs, others), NOTES))
        return
    for seed in range(options.seeds):
        for way in options.ways:
            if any((row["way"], row["seed"]) == (way, seed) for row in runs):
                continue
            runs.append(run(way, seed, options.output, ["--steps", str(options.steps)] if options.steps else []))
            print(
                json.dumps({key: runs[-1][key] for key in ("way", "seed", "accuracy", "minutes", "step_s")}), flush=True
            )
            if (way, seed) == ("bfloat16", 0):
                others |= export_equals_run("bfloat16-0", options.output)
                others |= forecast("bfloat16-0", options.output)
            write_result("real", settings, figures(runs, others), NOTES)
    print(write_result("real", settings, figures(runs, others), NOTES))


if __name__ == "__main__":
    main()
