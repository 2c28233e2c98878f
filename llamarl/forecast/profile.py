"""A short real run as measured constants: costs for the simulator, efficiencies for the planner.

Every fit is a median over the run's steps, so that a disturbed one does not count. Seconds of trainer and generators
are processor time on a CPU, hence nearly free of whoever else used the cores; the simulation puts that sharing back.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamarl.config import ConfigError
from llamarl.forecast.constants import Constants
from llamarl.forecast.hardware import BF16, CPU, GPUS, Gpu, Pool
from llamarl.forecast.lengths import Lengths
from llamarl.forecast.recorded import RecordedRun
from llamarl.forecast.request import Request
from llamarl.forecast.shapes import find_model
from llamarl.forecast.training import step_flops
from llamarl.observability.spans import Span

UNLIMITED_BANDWIDTH = 1e18
"""On CPUs reading the weights is not measured apart from the rest of a forward, so it is no part of its own."""
LEAST_S = 1e-9
"""What a fit that ends at or below zero becomes."""
TRIMMED = 0.1
"""Share of the shortest and of the longest spans that a mean leaves out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds of one run's executors. The names are those of `simulator.costs.SimulatorCosts`."""

    decode_base_s: float
    decode_per_rollout_s: float
    prefill_token_s: float
    train_base_s: float
    train_token_gpu_s: float
    publish_s: float
    adopt_s: float
    score_s: float
    call_s: float
    controller_rollout_s: float
    prompt_tokens: int


def measure(run: RecordedRun) -> Measured:
    """All fits of a run. Raises ConfigError: the trace lacks the work of an executor."""
    decode_base_s, decode_per_rollout_s, prefill_token_s = _forward(run)
    train_base_s, train_token_s = robust_line(run.counters["num_input_tokens"], run.counters["train_s"])
    trainer = _spans_of(run, "trainer")
    trains = [span for span in trainer if span.name == "train"]
    publishes = [span for span in trainer if span.name == "weight_sync"]
    adopts = [span for name in run.spans if name.startswith("generator") for span in run.spans[name]]
    adopts = [span for span in adopts if span.name == "weight_sync"]
    if len(trains) < 2 or not publishes or not adopts:
        raise ConfigError(f"{run.path / 'trace.json'} shows no training with weight sync; profile a whole run")
    rollout = run.config.rollout
    window_s = (trains[0].start_s, trains[-1].start_s)
    scored = (len(trains) - 1) * rollout.prompts_per_step * rollout.group_size
    scores_s = [
        span.end_s - span.start_s for span in _spans_of(run, "reward") if window_s[0] <= span.start_s < window_s[1]
    ]
    return Measured(
        decode_base_s=decode_base_s,
        decode_per_rollout_s=decode_per_rollout_s,
        prefill_token_s=prefill_token_s,
        train_base_s=train_base_s,
        train_token_gpu_s=train_token_s,
        publish_s=float(np.median([span.end_s - span.start_s for span in publishes])),
        adopt_s=float(np.median([span.end_s - span.start_s for span in adopts])),
        score_s=_trimmed_mean(scores_s) * len(scores_s) / scored,
        call_s=_call_s(trains, publishes),
        controller_rollout_s=_background_s(run) / (rollout.prompts_per_step * rollout.group_size),
        prompt_tokens=_prompt_tokens(run),
    )


