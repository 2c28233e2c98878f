"""A short real run as measured constants: costs for the simulator, efficiencies for the planner.

Fits exclude disturbed steps. On a CPU, trainer and generator times are CPU times, which barely depend on other users of
the cores. The simulation models sharing of cores.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.config import ConfigError
from llamarl.observability.spans import Span
from llamarl.parts.forecast.constants import Constants
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.generation import prompt_flops, read_bytes, steady_context_tokens, token_flops
from llamarl.parts.forecast.hardware import BF16, CPU, GPUS, Gpu, Pool
from llamarl.parts.forecast.lengths import Lengths
from llamarl.parts.forecast.recorded import RecordedRun
from llamarl.parts.forecast.request import PlanRequest
from llamarl.parts.forecast.shapes import find_model
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.run import simulate
from llamarl.parts.forecast.simulator.split import choose_split
from llamarl.parts.forecast.training import step_flops
from llamarl.training.probe import is_probed

UNLIMITED_BANDWIDTH = 1e18
"""Bandwidth that makes reading free. On CPUs the time to read weights is measured as a part of the forward."""
LEAST_S = 1e-9
"""Minimum value of a fit."""
DISTURBED = 3.0
"""Ratio of a step's duration to its simulation, relative to other steps, above which the machine was disturbed."""
TRIMMED = 0.1
"""Share of the shortest and of the longest spans that a mean excludes."""


def make_profile(run: RecordedRun, *, cores: float, gpu: str | None) -> dict[str, Any]:
    """Returns the profile of a run, for `llamarl plan --profile` and `llamarl simulate --costs`.

    Args:
        cores: cores of the machine, shared by executors on `cpu`.
        gpu: kind of the GPU, for runs on GPUs.

    Raises:
        ConfigError: the run was on GPUs and `gpu` is missing, or a value cannot be measured.
    """
    devices = {run.config.trainer.device, run.config.generator.device}
    if gpu is None and devices != {"cpu"}:
        raise ConfigError(
            f"{run.path} ran on {run.config.trainer.device!r}; say on which kind, --gpu h100-80g for example"
        )
    if gpu is not None and gpu not in GPUS:
        raise ConfigError(f"`--gpu {gpu}` is not in the table; known: {', '.join(GPUS)}")
    costs = replace(measure(run), cores=cores if "cpu" in devices else 0)
    costs = replace(costs, contention=_contention(run, costs))
    constants, device = planner_constants(run, costs, None if devices == {"cpu"} else GPUS[gpu or CPU], cores)
    described = {
        "path": str(run.path), "steps": len(run.counters["train_s"]) + 1, "device": gpu or CPU, "cores": cores,
        "model": run.config.model.path,
    }  # fmt: skip
    return {"run": described, "constants": constants, "gpu": device, "costs": asdict(costs)}


def _contention(run: RecordedRun, costs: Costs) -> float:
    """Returns `Costs.contention` for which a simulation takes as long as the run, except disturbed steps. At least 1,
    and 1 if the run cannot be simulated."""
    config = run.config.model_copy(update={"steps": len(run.step_s) + 1})

    def step_s(contention: float) -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            split, given = choose_split(config, costs, None, None), replace(costs, contention=contention)
            return simulate(config, given, Faults(), split, Path(folder) / "metrics.jsonl").step_s

    try:
        without_s, twice_s = step_s(1.0), step_s(2.0)
    except ConfigError:  # executors without a simulation
        return 1.0
    undisturbed = run.step_s < DISTURBED * without_s * float(np.median(run.step_s / without_s))
    longer_s, most_s = ((one - without_s)[undisturbed].sum() for one in (run.step_s, twice_s))
    return 1 + max(0.0, float(longer_s / most_s)) if most_s > 0 else 1.0


