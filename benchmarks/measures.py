"""Writes docs/measures.md from the JSON files in benchmarks/results and benchmarks/soak.

    python benchmarks/measures.py

Each file has a sentence in SENTENCES, whose figures are paths into the file. The page is the same whenever the files
are; `tests/architecture/test_measures.py` checks that it is up to date.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from string import Formatter
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "measures.md"
PATHS = {path.stem: path for folder in ("results", "soak") for path in (HERE / folder).glob("*.json")}
FUNCTIONS: dict[str, Callable[[list[float]], float]] = {
    "min": min, "max": max, "mean": statistics.fmean, "median": statistics.median,
    "median error": lambda values: statistics.median(map(abs, values)),
    "worst error": lambda values: max(map(abs, values)),
}  # fmt: skip
HEAD = """# Benchmarks

Each item has a result, the processor and the file, which has the command, all numbers, settings and package versions.
To repeat a measurement, run the command on an idle machine. `python benchmarks/measures.py` generates this page.

The machines had two virtual cores of an AMD EPYC or Intel Xeon, which other work shared at times. Compare only figures
of the same file. Hosts are network namespaces of one machine. Items about a GPU name it.
"""
HALF_STEPS = "rows/@model=8b,dtype=bfloat16,graphs=True,batch=64,context=1024"
ERRORS = "settings_predicted/*/simulator/error/step_s"
AGAINST_TRL = (
    "{ratio_vs_trl/samples_per_s:.1f} times the samples per second of TRL's GRPO with {ratio_vs_trl/peak_memory:.0%} "
    "of its memory; rewards {reward_ours:.2f} and {reward_trl:.2f}"
)
AGAINST_BASE = (
    "one loop per object of the controller: {median_ratio:.2f} times the samples per second of the previous controller "
    "(three pairs, {ratio|min:.2f} to {ratio|max:.2f}), accuracy {mean_gap_points:+.2f} points"
)
STEPS_FORECAST = "simulated mean step time: median error {%s|median error:.1%%}, largest {%s|worst error:.1%%}, %s"
FAULTS = "{faults_tried:.0f} random faults in {settings/runs:.0f} runs, {faults_failed:.0f} failed"
SENTENCES: dict[str, dict[str, str]] = {
    "Training and asynchrony": {
        "asynchrony-2026-11-26": "samples per second of asynchronous training: {speedup_vs_max_staleness_0:.2f} times "
        "synchronous, {speedup_vs_colocated:.2f} times colocated (three seeds)",
        "learning-2026-11-25": "accuracy against synchronous training after 60 steps of the demo: staleness 1 "
        "{gap_points/demo S=1:+.1f} points ({interval/demo S=1/0:.1f} to {interval/demo S=1/1:.1f}, "
        "{seeds/demo S=1:.0f} pairs)",
        "families-2026-11-28": "hybrid demo against its dense twin: held-out accuracy {accuracy_after:.1%} and "
        "{accuracy_after_dense:.1%} (three seeds), {step_ratio:.2f} times the CPU time of a step; gradients "
        "{gradient_error/against_float64:.1e} from float64; chunked and recurrent form "
        "{chunked_vs_recurrent_nats/mean:.1e} nats apart",
        "distillation-2026-11-28": "distillation of the demo: within 3 points of the teacher after "
        "{distill_steps_ratio:.3f} "
        "of the steps of training with the reward, {distill_seconds_ratio:.2f} of the seconds (three seeds)",
        "learning-early-2026-11-28": "accuracy against synchronous training after 30 steps of the demo: staleness 1 "
        "{gap_points/early demo S=1:.1f} points, staleness 2 {gap_points/early demo S=2:.1f} (ten pairs each)",
        "learning-2026-11-26": "accuracy against synchronous training after 60 steps: staleness 2 "
        "{gap_points/demo S=2:+.1f} points ({interval/demo S=2/0:.1f} to {interval/demo S=2/1:.1f}, "
        "{seeds/demo S=2:.0f} pairs), staleness 4 {gap_points/demo S=4:+.1f} points, without Adam's momentum "
        "{gap_points/demo S=4 beta1 0:+.1f}; the calculator with staleness 1 {gap_points/calculator S=1:+.1f} points",
        "loop-2026-11-26": AGAINST_BASE,
        "loop-avx2-2026-11-26": f"{AGAINST_BASE}; AVX2",
        "loop-2026-11-28": "60 steps of the demo against commit 23758f0a, before rooms and constructors were "
        "rearranged: {median_ratio:.2f} times the samples per second (three pairs, {ratio|min:.2f} to {ratio|max:.2f})",
        "real-2026-11-28": "SmolLM2-135M on SVAMP in bfloat16, median of three seeds: held-out accuracy "
        "{accuracy_before:.1%} to {accuracy_after:.1%} in 150 steps and {minutes:.0f} minutes, largest mismatch after "
        "a sync {mismatch_mean_max:.3f} nats",
        "peers-real-2026-11-28": "first step of SmolLM2-135M on SVAMP: {ratio_vs_trl/samples_per_s:.0f} times TRL's "
        "samples per second, {ratio_vs_trl/peak_memory:.2f} of its memory, AVX-512",
        "gallery-2026-11-28": "examples, one seed, held-out accuracy after 60 steps: own reward "
        "{runs/own_reward/accuracy/0:.1%} to {runs/own_reward/accuracy/6:.1%}, judge {runs/judge/accuracy/0:.1%} to "
        "{runs/judge/accuracy/6:.1%}, code {runs/code/accuracy/0:.1%} to {runs/code/accuracy/6:.1%}",
        "start-2026-11-28": "the fork server saves {start_s_saved:.1f} s of the demo's start (quartiles "
        "{start_s_saved_quartiles/0:.1f} to {start_s_saved_quartiles/1:.1f} s, {settings/pairs:.0f} pairs)",
        "training-2026-11-21": "packed microbatches: {packing/ratio:.2f} times the tokens per second of padded ones; "
        "log-probabilities by tiles: {head/tiles_of_2^23/memory_ratio:.0%} of the memory, "
        "{head/tiles_of_2^23/time_ratio:.1f} times the time",
        "products-slow-mkl-2026-11-23": "float32 products by oneDNN where MKL is limited: a training step is "
        "{steps/demo/ratios/chosen:.2f} times (demo) and {steps/60M/ratios/chosen:.2f} times (60M) as fast",
        "products-2026-11-23": "float32 products by oneDNN where MKL is at its peak (AVX2): a training step is "
        "{steps/demo/ratios/chosen:.2f} times as fast (demo)",
        "checkpoint-2026-11-21": "training is blocked for {blocked_share:.0%} of a save's time, "
        "{blocked_share_of_the_first:.0%} of the first one's",
        "memory-2026-11-24": "one GPU at its peak: {8b_140gb_peak_gb:.1f} GB for 8B, {1_7b_24gb_peak_gb:.1f} GB for "
        "1.7B; accuracy after 60 steps of the demo: {accuracy_after/bfloat16 8bit:.1%} with bfloat16 weights and 8-bit "
        "moments, {accuracy_after/float32:.1%} in float32",
        "peers-2026-11-27": f"{AGAINST_TRL}; AVX-512, without AMX",
        "peers-2026-11-25": AGAINST_TRL,
    },
    "GPU": {
        "fp4-2026-11-28": "mean log-prob difference of SmolLM2-135M from bfloat16, emulated: int8 "
        "{rows/@kind=int8/mean:.2f} nats, "
        "fp8 {rows/@kind=fp8/mean:.2f}, NVFP4 weights {rows/@kind=nvfp4 weights/mean:.2f}, NVFP4 weights and "
        "activations {rows/@kind=nvfp4/mean:.2f}",
        "gpu-2026-11-26": f"one H100 (80 GB), 8B: decoding reaches {{{HALF_STEPS}/bandwidth_share:.2f}} of the memory "
        "bandwidth, training {rows/@part=train-8b,model=8b/mfu:.3f} of the peak; trainer and generator differ by "
        "{rows/@probe=mismatch,dtype=bfloat16/mean:.3f} nats",
    },
    "Generation": {
        "generation-avx512-2026-11-22": "tokens per CPU second against vLLM, AVX-512, bfloat16: "
        "{ratio_vs_vllm/10m_bf16:.2f} (10M), {ratio_vs_vllm/100m_bf16:.2f} (100M)",
        "generation-amx-2026-11-24": "tokens per CPU second against vLLM in bfloat16, AMX: "
        "{ratio_vs_vllm/10m_bf16:.2f} (10M), {ratio_vs_vllm/100m_bf16:.2f} (100M) in bfloat16; "
        "{ratio_vs_vllm/10m_int8:.2f} and {ratio_vs_vllm/100m_int8:.2f} in int8",
        "generation-amx-int8-2026-11-24": "tokens per CPU second against vLLM in bfloat16, AMX, two repeats: "
        "{ratio_vs_vllm/100m_int8:.2f} (100M) in int8",
        "generation-amx-fp32-2026-11-24": "tokens per CPU second against vLLM, both in float32, AMX: "
        "{ratio_vs_vllm/10m_fp32:.2f} (10M), {ratio_vs_vllm/35m_fp32:.2f} (35M), {ratio_vs_vllm/100m_fp32:.2f} (100M)",
        "generation-avx2-2026-11-26": "tokens per CPU second against vLLM in float32, AVX2, 10M, 35M and 100M: "
        "{ratio_vs_vllm/10m_fp32:.2f}, {ratio_vs_vllm/35m_fp32:.2f}, {ratio_vs_vllm/100m_fp32:.2f} in "
        "float32; {ratio_vs_vllm/10m_bf16:.2f}, {ratio_vs_vllm/35m_bf16:.2f}, {ratio_vs_vllm/100m_bf16:.2f} in "
        "bfloat16; {ratio_vs_vllm/10m_int8:.2f}, {ratio_vs_vllm/35m_int8:.2f}, {ratio_vs_vllm/100m_int8:.2f} in int8",
        "generation-avx2-2026-11-21": "tokens per CPU second against vLLM's fastest type, AVX2, 10M: "
        "{ratio_vs_vllm_best/10m_bf16:.2f} in bfloat16, {ratio_vs_vllm_best/10m_int8:.2f} in int8",
        "moe-2026-11-24": "mixtures of experts: weights are read at {decode_share:.2f} of the dense kernels' speed, "
        "recording experts costs {route_share:.1%} of a forward; KL against the dense demo {kl_ratio/bfloat16:.2f} "
        "times in bfloat16, {kl_ratio/int8:.2f} in int8, without router replay {kl_ratio_live/bfloat16:.2f} and "
        "{kl_ratio_live/int8:.2f} (speeds: Intel Xeon, AMX)",
    },
    "Weight transfer": {
        "weight_sync-2026-11-22": "speed against a gather and broadcast: {ratio_vs_gather_broadcast:.0f} times by "
        "shared memory, "
        "{p2p_ratio_vs_gather_broadcast:.1f} times by sockets",
        "weight_sync_plan-2026-11-22": "planning a transfer of 405B from 512 to 512 ranks: "
        "{planning/405B, 512 to 512 ranks/wall_s:.2f} s",
        "delta-2026-11-21": "values that a step changes at a learning rate of 1e-6: "
        "{low/codecs/bfloat16/changed_share_values:.2%} in bfloat16, {low/codecs/int8/changed_share_values:.2%} in "
        "int8",
        "hosts_weights-2026-11-25": "weights to two other hosts: {share_of_wire:.2f} of the bandwidth of iperf3, "
        "{share_of_wire_proved:.2f} with verification; to four replicas on four hosts {relay_ratio:.2f} times the "
        "time of one "
        "with relays, {direct_ratio:.2f} times without",
    },
    "Faults and hosts": {
        "strangers-2026-11-23": "2,000 silent connections to each of 18 ports: no process ends, an accepted connection "
        "waits at most {longest_s:.2f} s, steps run at {steps_per_s/during over steps_per_s/before:.2f} of their speed",
        "faults-2026-11-23": "a killed generator's replacement decodes after {replacement_s:.1f} s; a step after the "
        "trainer's death takes {trainer_mirror_s:.1f} s with the mirror, {trainer_checkpoint_s:.1f} s from a "
        "checkpoint 25 steps back",
        "faults_random-2026-11-27": FAULTS,
        "faults_random-2026-11-25": FAULTS,
        "faults_random-2026-11-22": FAULTS,
        "soak-2026-11-22": "10,000 steps: the controller grows by "
        "{processes/controller/rss_bytes/per_100_steps:.1f} MB per 100 steps",
        "hosts-2026-11-22": "the demo on three hosts: {demo_ratio:.2f} times the samples per second of the same "
        "processes on one; {losses_tried:.0f} hosts lost, {losses_failed:.0f} failed",
        "hosts-2026-11-25": "{losses_tried:.0f} hosts lost, {losses_failed:.0f} failed; the step after the loss of the "
        "trainer's host takes {trainer_host_s:.1f} s; with a fifth of one generator's packets lost the longest step "
        "takes {longest_step_lossy_s:.2f} s",
        "hosts-2026-11-26": "{losses_tried:.0f} hosts lost, the trainer's {losses_of_trainer:.0f} times, "
        "{losses_failed:.0f} failed, longest step {longest_step_s:.1f} s; a sync at 100 ms round trip takes "
        "{sync_100ms_s:.2f} s",
        "scale-2026-11-25": "1,024 agents connect within {agents_here_s:.1f} s and use {agents_core_share:.0%} of a "
        "core; a "
        "call to 32 processes takes {call_all_ms:.0f} ms; weights from 512 to 512 ranks take {max_descriptors:.0f} "
        "descriptors per process",
    },
    "Forecasts": {
        "prediction-2026-11-26": STEPS_FORECAST % (ERRORS, ERRORS, "eight settings, predicted before they ran"),
        "prediction-amx-2026-11-26": STEPS_FORECAST % (ERRORS, ERRORS, "eight other settings, with AMX"),
        "prediction-2026-11-22": STEPS_FORECAST % (ERRORS, ERRORS, "four settings"),
        "prediction-seed0-2026-11-22": STEPS_FORECAST % (ERRORS, ERRORS, "four other settings"),
        "planner-2026-11-26": "predicted step time compared with the paper's, calibrated at 8B: "
        "{paper_error/70b:+.0%} for 70B, {paper_error/405b:+.0%} for 405B",
        "simulator-2026-11-21": "CPU time of the controller per group at 16,384 simulated GPUs: "
        "{controller_ms_per_group:.2f} ms",
    },
    "Episodes, programs, the endpoint": {
        "episodes-2026-11-23": "tokens per second: {turns_ratio:.2f} times those without turns, {gateway_ratio:.2f} "
        "times the engine's through the endpoint; {verdicts_per_s:.0f} programs judged per second",
        "calculator-2026-11-23": "held-out accuracy after 200 steps with a tool, median of three seeds: "
        "{accuracy_after/environment|median:.1%} as environment, {accuracy_after/agent|median:.1%} as agent",
        "credit-2026-11-28": "steps until a policy of two rewarded turns is right, over those with the episode's "
        "reward: {turn_over_episode:.2f} with each turn's own, {to_go_over_episode:.2f} with rewards to go",
        "tasks-2026-11-28": "machines for episodes start in {machine_start_s:.2f} s (95th percentile "
        "{machine_start_p95_s:.2f} s), {machines_at_once:.0f} live at once, {abuses_failed:.0f} of {abuses_tried:.0f} "
        "abuses got nothing; {waiting_per_process:.0f} episodes that wait 0.5 s in one process take {waiting_s:.2f} s",
        "judge_data-2026-11-23": "reference solutions judged right: {humaneval/right:.0f} of {humaneval/rows:.0f} "
        "(HumanEval), {mbpp/right:.0f} of {mbpp/rows:.0f} (MBPP)",
        "gateway-latency-2026-11-23": "slowest answer of the endpoint to another client during long calls: "
        "{worst/health_max_ms:.0f} ms",
    },
    "Page and code": {
        "watching-2026-11-23": "two open pages of a running run use {core_share:.0%} of a core",
        "house-2026-11-27": "{core_code_lines:,d} lines of code in the core, {part_code_lines:,d} in parts; a demo "
        "of four steps enters {demo/steps/num_files:.0f} files",
        "suite-2026-11-29": "`make test`: {make_test_s:,.0f} s and {cpu_minutes:.0f} minutes of CPU time for "
        "{tests:,d} tests; beside two busy processes {busy/seconds:,.0f} s",
    },
}  # fmt: skip
"""Sentences by heading and file; `path|function` is one number of many, `path over path` a quotient."""


def value_at(data: Any, path: str) -> Any:
    """Returns what is at a path of keys and places; `*` means all of them, `@key=value,...` the only row that has these
    values and the next key."""
    if not path:
        return data
    key, _, rest = path.partition("/")
    if key == "*":
        return [value_at(one, rest) for one in (data.values() if isinstance(data, dict) else data)]
    if key.startswith("@"):
        wanted = dict(pair.split("=") for pair in key[1:].split(","))
        rows = [one for one in data if rest in one and all(str(one.get(name)) == wanted[name] for name in wanted)]
        (row,) = rows
        return row[rest]
    return value_at(data[int(key)] if isinstance(data, list) else data[key], rest)


class Figures(Formatter):
    """Fills the figures of a file into its sentence."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        path, _, function = field_name.partition("|")
        above, _, below = path.partition(" over ")
        found = value_at(args[0], above)
        if below:
            found /= value_at(args[0], below)
        return FUNCTIONS[function](found) if function else found, ""

    def format_field(self, value: Any, format_spec: str) -> str:
        return format(value, format_spec).replace("%", " %")


def row(name: str, sentence: str) -> str:
    """Returns a file's item of the page."""
    data = json.loads(PATHS[name].read_text(encoding="utf-8"))
    text, file = Figures().vformat(sentence, (data,), {}), PATHS[name].relative_to(HERE.parent).as_posix()
    return f"- {text[0].upper()}{text[1:]}. {processor(data)}, `{file}`"


def processor(data: dict[str, Any]) -> str:
    machine = data["machine"]
    name = machine.get("processor") or machine["cpu"] if isinstance(machine, dict) else str(machine).partition(",")[0]
    return name.replace("(R)", "").split()[0]


def page() -> str:
    """Returns the text of docs/measures.md."""
    parts = [HEAD]
    for heading, sentences in SENTENCES.items():
        lines = [row(name, sentence) for name, sentence in sentences.items()]
        parts.append("\n".join([f"## {heading}\n", *lines, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
