"""Figures in documents that name the file of a measurement are those of that file."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.architecture.repository import ROOT, documents, name_of

Value = str | Callable[[Any], float]
"""Where a number is in the file, keys joined by `/`, or how it is computed from what is there."""
RESULTS = ROOT / "benchmarks" / "results"
SOAK = ROOT / "benchmarks" / "soak"
MEASURE = re.compile(
    r"^\| .+ \| (?P<date>[\d-]+) \| `(?P<commit>[0-9a-f]{7,})` \| `(?P<command>[^`]+)` \| "
    r"`benchmarks/(?:results|soak)/(?P<name>[^`]+)\.json` \|$",
    re.MULTILINE,
)
"""A line of docs/measures.md."""
NAMED = re.compile(r"`(benchmarks/(?:results|soak)/([\w.*-]+)\.json)`")


class Figure(NamedTuple):
    """Words of a document with `{}` for each number."""

    page: str
    words: str
    file: str
    numbers: tuple[tuple[Value, str], ...]
    """Each with its format; `%` is written as documents do, after a space."""


def generation(model: str) -> Callable[[Any], float]:
    """Our float32 over vLLM's, the worst of the batch sizes."""

    def worst(data: Any) -> float:
        speed = {(one["model"], one["workload"], one["engine"], one["dtype"]): one for one in data["rows"]}
        pairs = [
            [speed[model, size, engine, "float32"]["tokens_per_cpu_s"] for engine in ("ours", "vllm")]
            for size in ("uniform-32", "uniform-128")
        ]
        return min(ours / theirs for ours, theirs in pairs)

    return worst


def bound(of_all: Callable[[list[float]], float], data: Any) -> float:
    return of_all(data["ratio"])


def calls_of(tree: str, data: Any) -> float:
    """Calls of a step of the demo, a mean over its runs."""
    return statistics.mean(one["calls"] for one in data["runs"][tree])


def of_routing(kind: str) -> Callable[[Any], float]:
    """Share of the KL without replay."""
    return lambda data: (parts := data["kl_by_cause"][kind]["off"])["routing"] / sum(parts.values())


def kl_of_runs(kind: str, replay: str) -> Callable[[Any], float]:
    """Mean over the steps, in millionths."""
    return lambda data: 1e6 * data["kl_of_runs"][kind][replay]["mean"]


def errors_of_steps(data: Any) -> list[float]:
    return [abs(one["simulator"]["error"]["step_s"]) for one in data["settings_predicted"].values()]


def error_of(predictor: str, of_all: Callable[[list[float]], float], data: Any) -> float:
    """Of the mean step, over the settings."""
    return of_all([abs(one[predictor]["error"]["step_s"]) for one in data["settings_predicted"].values()])


def kl_of_staleness_4(data: Any) -> float:
    return statistics.fmean(
        run["kl_to_behavior"] for run in data["runs"] if (run["task"], run["way"]) == ("demo", "S=4")
    )


def of_pairs(staleness: int, more: str = "") -> tuple[tuple[Value, str], ...]:
    """Difference to staleness 0, both ends of its interval, and pairs."""
    way = f"demo S={staleness}{more}"
    low, high = (lambda data, end=end: data["interval"][way][end] for end in (0, 1))
    return (f"gap_points/{way}", ".1f"), (low, ".1f"), (high, ".1f"), (f"seeds/{way}", ".0f")


def of_gpu(figure: str, factor: float = 1.0, less: str = "", **row: Any) -> Callable[[Any], float]:
    """A figure of the only row of the check that says so."""

    def found(data: Any) -> float:
        rows = [one for one in data["rows"] if figure in one and all(one.get(key) == row[key] for key in row)]
        (only,) = rows
        return factor * (only[figure] - (only[less] if less else 0.0))

    return found


def quotient(above: Callable[[Any], float], below: Callable[[Any], float]) -> Callable[[Any], float]:
    return lambda data: above(data) / below(data)


GPU = "gpu-2026-11-26"


def decoded(
    dtype: str, figure: str = "step_s", graphs: bool = True, factor: float = 1.0, batch: int = 64, context: int = 1024
) -> Callable[[Any], float]:
    return of_gpu(figure, factor, model="8b", dtype=dtype, graphs=graphs, batch=batch, context=context)


BF16 = decoded("bfloat16")
HIGH_SHARE = decoded("bfloat16", "bandwidth_share")
WIDE_SHARE = decoded("bfloat16", "bandwidth_share", batch=256, context=256)
WIDE_GRAPHS = quotient(
    decoded("bfloat16", graphs=False, batch=256, context=256), decoded("bfloat16", batch=256, context=256)
)
MFU_8B = of_gpu("mfu", part="train-8b", model="8b")
APART = of_gpu("mean", probe="mismatch", dtype="bfloat16")


def half_way(way: str) -> Callable[[Any], float]:
    """Points behind staleness 0 after half of the demo; at half the learning rate behind the same of that rate."""

    def found(data: Any) -> float:
        gaps = data["gap_points"]
        beside = gaps["half demo S=0 half rate"] if way.endswith("half rate") else 0.0
        return beside - gaps[f"half demo {way}"]

    return found