def make_profile(run: RecordedRun, *, cores: float, gpu: str | None) -> dict[str, Any]:
    """What `llamarl plan --profile` and `llamarl simulate --costs` read.

    Args:
        cores: of the machine, shared by executors on `cpu`.
        gpu: kind of the device when it is none of these cores.

    Raises:
        ConfigError: the run was on GPUs and nobody says of which kind, or something cannot be measured.
    """
    settings = run.config
    on_cpu = settings.trainer.device == "cpu" and settings.generator.device == "cpu"
    if gpu is None and not on_cpu:
        raise ConfigError(
            f"{run.path} ran on {settings.trainer.device!r}; say on which kind, --gpu h100-80g for example"
        )
    if gpu is not None and gpu not in GPUS:
        raise ConfigError(f"`--gpu {gpu}` is not in the table; known: {', '.join(GPUS)}")
    measured = measure(run)
    constants, device = planner_constants(run, measured, None if on_cpu else GPUS[gpu or CPU], cores)
    costs = {name: getattr(measured, name) for name in Measured.__slots__}
    costs |= {
        "generator_gpus": 1,
        "trainer_gpus": 1,
        "score_workers": 1,  # the seconds of a response are what it adds to a call, workers included
        "skips_equal_rewards": run.skips_equal_rewards,
        "cores": cores if settings.trainer.device == "cpu" or settings.generator.device == "cpu" else 0,
        "measured_groups": run.groups,
    }
    described = {"path": str(run.path), "steps": len(run.counters["train_s"]) + 1, "device": gpu or CPU, "cores": cores}
    return {"run": described, "constants": constants, "gpu": device, "costs": costs}


def planner_constants(
    run: RecordedRun, measured: Measured, gpu: Gpu | None, cores: float
) -> tuple[dict[str, float], dict[str, float]]:
    """`constants` and `gpu` with which the planner's formulas give the measured seconds for the run's own work.

    Peak FLOPs of a CPU core are what training reached, so that its efficiency is 1. Skipped samples and prompts that a
    group shares make training look faster than it is; that stays in the efficiency.
    """
    request = run_request(run, replace(Constants(), recompute=0.0))
    counters = run.counters
    flops_per_s = step_flops(request) / (measured.train_token_gpu_s * float(counters["num_input_tokens"].mean()))
    constants = {
        "recompute": 0.0,
        "half_efficiency_tokens": 0.0,
        "microbatch_overhead_s": 0.0,
        "step_overhead_s": measured.train_base_s,
    }
    model = request.model
    if gpu is None:
        context = request.prompt_tokens + request.lengths.square_tokens / (2 * request.lengths.mean_tokens)
        responses = request.num_samples * request.lengths.mean_tokens
        prompts = request.prompts_per_step * request.prompt_tokens
        flops = responses * (2.0 * model.matmul_parameters + model.attention_flops(context))
        flops += prompts * (2.0 * model.matmul_parameters + model.attention_flops(request.prompt_tokens / 2))
        seconds = responses * measured.decode_per_rollout_s + prompts * measured.prefill_token_s
        link = model.num_parameters * BF16 / (max(measured.publish_s, LEAST_S) * Constants().link_efficiency)
        constants |= {
            "train_efficiency": 1.0,
            "prefill_efficiency": flops / seconds / flops_per_s,
            "decode_overhead_s": measured.decode_base_s,
        }
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / cores
        return constants, {
            "bf16_flops": flops_per_s,
            "memory_bandwidth": UNLIMITED_BANDWIDTH,
            "memory_bytes": memory_bytes,
            "node_gpus": max(1, round(cores)),
            "node_bandwidth": link,
            "network_bandwidth": link,
        }
    weights_s = model.num_parameters * BF16 / (gpu.memory_bandwidth * Constants().bandwidth_efficiency)
    prefill_flops = 2.0 * model.matmul_parameters + model.attention_flops(request.prompt_tokens / 2)
    return constants | {
        "train_efficiency": flops_per_s / gpu.bf16_flops,
        "prefill_efficiency": prefill_flops / measured.prefill_token_s / gpu.bf16_flops,
        "decode_overhead_s": max(0.0, measured.decode_base_s - weights_s),
    }, {}


def run_request(run: RecordedRun, constants: Constants, pools: tuple[Pool, ...] = ()) -> Request:
    """The run's own work as the planner sees it."""
    rollout = run.config.rollout
    tokens = np.array([tokens for group in run.groups for tokens, _ in group], dtype=np.float64)
    return Request(
        model=find_model(run.config.model.path),
        prompt_tokens=_prompt_tokens(run),
        lengths=Lengths.measured(tokens),
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        max_staleness=max(1, rollout.max_staleness),
        pools=pools,
        constants=constants,
    )


