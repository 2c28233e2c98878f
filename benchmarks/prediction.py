"""One short run of the demo as a profile; then other settings, each predicted from that profile before it is run.

    python benchmarks/prediction.py [--steps 40] [--quiet 0.15] [--tries 3] [--settings 4] [--seed 0]

All runs see the same problems in the same order (same seed), so steps of equal number do comparable work. The first
step of each run is left out: it begins with empty generators and cold caches. Others who use the machine spoil a run:
it is repeated, at most `--tries` times, until they took less than `--quiet` cores, and the quietest one counts.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _predict import predict_step
from _record import children_s, write_result

from llamarl.config import RunConfig, load_config
from llamarl.parts.forecast.constants import load_profile
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.hardware import Pool, find_gpu
from llamarl.parts.forecast.lengths import Lengths
from llamarl.parts.forecast.request import PlanRequest
from llamarl.parts.forecast.shapes import find_model
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.run import simulate
from llamarl.parts.forecast.simulator.split import choose_split

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs/demo.toml"
COMMON = ["--eval.every_steps", "0", "--eval.max_prompts", "1", "--checkpoint.every_steps", "0",
          "--screen.kind", "none"]  # fmt: skip
VALUES = {
    "rollout.max_staleness": (0, 1, 2),
    "rollout.group_size": (4, 8, 16),
    "rollout.prompts_per_step": (8, 16),
    "rollout.max_new_tokens": (48, 96, 144),
    "generator.replicas": (1, 2),
}
"""A setting is one of each, drawn at random."""
WAYS = ("simulator", "planner", "simulator_given_others")
GOAL = 0.10
FIGURES = ("step_s", "step_s_median", "samples_per_s", "trainer_idle_share", "generator_idle_share", "staleness_mean")
RELATIVE = ("step_s", "step_s_median", "samples_per_s")
WAIT_S = 60.0
"""Longest wait for a quiet moment before a run."""
NOTES = """\
step_s: mean of the steps after the first, which is what a run's duration is made of. step_s_median stands beside it:
with staleness 1 short steps (a batch was waiting) alternate with long ones, and the median jumps between the two.
samples_per_s: of all steps after the first. Idle shares: of the loop.
The simulator runs the real controller with the profile's costs and shares the machine's cores among executors and
controller. It repeats the profiled run's groups (lengths and rewards) in their order, so what the policy learns
differently under other settings is not foreseen: a response that another limit cuts counts as wrong, a smaller group is
a part of the profiled one, and a larger one has more responses that are as alike as those of profiled groups.
By `contention` of the profile the simulation of the profiled run takes as long as the run; all settings have it.
The planner's roofline gives every executor a core of its own: with 2 generators on 2 cores it is too fast.
Errors are predicted / measured - 1 for times and rates; differences for shares and staleness (in steps).
again: the profiled setting once more, after all others: how far two runs of one setting are apart, which no prediction
undercuts.
other_cores: cores that processes outside the run kept busy during it. simulator_given_others is no prediction: it tells
the simulator, after the run, that so many cores were not there; what error it takes away was not the model's.
""".splitlines()


def drawn(count: int, seed: int) -> dict[str, list[str]]:
    """Settings other than the profiled one, by name."""
    random, settings = np.random.default_rng(seed), dict[str, list[str]]()
    own = load_config(DEMO)
    known = [getattr(getattr(own, key.split(".")[0]), key.split(".")[1]) for key in VALUES]
    while len(settings) < count:
        chosen = [int(random.choice(values)) for values in VALUES.values()]
        words = [[f"--{key}", str(value)] for key, value in zip(VALUES, chosen, strict=True)]
        window = min(own.rollout.window, (chosen[0] + 1) * chosen[2])
        if chosen != known:
            name = ",".join(f"{key.partition('.')[2]}={value}" for key, value in zip(VALUES, chosen, strict=True))
            settings[name] = [*(word for pair in words for word in pair), "--rollout.window", str(window)]
    return settings


def measure(name: str, overrides: list[str], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The quietest of a few runs, its figures."""
    runs = list[dict[str, Any]]()
    while len(runs) < options.tries and not (runs and runs[-1]["other_cores"] < options.quiet):
        _wait_for_quiet(options.quiet)
        runs.append(_run(f"{name}-{len(runs)}".replace(",", "-").replace("=", "-"), overrides, folder, options.steps))
        print(name, json.dumps(runs[-1]), flush=True)
    return min(runs, key=lambda run: run["other_cores"])


def _run(name: str, overrides: list[str], folder: Path, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "llamarl", "train", str(DEMO), "--name", name, "--output", str(folder),
               "--steps", str(steps), *COMMON, *overrides]  # fmt: skip
    busy_s, own_s, start_s = _busy_s(), children_s(), time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=1200)
    others_s = (_busy_s() - busy_s) - (children_s() - own_s)
    other_cores = max(0.0, others_s / (time.monotonic() - start_s))
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "step"]
    busy = json.loads((folder / name / "summary.json").read_text())
    generators = [share for key, share in busy.items() if key.startswith("busy_share.generator")]
    step_s = [row["step_s"] for row in rows[1:]]
    samples = rows[0]["samples_per_s"] * rows[0]["step_s"]
    return {
        "name": name,
        "step_s": statistics.mean(step_s),
        "step_s_median": statistics.median(step_s),
        "samples_per_s": samples * len(step_s) / sum(step_s),
        "trainer_idle_share": 1 - busy["busy_share.trainer"],
        "generator_idle_share": 1 - statistics.mean(generators),
        "staleness_mean": statistics.mean(row["staleness_mean"] for row in rows),
        "other_cores": other_cores,
    }