LEARNING, LEARNING_DEFAULT = "learning-2026-11-26", "learning-2026-11-25"
ASYNC, HOSTS, WIRE = "asynchrony-2026-11-26", "hosts-2026-11-22", "hosts_weights-2026-11-25"
BAD_LINKS, FAR = "hosts-2026-11-25", "hosts-2026-11-26"
SYNC, PLAN, DELTA = "weight_sync-2026-11-22", "weight_sync_plan-2026-11-22", "delta-2026-11-21"
CHECKPOINT, FAULTS, DECODE = "checkpoint-2026-11-21", "faults-2026-11-23", "generation-avx512-2026-11-22"
JUDGE = "judge_data-2026-11-23"
SCALE: tuple[tuple[Value, str], ...] = (
    *(("agents_here_s", ".1f"), ("agents_core_share", ".0%"), (lambda data: 1e3 * data["placement_s"], ".0f")),
    *(("call_all_ms", ".0f"), ("sends_per_call", ".0f"), ("bytes_ratio", ".2f")),
)
P405 = "planning/405B, 512 to 512 ranks/"
REAL = "real-2026-11-27"
LEARNED = (("accuracy_before", ".1%"), ("accuracy_after", ".1%"))
FIGURES = (
    Figure("README.md", "8B decodes at {} of its bandwidth", GPU, ((decoded("bfloat16", "bandwidth_share"), ".2f"),)),
    Figure("docs/first_run.md", "Held-out accuracy went from {} to {} in 100 steps", REAL, LEARNED),
    Figure(
        "docs/measures.md", "held-out accuracy {} to {} in 100 steps, largest mismatch after a sync {} nats", REAL,
        (*LEARNED, ("mismatch_mean_max", ".3f")),
    ),
    *(
        Figure(
            "docs/measures.md",
            words + " {} times the samples per second, median of three pairs ({} to {}), {} calls a step in place of "
            "{}, accuracy after 200 steps {} points",
            f"loop{of}-2026-11-26",
            (
                ("median_ratio", ".2f"), *((partial(bound, of_all), ".2f") for of_all in (min, max)),
                *((partial(calls_of, tree), ".2g") for tree in ("ours", "base")), ("mean_gap_points", ".2f"),
            ),
        )
        for of, words in (("", "with AMX):"), ("-avx2", "(Intel(R) Xeon(R) Processor):"))
    ),
    Figure(
        "docs/paper.md", "{} times as fast as without graphs at 64 rows of 1,024 tokens, and {} times at 256 rows",
        GPU,
        ((quotient(decoded("bfloat16", graphs=False), BF16), ".2f"), (WIDE_GRAPHS, ".2f")),
    ),
    Figure(
        "docs/measures.md",
        "8B decodes at {} of the bandwidth, gradients at {} of the peak, trainer and generator {} nats apart", GPU,
        ((decoded("bfloat16", "bandwidth_share"), ".2f"), (MFU_8B, ".3f"), (APART, ".3f")),
    ),
    *(
        Figure("docs/gpus.md", words, GPU, numbers)
        for words, numbers in (
            ("64 rows of 1,024 tokens, time per step | {} ms |", ((decoded("bfloat16", factor=1e3), ".2f"),)),
            ("| the same, share of the memory bandwidth | {} | 0.6 |", ((HIGH_SHARE, ".2f"),)),
            ("| the same with 256 rows of 256 tokens | {} |", ((WIDE_SHARE, ".2f"),)),
            ("| {} times as long | 1.3 |", ((quotient(decoded("bfloat16", graphs=False), BF16), ".2f"),)),
            ("| {} times as long | |", ((WIDE_GRAPHS, ".2f"),)),
            ("fp8 weights, 64 rows, against bfloat16 | {} times |", ((quotient(BF16, decoded("fp8")), ".2f"),)),
            ("int8 weights, 64 rows, against bfloat16 | {} times |", ((quotient(BF16, decoded("int8")), ".2f"),)),
            *(
                (f"decode with {one} weights, 64 rows, share of the bandwidth | {{}} |",
                 ((decoded(one, "bandwidth_share"), ".2f"),)) for one in ("fp8", "int8")
            ),
            ("share of the bandwidth | {} | 0.8 |", ((of_gpu("bandwidth_share", probe="attention", context=8192,
             cached="bfloat16", stages=3), ".2f"),)),
            ("share of the peak FLOPs | {} | 0.35 |", ((of_gpu("mfu", probe="prefill", prompt=2048), ".2f"),)),
            ("| {} | 0.40: missed |", ((MFU_8B, ".3f"),)),
            ("| {} | 0.35: missed |", ((of_gpu("mfu", part="train-1b", model="1b"), ".2f"),)),
            ("| {} times as long | 1.15 |", ((of_gpu("time_ratio", logprobs="8b"), ".2f"),)),
            ("| {} | 0.6: missed |", ((of_gpu("bandwidth_share", optimizer="1b"), ".2f"),)),
            ("| {} s | 0.06: missed |", ((of_gpu("fetch_s", transport="nixl", model="3b"), ".3f"),)),
            ("| {} nats | 0.02 |", ((APART, ".3f"),)),
            ("GPU tests that failed, of {} | {} |", ((of_gpu("tests"), ".0f"), (of_gpu("num_failed"), ".0f"))),
            ("| {} points more", ((of_gpu("accuracy_after", 100.0, "accuracy_before", part="demo"), ".1f"),)),
        )
    ),
    Figure(
        "README.md", "{} times the synchronous mode's samples per second, {} times the colocated one's", ASYNC,
        (("speedup_vs_max_staleness_0", ".2f"), ("speedup_vs_colocated", ".2f")),
    ),
    Figure(
        "README.md", "accuracy after 60 steps {} points from the synchronous mode's, {} to {} in {} pairs",
        LEARNING_DEFAULT, of_pairs(1),
    ),
    Figure(
        "docs/paper.md", "less the synchronous mode's: {} points, {} to {} in {} pairs", LEARNING_DEFAULT, of_pairs(1)
    ),
    Figure(
        "docs/staleness.md", "takes 1 / {} of the synchronous time for its 60 steps", ASYNC,
        (("speedup_vs_max_staleness_0", ".2f"),),
    ),
    Figure("docs/staleness.md", "KL to the sampling policy is {}", LEARNING, ((kl_of_staleness_4, ".3f"),)),
    *(
        Figure("docs/staleness.md", words, LEARNING, ((half_way(way), ".1f"),))
        for way, words in {
            "S=4": "| defaults | {} |", "S=4 window 1": "| `rollout.window = 1` | {} |",
            "S=4 rho 1": "| ratio capped at 1 | {} |", "S=4 half rate": "| half the learning rate, in both | {} |",
            "S=4 beta1 0": "(`trainer.beta1 = 0`) | {} |",
        }.items()
    ),
    Figure(
        "docs/staleness.md", "the synchronous mode itself gains {} points over its default", LEARNING,
        (("gap_points/half demo S=0 beta1 0", ".1f"),),
    ),
    Figure(
        "docs/staleness.md", "the difference to the default synchronous mode is {} points, {} to {} ", LEARNING,
        of_pairs(4, " beta1 0")[:3],
    ),
    Figure(
        "docs/staleness.md", "with tools, 1,024 problems | {} | {} to {} | {} |", LEARNING,
        (
            ("gap_points/calculator S=1", ".1f"),
            *((lambda data, end=end: data["interval"]["calculator S=1"][end], ".1f") for end in (0, 1)),
            ("seeds/calculator S=1", ".0f"),
        ),
    ),
    Figure(
        "docs/measures.md", "eight other settings on a faster machine (Intel(R) Xeon(R) Processor, 2 cores, with AMX): "
        "median {}, worst {}", "prediction-amx-2026-11-26",
        (("own_machine/median_error", ".1%"), ("worst_errors_of_simulator/step_s", ".1%")),
    ),
    Figure("docs/measures.md", "the calculator {} at 1", LEARNING, (("gap_points/calculator S=1", ".1f"),)),
    Figure("docs/staleness.md", "int8 generators | {} | {} to {} | {} |", LEARNING, of_pairs(1, " int8")),
    Figure("docs/staleness.md", "segments of 16 tokens | {} | {} to {} | {} |", LEARNING, of_pairs(1, " segments")),
    Figure(
        "docs/staleness.md", "recomputed for new weights | {} | {} to {} | {} |", LEARNING,
        of_pairs(1, " recompute"),
    ),
    Figure("docs/paper.md", "with staleness 4 {} points", LEARNING, of_pairs(4)[:1]),
    *(
        Figure(
            "docs/staleness.md", row, LEARNING_DEFAULT if staleness == 1 else LEARNING,
            tuple(of_pairs(staleness)[place] for place in (3, 0, 1, 2)),
        )
        for staleness, row in {
            1: "| 1, the default | 2 | {} | {} | {} to {} | yes |", 2: "| 2 | 3 | {} | {} | {} to {} | yes |",
            4: "| 4 | 5 | {} | {} | {} to {} | no |",
        }.items()
    ),
    Figure(
        "README.md", "{} (10M) and {} (100M) times vLLM's tokens per CPU second", DECODE,
        (("ratio_vs_vllm/10m_bf16", ".2f"), ("ratio_vs_vllm/100m_bf16", ".2f")),
    ),
    Figure(
        "README.md", "{} times a gather and broadcast by shared memory, {} times by sockets", SYNC,
        (("ratio_vs_gather_broadcast", ".0f"), ("p2p_ratio_vs_gather_broadcast", ".1f")),
    ),
    Figure("README.md", "{} of the samples/s of the same processes on one", HOSTS, (("demo_ratio", ".2f"),)),
    Figure(
        "README.md", "{} faults at random in {} runs, {} failed", "faults_random-2026-11-22",
        (("faults_tried", ".0f"), ("settings/runs", ".0f"), ("faults_failed", ".0f")),
    ),
    Figure(
        "README.md", "{} of the tokens per second without turns", "episodes-2026-11-23", (("turns_ratio", ".2f"),)
    ),
    Figure(
        "README.md", "median error of the mean step {} over eight settings, the worst {}", "prediction-2026-11-26",
        (
            (lambda data: statistics.median(errors_of_steps(data)), ".1%"),
            (lambda data: max(errors_of_steps(data)), ".1%"),
        ),
    ),
    *(
        Figure(
            "docs/planner.md", f"| {words} | {{}} | {{}} | `benchmarks/results/{file}.json`", file,
            tuple((partial(error_of, predictor, of_all), spec) for of_all in (statistics.median, max)),
        )
        for file in ("prediction-2026-11-26", "prediction-amx-2026-11-26")
        for words, predictor, spec in (
            ("eight" if file == "prediction-2026-11-26" else "eight others, a faster machine", "simulator", ".1%"),
            ("planner | the same", "planner", ".0%"),
        )
    ),
    Figure(
        "docs/measures.md", "weights read at {} of the speed of the dense kernels at least, recording experts costs {} "
        "of a forward, a sync of 235B is planned in {} s; KL over the dense demo's (AMD EPYC, 2 cores) {} in bfloat16 "
        "and {} in int8, without replay {} and {}", "moe-2026-11-24",
        (
            ("decode_share", ".2f"), ("route_share", ".1%"), ("plan_s", ".2f"), ("kl_ratio/bfloat16", ".2f"),
            ("kl_ratio/int8", ".2f"), ("kl_ratio_live/bfloat16", ".2f"), ("kl_ratio_live/int8", ".2f"),
        ),
    ),
    Figure(
        "docs/layouts.md", "(three seeds) it solves {} of 2,048 held-out problems, compared with {} for the dense "
        "demo. Training takes {} times", "moe-2026-11-24",
        (("accuracy_after", ".1%"), ("accuracy_after_dense", ".1%"), ("demo_time_ratio", ".2f")),
    ),
    *(
        Figure(
            "docs/layouts.md", f"{words} | {{}}{unit} | {{}}{unit} |", "moe-2026-11-24",
            tuple((number(kind), spec) for kind in ("bfloat16", "int8")),
        )
        for words, unit, number, spec in (
            ("share of the KL that routing causes, without replay", "", of_routing, ".0%"),
            ("steps with replay, one seed", "e-6", partial(kl_of_runs, replay="on"), ".0f"),
            ("the same without replay, one seed", "e-6", partial(kl_of_runs, replay="off"), ".0f"),
            ("(standard error: a sixth)", " times", "kl_ratio/{}".format, ".2f"),
            ("the same without replay", " times", "kl_ratio_live/{}".format, ".2f"),
            ("differ after the warm start", "", "kl/demo_moe/{}/routes_differ".format, ".1%"),
            ("of about 145,000 tokens", "", "kl/demo_moe/{}/routing_in_ten_tokens".format, ".0%"),
        )
    ),
    Figure(
        "docs/recovery.md", "was blocked for {} of a save's time (median of seven; {} for the first save)", CHECKPOINT,
        (("blocked_share", ".0%"), ("blocked_share_of_the_first", ".0%")),
    ),
    Figure(
        "docs/recovery.md", "{} s for {} GB", CHECKPOINT,
        (("blocked_s", ".2f"), (lambda data: data["bytes"] / 1e9, ".2f")),
    ),
    Figure(
        "docs/episodes.md", "Of HumanEval's {} reference solutions {} are right, of MBPP's {} all {}",
        JUDGE,
        tuple((f"{name}/{key}", ".0f") for name in ("humaneval", "mbpp") for key in ("rows", "right")),
    ),
    Figure("docs/hosts.md", "first reply (without torch) | {} s |", BAD_LINKS, (("attach_s", ".2f"),)),
    Figure("docs/hosts.md", "a process of the same machine | {} times as long |", BAD_LINKS, (("call_ratio", ".2f"),)),
    Figure("docs/hosts.md", "against the same processes on one | {} times |", HOSTS, (("demo_ratio", ".2f"),)),
    Figure("docs/hosts.md", "heartbeats with 64 agents | {} of a core |", HOSTS, (("registry_share", ".1%"),)),
    Figure(
        "docs/hosts.md", "as many streams | {} ({} to {} s) | | the same with verification | {} |", WIRE,
        (
            ("share_of_wire", ".2f"),
            (lambda data: min(one["bare_s"] for one in data["rounds_s"]), ".2f"),
            (lambda data: max(one["bare_s"] for one in data["rounds_s"]), ".2f"),
            ("share_of_wire_proved", ".2f"),
        ),
    ),
    Figure(
        "docs/hosts.md", "with relays | {} times as long | | the same without relays | {} times as long |", WIRE,
        (("relay_ratio", ".2f"), ("direct_ratio", ".2f")),
    ),
    Figure(
        "docs/measures.md",
        "samples per second, against the synchronous mode {}, against the colocated one {}",
        "asynchrony-2026-11-26",
        (("speedup_vs_max_staleness_0", ".2f"), ("speedup_vs_colocated", ".2f")),
    ),
    Figure(
        "docs/measures.md", "as early as the bound allows: {} ({} to {}, {} pairs) at staleness 1", LEARNING_DEFAULT,
        of_pairs(1),
    ),
    Figure(
        "docs/measures.md", "accuracy less that of staleness 0, in points: {} ({} to {}, {} pairs) at staleness 2",
        LEARNING, of_pairs(2),
    ),
    Figure(
        "docs/measures.md",
        "packed against padded tokens per second: {}; log-probs by tiles: {} of the memory, {} times as long",
        "training-2026-11-21",
        (
            ("packing/ratio", ".2f"), ("head/tiles_of_2^23/memory_ratio", ".0%"),
            ("head/tiles_of_2^23/time_ratio", ".1f"),
        ),
    ),
    Figure(
        "docs/measures.md",
        "a step of the demo {} times as fast, of a 60M model {} times",
        "products-slow-mkl-2026-11-23",
        (("steps/demo/ratios/chosen", ".2f"), ("steps/60M/ratios/chosen", ".2f")),
    ),
    Figure(
        "docs/measures.md",
        "a step takes what it took, {} times as fast",
        "products-2026-11-23",
        (("steps/demo/ratios/chosen", ".2f"),),
    ),
    Figure(
        "docs/measures.md",
        "training stands still for {} of a save's time ({} in the first)",
        "checkpoint-2026-11-21",
        (("blocked_share", ".0%"), ("blocked_share_of_the_first", ".0%")),
    ),
    Figure(
        "docs/measures.md",
        "on a Xeon with AVX-512 and without AMX, against TRL's GRPO: {} times the samples per second, {} of the "
        "memory, at rewards of {} and {}",
        "peers-2026-11-27",
        (
            ("ratio_vs_trl/samples_per_s", ".1f"), ("ratio_vs_trl/peak_memory", ".0%"),
            ("reward_ours", ".2f"), ("reward_trl", ".2f"),
        ),
    ),
    Figure(
        "docs/measures.md",
        "on an EPYC, against TRL's GRPO, which generates with transformers: {} times the samples per second, {} of "
        "the memory, at rewards of {} and {}",
        "peers-2026-11-25",
        (
            ("ratio_vs_trl/samples_per_s", ".1f"), ("ratio_vs_trl/peak_memory", ".0%"),
            ("reward_ours", ".2f"), ("reward_trl", ".2f"),
        ),
    ),
    Figure(
        "docs/measures.md",
        "tokens per CPU second against vLLM, both in bfloat16: {} (10M), {} (100M)",
        "generation-avx512-2026-11-22",
        (("ratio_vs_vllm/10m_bf16", ".2f"), ("ratio_vs_vllm/100m_bf16", ".2f")),
    ),
    Figure(
        "docs/measures.md",
        "with AMX, tokens per CPU second against vLLM, both in bfloat16: {} (10M), {} (100M); in int8 {} and {}",
        "generation-amx-2026-11-24",
        tuple((f"ratio_vs_vllm/{size}_{kind}", ".2f") for kind in ("bf16", "int8") for size in ("10m", "100m")),
    ),
    *(
        Figure(
            "docs/generation.md",
            words + " | {} times | {} times | {} times |",
            f"generation-amx{of}-2026-11-24",
            tuple((f"ratio_vs_vllm/{size}_{kind}", ".2f") for size in ("10m", "35m", "100m")),
        )
        for words, of, kind in (
            ("| bfloat16 | bfloat16", "", "bf16"), ("| int8 | bfloat16", "", "int8"),
            ("| float32 | float32", "-fp32", "fp32"),
        )
    ),
    Figure(
        "docs/measures.md",
        "int8 against vLLM's bfloat16 with 100M again, two repeats: {}",
        "generation-amx-int8-2026-11-24",
        (("ratio_vs_vllm/100m_int8", ".2f"),),
    ),
    Figure(
        "docs/generation.md",
        "two repeats instead of one | bfloat16 | | | {} times |",
        "generation-amx-int8-2026-11-24",
        (("ratio_vs_vllm/100m_int8", ".2f"),),
    ),
    Figure(
        "docs/measures.md",
        "with AMX, tokens per CPU second against vLLM, both in float32: {} (10M), {} (35M), {} (100M)",
        "generation-amx-fp32-2026-11-24",
        tuple((f"ratio_vs_vllm/{size}_fp32", ".2f") for size in ("10m", "35m", "100m")),
    ),
    Figure(
        "docs/training.md",
        "| the demo's | {} | {} | {} | {} | | 2e-5 | {} | | {} | {} |",
        "memory-2026-11-24",
        tuple(
            (f"accuracy_after/{name}", ".1%")
            for name in (
                "float32", "8bit", "bfloat16", "bfloat16 8bit", "float32 2e-5", "bfloat16 2e-5", "bfloat16 8bit 2e-5"
            )
        ),
    ),
    Figure(
        "docs/measures.md",
        "one card: {} GB at its fullest for 8B, {} GB for 1.7B; after 60 steps of the demo {} with bfloat16 weights "
        "and 8-bit moments, {} exact",
        "memory-2026-11-24",
        (
            ("8b_140gb_peak_gb", ".1f"), ("1_7b_24gb_peak_gb", ".1f"), ("accuracy_after/bfloat16 8bit", ".1%"),
            ("accuracy_after/float32", ".1%"),
        ),
    ),
    Figure(
        "docs/planner.md",
        "cache of 128 rows of 1,024 tokens | {} | {} |",
        "memory-2026-11-24",
        (("8b_140gb_peak_gb", ".1f"), ("8b_140gb_all_awake_gb", ".1f")),
    ),
    Figure(
        "docs/planner.md",
        "cache of 32 rows of 1,024 tokens | {} | {} |",
        "memory-2026-11-24",
        (("1_7b_24gb_peak_gb", ".1f"), ("1_7b_24gb_all_awake_gb", ".1f")),
    ),
    Figure(
        "docs/measures.md",
        "tokens per CPU second against vLLM's fastest type here, 10M parameters: {} in bfloat16, {} in int8",
        "generation-avx2-2026-11-21",
        (("ratio_vs_vllm_best/10m_bf16", ".2f"), ("ratio_vs_vllm_best/10m_int8", ".2f")),
    ),
    *(
        Figure(
            "docs/measures.md", words, "generation-avx2-2026-11-26",
            tuple((f"ratio_vs_vllm/{model}_{kind}", ".2f") for model in ("10m", "35m", "100m")),
        )
        for kind, words in {
            "fp32": "its fastest here: {} (10M), {} (35M), {} (100M) in float32", "bf16": "; {}, {}, {} in bfloat16",
            "int8": "; {}, {}, {} in int8 (10M two repeats, others one)",
        }.items()
    ),
    Figure(
        "docs/measures.md",
        "against a gather and broadcast: {} times by shared memory, {} times by sockets",
        "weight_sync-2026-11-22",
        (("ratio_vs_gather_broadcast", ".0f"), ("p2p_ratio_vs_gather_broadcast", ".1f")),
    ),
    Figure(
        "docs/measures.md",
        "planning who sends what, 405B on 512 to 512 ranks: {} s",
        "weight_sync_plan-2026-11-22",
        ((f"{P405}wall_s", ".2f"),),
    ),
    Figure(
        "docs/measures.md",
        "values that a step changes at a learning rate of 1e-6: {} in bfloat16, {} in int8",
        "delta-2026-11-21",
        (("low/codecs/bfloat16/changed_share_values", ".2%"), ("low/codecs/int8/changed_share_values", ".2%")),
    ),
    Figure(
        "docs/measures.md",
        "weights to two other hosts: {} of what iperf3 carries alone, {} proved",
        WIRE,
        (("share_of_wire", ".2f"), ("share_of_wire_proved", ".2f")),
    ),
    Figure(
        "docs/hosts.md", "from a mirror on another host | {} s ({} to {} s) |", BAD_LINKS,
        (
            ("trainer_host_s", ".1f"),
            (lambda data: min(data["trainer_host_all_s"]), ".1f"),
            (lambda data: max(data["trainer_host_all_s"]), ".1f"),
        ),
    ),
    Figure(
        "docs/hosts.md", "(median step {} s) | {} s | | sync at", BAD_LINKS,
        (("step_lossy_s", ".2f"), ("longest_step_lossy_s", ".2f")),
    ),
    Figure(
        "docs/hosts.md", "between all hosts (median step {} s) | {} s |", FAR,
        (("step_100ms_s", ".2f"), ("sync_100ms_s", ".2f")),
    ),
    Figure(
        "docs/measures.md",
        "a rightful connection waits at most {} s, steps go on at {} of their speed",
        "strangers-2026-11-23",
        (
            ("longest_s", ".2f"),
            (lambda data: data["steps_per_s"]["during"] / data["steps_per_s"]["before"], ".2f"),
        ),
    ),
    Figure(
        "docs/measures.md",
        "a killed generator's replacement decodes after {} s; the step after a trainer's death ends after {} s "
        "with the mirror, {} s from a checkpoint 25 steps back",
        "faults-2026-11-23",
        (("replacement_s", ".1f"), ("trainer_mirror_s", ".1f"), ("trainer_checkpoint_s", ".1f")),
    ),
    Figure(
        "docs/measures.md",
        "since each object of the controller has its own loop: {} faults at random in {} runs; {} failed",
        "faults_random-2026-11-27",
        (("faults_tried", ".0f"), ("settings/runs", ".0f"), ("faults_failed", ".0f")),
    ),
    Figure(
        "docs/measures.md", "{} faults at random in {} more runs; {} failed", "faults_random-2026-11-25",
        (("faults_tried", ".0f"), ("settings/runs", ".0f"), ("faults_failed", ".0f")),
    ),
    Figure(
        "docs/measures.md",
        "{} faults at random in {} runs; {} failed",
        "faults_random-2026-11-22",
        (("faults_tried", ".0f"), ("settings/runs", ".0f"), ("faults_failed", ".0f")),
    ),
    Figure(
        "docs/measures.md",
        "10,000 steps: the controller grows by {} MB per 100 steps",
        "soak-2026-11-22",
        (("processes/controller/rss_bytes/per_100_steps", ".1f"),),
    ),
    Figure(
        "docs/measures.md",
        "the demo over three hosts, against the same processes on one: {} of the samples/s; {} losses of a host, "
        "{} failed",
        "hosts-2026-11-22",
        (("demo_ratio", ".2f"), ("losses_tried", ".0f"), ("losses_failed", ".0f")),
    ),
    Figure(
        "docs/measures.md",
        "{} losses of a host, {} failed; the trainer's host lost, next step after {} s; a fifth of one generator's "
        "packets lost, longest step {} s |",
        BAD_LINKS,
        (
            ("losses_tried", ".0f"), ("losses_failed", ".0f"), ("trainer_host_s", ".1f"),
            ("longest_step_lossy_s", ".2f"),
        ),
    ),
    Figure(
        "docs/measures.md",
        "{} losses of any host but the controller's in runs of {} steps, of which the trainer went to another host {} "
        "times, {} failed, longest step {} s",
        FAR,
        (
            ("losses_tried", ".0f"), ("settings/loss_steps", ".0f"), ("losses_of_trainer", ".0f"),
            ("losses_failed", ".0f"), ("longest_step_s", ".1f"),
        ),
    ),
    Figure(
        "docs/measures.md", "between all hosts a sync takes {} s, beside steps of {} s", FAR,
        (("sync_100ms_s", ".2f"), ("step_100ms_s", ".2f")),
    ),
    Figure(
        "docs/measures.md",
        "1,024 light agents are here after {} s and take {} of a core, 128 hosts are placed in {} ms, a call to 32 "
        "processes takes {} ms and leaves the controller {} times, a step's groups {} times; weights from 512 to 512 "
        "ranks take {} descriptors of a process and {} GiB of a host",
        "scale-2026-11-25",
        (*SCALE, ("max_descriptors", ".0f"), ("stream_gib", ".1f")),
    ),
    Figure(
        "docs/measures.md",
        "error of the simulated mean step over eight settings, predicted before they ran: median {}, worst {}",
        "prediction-2026-11-26",
        (
            (lambda data: statistics.median(errors_of_steps(data)), ".1%"),
            (lambda data: max(errors_of_steps(data)), ".1%"),
        ),
    ),
    Figure(
        "docs/measures.md",
        "error of the simulated mean step, median of four settings: {}",
        "prediction-2026-11-22",
        ((lambda data: statistics.median(errors_of_steps(data)), ".1%"),),
    ),
    Figure(
        "docs/measures.md",
        "the same for four other settings: {}",
        "prediction-seed0-2026-11-22",
        ((lambda data: statistics.median(errors_of_steps(data)), ".1%"),),
    ),
    Figure(
        "docs/measures.md",
        "predicted step time against the paper's, calibrated at 8B: {} for 70B, {} for 405B",
        "planner-2026-11-26",
        (("paper_error/70b", "+.0%"), ("paper_error/405b", "+.0%")),
    ),
    Figure(
        "docs/measures.md",
        "processor time of the controller per group at 16,384 simulated GPUs: {} ms",
        "simulator-2026-11-21",
        (("controller_ms_per_group", ".2f"),),
    ),
    Figure(
        "docs/measures.md",
        "tokens per second: {} with turns of those without, {} through the endpoint of those of the engine; {} "
        "programs judged per second",
        "episodes-2026-11-23",
        (("turns_ratio", ".2f"), ("gateway_ratio", ".2f"), ("verdicts_per_s", ".0f")),
    ),
    Figure(
        "docs/measures.md",
        "held-out accuracy after 200 steps with a tool, three seeds: {}, {} and {} as environment, {}, {} and {} "
        "as agent",
        "calculator-2026-11-23",
        tuple(
            (lambda data, way=way, seed=seed: data["accuracy_after"][way][seed], ".1%")
            for way in ("environment", "agent")
            for seed in (0, 1, 2)
        ),
    ),
    Figure(
        "docs/measures.md",
        "reference solutions judged right: {} of {} of HumanEval, {} of {} of MBPP",
        "judge_data-2026-11-23",
        tuple((f"{name}/{key}", ".0f") for name in ("humaneval", "mbpp") for key in ("right", "rows")),
    ),
    Figure(
        "docs/measures.md",
        "the slowest answer to another client of the endpoint, while long calls are read: {} ms",
        "gateway-latency-2026-11-23",
        (("worst/health_max_ms", ".0f"),),
    ),
    Figure(
        "docs/measures.md",
        "two open pages of a running run: {} of a core",
        "watching-2026-11-23",
        (("core_share", ".0%"),),
    ),
    Figure(
        "docs/measures.md",
        "code lines: {} in the core, {} in parts; a demo of four steps enters {} files and "
        "builds {} types of records",
        "house-2026-11-27",
        (
            ("core_code_lines", ",d"), ("part_code_lines", ",d"), ("demo/steps/num_files", ".0f"),
            ("demo/steps/num_records", ".0f"),
        ),
    ),
    Figure(
        "docs/paper.md", "{} ms of CPU time per group at 16,384 simulated GPUs, and {} ms more of transport",
        "simulator-2026-11-21", (("controller_ms_per_group", ".2f"), ("transport_ms_per_group", ".2f")),
    ),
    Figure(
        "docs/paper.md", "{} times the colocated baseline's samples per second", ASYNC,
        (("speedup_vs_colocated", ".2f"),),
    ),
    Figure(
        "docs/paper.md", "{} times the synchronous mode's samples per second", ASYNC,
        (("speedup_vs_max_staleness_0", ".2f"),),
    ),
    Figure(
        "docs/paper.md", "in bfloat16: {} times with 10M parameters, {} times with 100M (one repeat at scale 0.15); "
        "both in float32: {} and {} times", DECODE,
        (
            *((f"ratio_vs_vllm/{size}_bf16", ".2f") for size in ("10m", "100m")),
            *((generation(size), ".2f") for size in ("10m", "100m")),
        ),
    ),
    Figure(
        "docs/paper.md", "{} times as fast as a gather and broadcast by shared memory, {} times by sockets. Verified "
        "publishing runs at {} of the speed of memcpy", SYNC,
        (
            ("ratio_vs_gather_broadcast", ".0f"), ("p2p_ratio_vs_gather_broadcast", ".1f"),
            ("share_of_memcpy_when_proved", ".2f"),
        ),
    ),
    Figure(
        "docs/paper.md", "Planning 405B on 512 to 512 ranks takes {} s", PLAN, ((f"{P405}wall_s", ".2f"),),
    ),
    Figure(
        "docs/reading_a_run.md", "Two open pages use {} of a core", "watching-2026-11-23", (("core_share", ".0%"),)
    ),
    *(
        Figure("docs/recovery.md", words, FAULTS, ((key, spec),))
        for words, key, spec in (
            ("until its replacement decodes | {} s |", "replacement_s", ".1f"),
            ("until it serves again | {} s |", "continue_s", ".1f"),
            ("from the mirror | {} s |", "trainer_mirror_s", ".1f"),
            ("25 steps back | {} s |", "trainer_checkpoint_s", ".1f"),
            ("mirror, share of a step | {} |", "mirror_share", ".1%"),
            ("journal, share of a step | {} |", "record_share", ".1%"),
        )
    ),
    Figure("docs/recovery.md", "the replacement decodes after {} s", FAULTS, (("replacement_s", ".1f"),)),
    Figure("docs/recovery.md", "longest step {} s", FAULTS, (("stop/longest_step_s", ".1f"),)),
    Figure(
        "docs/recovery.md", "{} ms at the 99th percentile", FAULTS,
        ((lambda data: 1e3 * data["stall_p99_s"], ".1f"),),
    ),
    Figure(
        "docs/recovery.md", "{} GB by shared memory, verified: {} times the time of two memcpys. Against gather and "
        "broadcast: {} times as fast, {} times by sockets", SYNC,
        (
            (lambda data: data["settings"]["weights_bytes"] / 1e9, ".2f"),
            (lambda data: 1 / data["share_of_memcpy_when_proved"], ".2f"),
            ("ratio_vs_gather_broadcast", ".0f"), ("p2p_ratio_vs_gather_broadcast", ".1f"),
        ),
    ),
    Figure(
        "docs/recovery.md", "blocked for {} of a save's time, {} for the first", CHECKPOINT,
        (("blocked_share", ".0%"), ("blocked_share_of_the_first", ".0%")),
    ),
    Figure(
        "docs/recovery.md", "the controller grew from {} to {} MB, {} MB per 100 steps", "soak-2026-11-22",
        tuple((f"processes/controller/rss_bytes/{one}", spec) for one, spec in
              (("first", ".0f"), ("last", ".0f"), ("per_100_steps", ".1f"))),
    ),
    Figure(
        "docs/recovery.md", "generator grew by {} MB, the trainer by {} and the reward executor by {}",
        "soak-2026-11-22",
        tuple((f"processes/{one}/rss_bytes/per_100_steps", ".2f") for one in ("generator-0", "trainer", "reward")),
    ),
    Figure(
        "docs/training.md", "takes {} of the memory of all logits including gradients, and {} times as long",
        "training-2026-11-21",
        (("head/tiles_of_2^23/memory_ratio", ".0%"), ("head/tiles_of_2^23/time_ratio", ".1f")),
    ),
    Figure(
        "docs/generation.md", "it adds {} to the time of a sync by shared memory, and {} by sockets", SYNC,
        (("fingerprint_share/shared_memory/both", ".0%"), ("fingerprint_share/p2p/both", ".0%")),
    ),
    Figure(
        "docs/generation.md",
        "| 1e-6 | {} | {} | {} | {}, mostly scales |",
        DELTA,
        (
            ("low/codecs/bfloat16/changed_share_values", ".2%"), ("low/codecs/bfloat16/bytes_share", ".1%"),
            ("low/codecs/int8/changed_share_values", ".2%"), ("low/codecs/int8/bytes_share", ".1%"),
        ),
    ),
    Figure(
        "docs/generation.md", "| 1.5e-4 (the demo's) | {} | | {} | |", DELTA,
        (("demo/codecs/bfloat16/changed_share_values", ".0%"), ("demo/codecs/int8/changed_share_values", ".1%")),
    ),
)  # fmt: skip