def _prompt_tokens(run: RecordedRun) -> int:
    """Mean prompt. Its last token is decoded and not prefilled."""
    groups = len(run.counters["train_s"]) * run.config.rollout.prompts_per_step
    return max(1, round(float(run.counters["prefill_tokens"].sum()) / groups) + 1)


def robust_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope, both at least `LEAST_S`: least squares over the points near the Theil-Sen line.

    That line has the median slope over all pairs of points; near is within three robust deviations of it.
    """
    first, second = np.triu_indices(len(x), k=1)
    differs = x[first] != x[second]
    if not differs.any():
        return max(float(np.median(y)), LEAST_S), LEAST_S
    slope = np.median((y[first] - y[second])[differs] / (x[first] - x[second])[differs])
    rest = y - slope * x
    rest = np.abs(rest - np.median(rest))
    near = rest <= 3 * 1.4826 * np.median(rest) + 1e-12
    spread = x[near] - x[near].mean()
    if spread.any():
        slope = float(spread @ y[near]) / float(spread @ spread)
    intercept = float(np.mean(y[near] - slope * x[near]))
    if slope > 0 and intercept >= 0:
        return max(intercept, LEAST_S), float(slope)
    # Noise can tilt the line; work without tokens, or tokens without work, then do not exist.
    if slope > 0:
        return LEAST_S, float(np.median(y[x > 0] / x[x > 0]))
    return max(float(np.median(y)), LEAST_S), LEAST_S


def _forward(run: RecordedRun) -> tuple[float, float, float]:
    """Seconds of a decode step, per rollout in it, and per prefilled token.

    Each optimizer step holds the sums of a least-squares line through all its forwards; their medians are taken.
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
    # Steps with many forwards and a wide spread tell most; a median over all would count the others as much.
    known &= spread >= np.median(spread[known]) / 4
    per_rollout_s = max(float(np.median(moment[known] / spread[known])), LEAST_S)
    bases_s = (c["decode_s"] - per_rollout_s * c["decode_rows"])[known] / c["decode_steps"][known]
    base_s = max(float(np.median(bases_s)), LEAST_S)
    prefilled = c["prefill_tokens"] > 0
    if not prefilled.any():
        raise ConfigError(f"{run.path}: no prompt was computed after the first step; profile a longer run")
    rest_s = c["prefill_s"] - base_s * c["prefill_steps"] - per_rollout_s * c["prefill_rows"]
    return base_s, per_rollout_s, max(float(np.median(rest_s[prefilled] / c["prefill_tokens"][prefilled])), LEAST_S)


def _background_s(run: RecordedRun) -> float:
    """Processor seconds per step of controller and messages.

    They count on cores that are shared, hence the other threads of executors on other devices do too; with several
    threads of computation they cannot be told apart from these, and only the controller counts.
    """
    counters, settings = run.counters, run.config
    total_s = counters["controller_cpu_s"].copy()
    if settings.generator.threads == 1:
        total_s += counters["background_s"]
    if settings.trainer.threads == 1:
        total_s += counters["trainer_background_s"]
    return float(np.median(total_s))


def _call_s(trains: list[Span], publishes: list[Span]) -> float:
    """Median seconds from the end of a train step to the start of its publication: one answer and one call."""
    ends_s = np.array([span.end_s for span in trains])
    gaps_s = []
    for publish in publishes:
        before = int(np.searchsorted(ends_s, publish.start_s, side="right")) - 1
        if before >= 0:
            gaps_s.append(publish.start_s - float(ends_s[before]))
    return float(np.median(gaps_s)) if gaps_s else 0.0


def _trimmed_mean(values: list[float]) -> float:
    ordered = np.sort(np.array(values))
    cut = math.floor(TRIMMED * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean()) if len(ordered) else 0.0


def _spans_of(run: RecordedRun, name: str) -> list[Span]:
    if name not in run.spans:
        raise ConfigError(f"{run.path / 'trace.json'} has no `{name}`; profile a whole run")
    return run.spans[name]
