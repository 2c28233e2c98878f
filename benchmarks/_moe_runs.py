"""Runs of the demo with experts and of its dense twin: what they learn, what they take, and what replay does to the
KL."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _moe_kl import Problems, by_cause, mismatch
from _record import children_s

from llamarl.checkpoint.store import CheckpointStore, export_checkpoint
from llamarl.config import load_config
from llamarl.data.prompts import load_prompts
from llamarl.data.tokenizer import Tokenizer
from llamarl.distributed.mesh import CPU
from llamarl.generation.model import Precision
from llamarl.models.hf import load_model
from llamarl.models.transformer import Transformer
from llamarl.types import SamplingParams

ROOT = Path(__file__).parents[1]
FRESH = "{name = 'running_total', count = 2048, first = 91000}"
HELD_OUT = "{name = 'running_total', count = 1000}"
"""No base model has learnt from these."""
MIXTURE, DENSE = "demo_moe", "demo"
KINDS: tuple[Precision, ...] = ("bfloat16", "int8")
CAUSE_EVERY = 30
"""Steps after which the KL of a run is divided."""


def warm(name: str) -> None:
    """Makes the base model, where there is none."""
    if not (ROOT / "runs/base" / name / "model.safetensors").exists():
        command = [sys.executable, "-m", "llamarl", "sft", str(ROOT / f"configs/{name}_sft.toml")]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=1800)


def trained(name: str, run: str, folder: Path, *settings: str) -> dict[str, float]:
    """A run, and how many seconds it took, by the wall and of all processes."""
    command = [
        sys.executable, "-m", "llamarl", "train", str(ROOT / f"configs/{name}.toml"), "--name", run, "--output",
        str(folder), "--screen.kind", "lines", *settings,
    ]  # fmt: skip
    start_s, cpu_s = time.monotonic(), children_s()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=3600)
    return {"wall_s": time.monotonic() - start_s, "cpu_s": children_s() - cpu_s}


def learning(seeds: Sequence[int], steps: int, folder: Path) -> dict[str, Any]:
    """Accuracy on fresh problems, and time, of both, seed by seed in turns."""
    rows = list[dict[str, Any]]()
    settings = "--steps", str(steps), "--data.eval", FRESH, "--eval.max_prompts", "2048", "--eval.every_steps", "0"
    settings += "--checkpoint.every_steps", "0"
    for seed in seeds:
        for name in (DENSE, MIXTURE) if seed % 2 else (MIXTURE, DENSE):
            warm(name)
            run = f"{name}-{seed}"
            took = trained(name, run, folder, "--seed", str(seed), *settings)
            summary = json.loads((folder / run / "summary.json").read_text())
            told = {key: summary[key] for key in ("accuracy_before", "accuracy_after")}
            rows.append({"demo": name, "seed": seed, **told, **took, "steps_s": summary["wall_s"]})
            print(json.dumps(rows[-1]), flush=True)
    of = {name: [row for row in rows if row["demo"] == name] for name in (MIXTURE, DENSE)}
    pairs = [sorted(one, key=lambda row: row["seed"]) for one in of.values()]
    ratios = {
        key: statistics.median(ours[key] / dense[key] for ours, dense in zip(*pairs, strict=True))
        for key in ("cpu_s", "wall_s", "steps_s")
    }  # fmt: skip
    return {
        "accuracy_after": statistics.mean(row["accuracy_after"] for row in of[MIXTURE]),
        "accuracy_after_dense": statistics.mean(row["accuracy_after"] for row in of[DENSE]),
        "demo_time_ratio": ratios["cpu_s"],
        "demo_wall_ratio": ratios["wall_s"],
        "demo_steps_ratio": ratios["steps_s"],
        "learning": rows,
    }


def problems(name: str, num: int, group_size: int) -> Problems:
    """Held-out ones, asked as in a run."""
    config = load_config(ROOT / f"configs/{name}.toml", ["--data.eval", HELD_OUT])
    tokenizer = Tokenizer(ROOT / config.model.path)
    prompts = load_prompts(config.data, tokenizer, 512, "eval").prompts[:num]
    assert len(prompts) == num
    most = config.rollout.max_new_tokens
    sampling = SamplingParams(max_new_tokens=most, stop_token_ids=tokenizer.eos_token_ids)
    return Problems(prompts=prompts, group_size=group_size, sampling=sampling)


def base_kl() -> dict[str, Any]:
    """KL of generators of both base models to float32 trainers."""
    found = dict[str, dict[str, dict[str, float]]]()
    for name in (MIXTURE, DENSE):
        warm(name)
        model = load_model(ROOT / "runs/base" / name, torch.float32, CPU)
        found[name] = {kind: mismatch(model, kind, problems(name, 1000, 4)) for kind in KINDS}
        print(json.dumps({name: found[name]}), flush=True)
    ratios = {
        key: {kind: found[MIXTURE][kind][of] / found[DENSE][kind]["kl"] for kind in KINDS}
        for key, of in (("kl_ratio", "kl"), ("kl_ratio_live", "kl_live"))
    }  # fmt: skip
    return ratios | {"kl": found}


def causes(steps: int, folder: Path) -> dict[str, Any]:
    """KL to the behavior policy of runs with replay and without, and by cause along those with it."""
    warm(MIXTURE)
    in_runs, divided = dict[str, dict[str, dict[str, float]]](), dict[str, dict[str, dict[str, float]]]()
    rows = list[dict[str, Any]]()
    for kind in KINDS:
        for replay in ("on", "off"):
            keep = ["--checkpoint.every_steps", "1", "--checkpoint.keep", str(steps)] if replay == "on" else []
            settings = ["--generator.dtype", kind, "--generator.router_replay", str(replay == "on").lower(), *keep]
            trained(MIXTURE, f"{kind}-{replay}", folder, "--steps", str(steps), "--eval.every_steps", "0", *settings)
            lines = (folder / f"{kind}-{replay}/metrics.jsonl").read_text().splitlines()
            told = [row.get("kl_to_behavior") for row in map(json.loads, lines)]
            kl = [value for value in told if value is not None]
            figures = {"mean": statistics.mean(kl), "median": statistics.median(kl), "largest": max(kl)}
            in_runs.setdefault(kind, {})[replay] = figures
        run = folder / f"{kind}-on"
        known = {*CheckpointStore(run / "checkpoints", keep=steps).steps()}  # one may have come later than it was due
        paired = [step for step in known if step - 1 in known]
        ends = [max(step for step in paired if step <= due) for due in range(CAUSE_EVERY, steps + 1, CAUSE_EVERY)]
        found = [by_cause(_model(run, end - 1), _model(run, end), kind, problems(MIXTURE, 256, 2)) for end in ends]
        divided[kind] = {
            replay: {cause: statistics.mean(one[replay][cause] for one in found) for cause in found[0][replay]}
            for replay in ("on", "off")
        }  # fmt: skip
        print(json.dumps({kind: [in_runs[kind], divided[kind], found]}), flush=True)
        rows += [{"dtype": kind, "step": end, **one} for end, one in zip(ends, found, strict=True)]
    return {"kl_of_runs": in_runs, "kl_by_cause": divided, "kl_by_cause_and_step": rows}


def _model(run: Path, step: int) -> Transformer:
    folder = run / f"model-{step}"
    export_checkpoint(run / "checkpoints", str(ROOT / "runs/base" / MIXTURE), folder, step, None, merge=False)
    return load_model(folder, torch.float32, CPU)