def measure(run: RecordedRun) -> Costs:
    """Returns all fits of a run. Raises ConfigError if the trace lacks the work of an executor."""
    decode_base_s, decode_per_rollout_s, prefill_token_s = _forward(run)
    train_base_s, train_token_s = robust_line(run.counters["num_input_tokens"], run.counters["train_s"])
    trains, publishes = _spans(run, "trainer", "train"), _spans(run, "trainer", "weight_sync")
    generators = [name for name in run.spans if name.startswith("generator")]
    adopts_s = [_length_s(span) for name in generators for span in _spans(run, name, "weight_sync")]
    if len(trains) < 2 or not publishes or not adopts_s:
        raise ConfigError(f"{run.path / 'trace.json'} shows no training with weight sync; profile a whole run")
    samples = run.config.rollout.prompts_per_step * run.config.rollout.group_size
    scores = [span for span in _spans(run, "reward", "score") if trains[0].start_s <= span.start_s < trains[-1].start_s]
    scores_s = np.sort([_length_s(span) for span in scores])
    cut = math.floor(TRIMMED * len(scores_s))
    pause_s = sum(adopts_s) / len(publishes) / len(generators)
    adopt_s = min(pause_s, float(np.median(run.counters["fetch_s"])))
    num_probed = sum(is_probed(run.config.weight_sync.probe_every_steps, version) for version in range(len(publishes)))
    background_s, call_s = robust_line(run.counters["calls"], _background_s(run))
    score_s = float(scores_s[cut : len(scores_s) - cut].mean()) if len(scores_s) else 0.0
    return Costs(
        generator_gpus=1,
        trainer_gpus=1,
        decode_base_s=decode_base_s,
        decode_per_rollout_s=decode_per_rollout_s,
        prefill_token_s=prefill_token_s,
        train_base_s=train_base_s,
        train_token_gpu_s=train_token_s,
        publish_s=float(np.median([_length_s(span) for span in publishes])),
        adopt_s=adopt_s,
        probe_s=(pause_s - adopt_s) * len(publishes) / max(1, num_probed),
        save_bytes=run_request(run, Constants()).saved_bytes,
        score_s=score_s * len(scores_s) / ((len(trains) - 1) * samples),
        score_workers=1,  # seconds per response already account for parallel workers
        prompt_tokens=_prompt_tokens(run),
        measured_groups=tuple(map(tuple, run.groups)),
        skips_equal_rewards=run.skips_equal_rewards,
        call_s=_call_s(trains, publishes),
        controller_call_s=call_s,
        controller_rollout_s=background_s / samples,
    )