@cache
def measured(file: str) -> Any:
    (path,) = [path for folder in (RESULTS, SOAK) for path in folder.glob(f"{file}.json")]
    return json.loads(path.read_text(encoding="utf-8"))


def in_words(figure: Figure) -> str:
    """As the file has it."""
    texts = list[str]()
    for value, spec in figure.numbers:
        number = measured(figure.file)
        if isinstance(value, str):
            for key in value.split("/"):
                number = number[key]
        else:
            number = value(number)
        texts.append(format(number, spec).replace("%", " %"))
    return figure.words.format(*texts)


def plain(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("figure", FIGURES, ids=[f"{one.page}: {one.words[:40]}" for one in FIGURES])
def test_a_figure_is_that_of_its_file(figure: Figure) -> None:
    assert in_words(figure) in plain(figure.page)


def parts(page: Path) -> list[str]:
    """Rows of tables and paragraphs, each on one line; a table belongs to the paragraph above it."""
    blocks = re.split(r"\n\s*\n(?!\|)", page.read_text(encoding="utf-8"))
    return [
        " ".join(part.split())
        for block in blocks
        for part in (block.splitlines() if block.lstrip().startswith("|") else [block])
    ]


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_a_file_is_named_beside_figures_that_are_checked(page: Path) -> None:
    checked = [(one.file, in_words(one)) for one in FIGURES if one.page == name_of(page)]
    for part in parts(page):
        for shown, name in NAMED.findall(part):
            pattern = re.compile(re.escape(name).replace(r"\*", ".*"))
            there = [file for file, words in checked if pattern.fullmatch(file) and words in part]
            assert there, f"{name_of(page)} names {shown} and no figure of it is in FIGURES: {part[:200]}"


def test_every_file_is_one_that_a_document_names() -> None:
    pages = {figure.page: plain(figure.page) for figure in FIGURES}
    for figure in FIGURES:
        names = [re.escape(name).replace(r"\*", ".*") for _, name in NAMED.findall(pages[figure.page])]
        assert any(re.fullmatch(name, figure.file) for name in names), f"{figure.page} does not name {figure.file}"


def test_measures_have_every_file_with_its_day_its_machine_and_its_command() -> None:
    page = (ROOT / "docs" / "measures.md").read_text(encoding="utf-8")
    rows = {row["name"]: row for row in MEASURE.finditer(page)}
    assert rows.keys() == {path.stem for folder in (RESULTS, SOAK) for path in folder.glob("*.json")}
    for name, row in rows.items():
        data = measured(name)
        assert (row["date"], row["command"]) == (data["date"], data["command"]), name
        machine = data["machine"]
        if isinstance(machine, str):  # without its processor
            assert "2 cores" in machine
        else:
            processor = machine.get("processor", machine.get("cpu"))
            assert f"{processor}, {machine['cores']} cores" in page, f"{name}: say what machine it is of"


def test_commits_of_measures_are_known_here() -> None:
    if not (ROOT / ".git").exists() or _git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the history is not here")
    page = (ROOT / "docs" / "measures.md").read_text(encoding="utf-8")
    commits = {row["commit"] for row in MEASURE.finditer(page)}
    assert {commit: _git("cat-file", "-t", commit) for commit in commits} == dict.fromkeys(commits, "commit")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def test_the_check_can_fail() -> None:
    wrong = FIGURES[0]._replace(numbers=(*FIGURES[0].numbers[:-1], (lambda data: 0.99, ".2f")))
    assert in_words(FIGURES[0]) in plain("README.md")
    assert in_words(wrong) not in plain("README.md")