def _busy_s() -> float:
    """Processor seconds of everybody since the machine started, those that its host gave to others included."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def _wait_for_quiet(cores: float) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        busy_s = _busy_s()
        time.sleep(2)
        if (_busy_s() - busy_s) / 2 < cores:
            return


def predict(profile: Path, overrides: list[str], steps: int) -> dict[str, dict[str, float | None]]:
    """The figures of a setting from the profile alone, by simulator and by roofline."""
    config = _config(overrides, steps)
    return {"simulator": _simulated(Costs.load(profile), config), "planner": _planned(profile, config)}


def explain(profile: Path, overrides: list[str], steps: int, other_cores: float) -> dict[str, float | None]:
    """The simulator's figures when it knows how many cores others took; no prediction."""
    costs = Costs.load(profile)
    return _simulated(replace(costs, cores=costs.cores - other_cores), _config(overrides, steps))


def _config(overrides: list[str], steps: int) -> RunConfig:
    config = load_config(DEMO, ["--steps", str(steps), *COMMON, *overrides])
    return config.model_copy(update={"data": config.data.model_copy(update={"eval": None})})


def _simulated(costs: Costs, config: RunConfig) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory() as folder:
        split = choose_split(config, costs, None, None)
        simulation = simulate(config, costs, Faults(), split, Path(folder) / "metrics.jsonl")
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    return {
        "step_s": float(simulation.step_s.mean()),
        "step_s_median": float(np.median(simulation.step_s)),
        "samples_per_s": samples / float(simulation.step_s.mean()),
        "trainer_idle_share": 1 - simulation.accounts.role_share["trainer"],
        "generator_idle_share": 1 - simulation.accounts.role_share["generator"],
        "staleness_mean": simulation.staleness_mean,
    }


def _planned(profile: Path, config: RunConfig) -> dict[str, float | None]:
    costs, measured, rollout = Costs.load(profile), load_profile(profile), config.rollout
    tokens = np.array([tokens for group in costs.measured_groups for tokens, _ in group], dtype=np.float64)
    pool = Pool(gpu=measured.device(find_gpu("cpu-core")), count=1)
    request = PlanRequest(
        model=find_model(str(ROOT / config.model.path)),
        prompt_tokens=costs.prompt_tokens,
        lengths=Lengths.measured(np.minimum(tokens, rollout.max_new_tokens)),
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        max_staleness=max(1, rollout.max_staleness),
        pools=(pool,),
        constants=measured.constants,
    )
    found = predict_step(
        request,
        pool,
        staleness=rollout.max_staleness,
        replicas=config.generator.replicas,
        max_running=config.generator.max_running,
        microbatch_tokens=config.trainer.microbatch_tokens,
    )
    return {
        "step_s": found.step_s,
        "step_s_median": None,
        "samples_per_s": request.num_samples / found.step_s,
        "trainer_idle_share": found.trainer_idle_share,
        "generator_idle_share": found.generator_idle_share,
        "staleness_mean": None,
    }


def errors(predicted: dict[str, float | None], measured: dict[str, Any]) -> dict[str, float | None]:
    """Relative for times and rates, differences for shares and staleness."""
    result = dict[str, float | None]()
    for name in FIGURES:
        value = predicted[name]
        if value is None:
            result[name] = None
        else:
            result[name] = value / measured[name] - 1 if name in RELATIVE else value - measured[name]
    return result


def main() -> None:
    """Profiles, predicts, measures, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quiet", type=float, default=0.15, metavar="CORES")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--settings", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of settings")
    options = parser.parse_args()
    settings = drawn(options.settings, options.seed)
    rows = dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = measure("profile", [], folder, options)
        profile = folder / "profile.json"
        command = [sys.executable, "-m", "llamarl", "profile", str(folder / base["name"]), "--output", str(profile)]
        subprocess.run(command, check=True, cwd=ROOT)
        described = json.loads(profile.read_text())
        del described["costs"]["measured_groups"]  # thousands of numbers
        predictions = {name: predict(profile, overrides, options.steps) for name, overrides in settings.items()}
        itself = predict(profile, [], options.steps)
        for name, overrides in settings.items():
            measured = measure(name, overrides, folder, options)
            rows[name] = {"measured": measured}
            known = explain(profile, overrides, options.steps, measured["other_cores"])
            for way, predicted in (predictions[name] | {"simulator_given_others": known}).items():
                rows[name][way] = {"predicted": predicted, "error": errors(predicted, measured)}
            print(name, json.dumps(rows[name]), flush=True)
        again = measure("again", [], folder, options)

    def spread(way: str, figure: str) -> float | None:
        values = [abs(row[way]["error"][figure]) for row in rows.values() if row[way]["error"][figure] is not None]
        return statistics.median(values) if values else None

    medians = {way: {figure: spread(way, figure) for figure in FIGURES} for way in WAYS}
    worst = {figure: max(abs(row["simulator"]["error"][figure]) for row in rows.values()) for figure in FIGURES}
    figures = {
        "own_machine": {"median_error": medians["simulator"]["step_s"], "goal": GOAL, "median_errors": medians},
        "worst_errors_of_simulator": worst,
        "profiled_run": {way: {"predicted": p, "error": errors(p, base)} for way, p in itself.items()}
        | {"measured": base, "again": {"measured": again, "error": errors(base, again)}},
        "settings_predicted": rows,
        "profile": described,
    }
    print(json.dumps({"own_machine": figures["own_machine"], "worst": worst}, indent=2))
    print(write_result("prediction", vars(options) | {"settings": settings}, figures, NOTES))


if __name__ == "__main__":
    main()