def planner_constants(
    run: RecordedRun, costs: Costs, gpu: Gpu | None, cores: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns `constants` and `gpu` for which the planner's formulas reproduce the measured seconds of the run.

    Peak FLOPs of a CPU core are set to the rate of training, so that its efficiency is 1. Skipped samples make training
    look faster, which the efficiency then includes.
    """
    default = Constants()
    request = run_request(run, replace(default, recompute=0.0))
    inputs = float(run.counters["num_input_tokens"].mean())
    flops_per_s = step_flops(request) / (costs.train_token_gpu_s * inputs)
    constants = {
        "recompute": 0.0,
        "half_efficiency_tokens": 0.0,
        "microbatch_overhead_s": 0.0,
        "step_overhead_s": costs.train_base_s,
    }
    if gpu is not None:
        weights_s = read_bytes(request.model, BF16, 1) / (gpu.memory_bandwidth * default.bandwidth_efficiency)
        prompt_s = request.prompt_tokens * costs.prefill_token_s
        return constants | {
            "train_efficiency": flops_per_s / gpu.bf16_flops,
            "prefill_efficiency": prompt_flops(request) / prompt_s / gpu.bf16_flops,
            "decode_overhead_s": max(0.0, costs.decode_base_s - weights_s),
        }, {}
    responses, prompts = request.num_samples * request.lengths.mean_tokens, request.prompts_per_step
    flops = responses * token_flops(request, steady_context_tokens(request)) + prompts * prompt_flops(request)
    prompts *= request.prompt_tokens
    seconds = responses * costs.decode_per_rollout_s + prompts * costs.prefill_token_s
    link = request.model.num_parameters * BF16 / (max(costs.publish_s, LEAST_S) * default.link_efficiency)
    return constants | {
        "train_efficiency": 1.0,
        "prefill_efficiency": flops / seconds / flops_per_s,
        "decode_overhead_s": costs.decode_base_s,
    }, {
        "bf16_flops": flops_per_s,
        "memory_bandwidth": UNLIMITED_BANDWIDTH,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / cores,
        "node_gpus": max(1, round(cores)),
        "node_bandwidth": link,
        "network_bandwidth": link,
    }


def run_request(run: RecordedRun, constants: Constants, pools: tuple[Pool, ...] = ()) -> PlanRequest:
    """Returns the run's workload as a planning request."""
    tokens = np.array([tokens for group in run.groups for tokens, _ in group], dtype=np.float64)
    return PlanRequest.of_run(
        run.config.data,
        run.config.rollout,
        model=find_model(run.config.model.path),
        prompt_tokens=_prompt_tokens(run),
        lengths=Lengths.measured(tokens),
        pools=pools,
        constants=constants,
    ).with_trainer(run.config.trainer)


def _prompt_tokens(run: RecordedRun) -> int:
    """Returns the mean prompt length, without the last token, which is decoded."""
    groups = len(run.counters["train_s"]) * run.config.rollout.prompts_per_step
    return max(1, round(float(run.counters["prefill_tokens"].sum()) / groups) + 1)


def robust_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Returns intercept and slope, both at least `LEAST_S`: least squares over the points near the Theil-Sen line.

    That line has the median slope over all pairs of points.
    """
    first, second = np.triu_indices(len(x), k=1)
    differs = x[first] != x[second]
    if not differs.any():
        return max(float(np.median(y)), LEAST_S), LEAST_S
    slope = np.median((y[first] - y[second])[differs] / (x[first] - x[second])[differs])
    near = _near(y - slope * x)
    spread = x[near] - x[near].mean()
    if spread.any():
        slope = float(spread @ y[near]) / float(spread @ spread)
    intercept = float(np.mean(y[near] - slope * x[near]))
    if slope > 0 and intercept >= 0:
        return max(intercept, LEAST_S), float(slope)
    # Noise can tilt the line; the work without tokens, or the tokens, then take no time.
    if slope > 0:
        return LEAST_S, float(y[near].sum() / x[near].sum())
    return max(float(np.median(y)), LEAST_S), LEAST_S


def _near(values: np.ndarray) -> np.ndarray:
    """Returns which values are within three robust standard deviations of the median."""
    rest = np.abs(values - np.median(values))
    return rest <= 3 * 1.4826 * np.median(rest) + 1e-12


def _forward(run: RecordedRun) -> tuple[float, float, float]:
    """Returns the seconds of a decode step, per rollout in it, and per prefilled token.

    Each optimizer step has the sums of a least-squares fit over all its forwards. Medians over steps are used.
    """
    if run.config.generator.backend != "native":
        raise ConfigError(
            f"{run.path}: vLLM's forwards are not seen, so decoding cannot be calibrated; profile a run with "
            "generator.backend = 'native'"
        )
    c = run.counters
    spread = c["decode_steps"] * c["decode_rows_squared"] - c["decode_rows"] ** 2
    known = spread > 0
    if not known.any():
        raise ConfigError(
            f"{run.path}: every forward decoded equally many rollouts, so their cost cannot be told from that of a "
            "step; profile a run with responses of different lengths"
        )
    moment = c["decode_steps"] * c["decode_rows_s"] - c["decode_rows"] * c["decode_s"]
    # Steps with many forwards and a wide spread have the most information; a plain median would weigh all equally.
    known &= spread >= np.median(spread[known]) / 4
    per_rollout_s = max(float(np.median(moment[known] / spread[known])), LEAST_S)
    bases_s = (c["decode_s"] - per_rollout_s * c["decode_rows"])[known] / c["decode_steps"][known]
    base_s = max(float(bases_s[_near(bases_s)].mean()), LEAST_S)
    prefilled = c["prefill_tokens"] > 0
    if not prefilled.any():
        raise ConfigError(f"{run.path}: no prompt was computed after the first step; profile a longer run")
    rest_s = c["prefill_s"] - base_s * c["prefill_steps"] - per_rollout_s * c["prefill_rows"]
    return base_s, per_rollout_s, max(float(np.median(rest_s[prefilled] / c["prefill_tokens"][prefilled])), LEAST_S)


def _background_s(run: RecordedRun) -> np.ndarray:
    """Returns the CPU seconds per step of controller and messages.

    On shared cores, other threads of executors on other devices also count. With several compute threads they cannot be
    separated, and only the controller counts.
    """
    counters, settings = run.counters, run.config
    own = (settings.generator.threads == 1) * counters["background_s"]
    own = own + (settings.trainer.threads == 1) * counters["trainer_background_s"]
    return counters["controller_cpu_s"] + own


def _call_s(trains: Sequence[Span], publishes: Sequence[Span]) -> float:
    """Returns the median seconds from the end of a train step to the start of its publication: one answer and one
    call."""
    ends_s, starts_s = np.array([span.end_s for span in trains]), np.array([span.start_s for span in publishes])
    before = np.searchsorted(ends_s, starts_s, side="right") - 1
    gaps_s = (starts_s - ends_s[before])[before >= 0]
    return float(np.median(gaps_s)) if len(gaps_s) else 0.0


def _length_s(span: Span) -> float:
    return span.end_s - span.start_s


def _spans(run: RecordedRun, executor: str, kind: str) -> list[Span]:
    if executor not in run.spans:
        raise ConfigError(f"{run.path / 'trace.json'} has no `{executor}`; profile a whole run")
    return [span for span in run.spans[executor] if span.name == kind]
