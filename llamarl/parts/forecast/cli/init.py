"""`llamarl init --model NAME --data NAME --gpus N [--gpu KIND]`."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from llamarl.cli.options import MODEL_HELP, add_settings, command_parser, write_output
from llamarl.config import ConfigError, RunConfig, read_json, resolved, validated
from llamarl.config.hub import hub_name, missing_folder, open_hub
from llamarl.models.fit import taken
from llamarl.observability.metrics import duration
from llamarl.parts.forecast.columns import FoundData, found_data
from llamarl.parts.forecast.constants import load_profile
from llamarl.parts.forecast.first_run import FirstRun, cpu_request, first_run
from llamarl.parts.forecast.hardware import CPU, GPUS, Pool, find_gpu
from llamarl.parts.forecast.lengths import Lengths
from llamarl.parts.forecast.request import PlanRequest
from llamarl.parts.forecast.run_file import LISTEN
from llamarl.parts.forecast.shapes import DecoderShape, built_in, config_only, find_model
from llamarl.run.prepare import check_parts

EPILOG = """Of a model, config.json is downloaded, unless its shape is built in; of the data, the README and one
file, unless that is large.
  llamarl init --model Qwen/Qwen3-0.6B --data openai/gsm8k --gpus 1 --gpu rtx4090-24g
  llamarl init --model Qwen/Qwen3-8B --data openai/gsm8k --gpus 8 --adapters never --output run.toml"""
BASE: dict[str, Any] = {
    "model": {"path": ""}, "data": {"train": "jsonl", "max_prompt_tokens": 512}, "steps": 200,
    "rollout": {"prompts_per_step": 32, "group_size": 8, "max_staleness": 4, "max_new_tokens": 1024},
}  # fmt: skip
"""Default workload of a first run. That of a run without GPUs is below."""
BASE_OF_CORES = {"prompts_per_step": 8, "group_size": 4, "max_staleness": 1, "max_new_tokens": 128}
KEPT = ("weights", "moments", "moments_on")
SETTINGS = (
    "steps", "data.max_prompt_tokens", *(f"rollout.{name}" for name in BASE["rollout"]),
    *(f"trainer.{name}" for name in KEPT),
)  # fmt: skip
ENDS = {"gsm8k": "`#### ` and the answer, as the data's do", "math": "\\boxed{the answer}"}
"""Expected ends of responses, by data."""
STATED = {
    "rollout": ("prompts_per_step", "group_size", "max_staleness", "window", "max_new_tokens"),
    "generator": ("device", "dtype", "replicas", "tensor_parallel", "max_running"),
    "trainer": ("device", "dtype", "learning_rate", "microbatch_tokens", "activation_checkpointing", "parallelism"),
    "cluster": ("placement",),
}
"""Settings that a file states even if they equal the defaults."""


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("init", "Write the run file of a first run: layouts, types and limits that fit.", EPILOG)
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help=MODEL_HELP)
    add("--data", required=True, metavar="NAME", help="a dataset on the Hub (owner/name), or a file: .jsonl, .csv, ...")
    add("--gpus", type=int, required=True, metavar="N", help="GPUs to use; 0: the cores of this machine")
    add("--gpu", metavar="KIND", help=f"{', '.join(name for name in GPUS if name != CPU)} (h100-80g)")
    add("--question", default="", metavar="COLUMN", help="column of the question (found by its name)")
    add("--answer", default="", metavar="COLUMN", help="column of the right answer (found by its name)")
    add("--adapters", choices=("auto", "always", "never"), default="auto",
        help="train low-rank adapters: if all weights do not fit (auto), always, or never")  # fmt: skip
    add("--profile", metavar="FILE", help="measured constants of your machine, JSON, for what the plan expects")
    add("--output", default="run.toml", metavar="RUN.toml", help="where to write it (run.toml)")
    add("--force", action="store_true", help="replace that file")
    add_settings(parser, BASE, *SETTINGS)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    options = _parser().parse_args(arguments)
    path = Path(options.output)
    if path.exists() and not options.force:
        raise ConfigError(f"{path} already exists; give another --output, or --force to replace it")
    if options.gpus < 0 or (options.gpus == 0 and options.gpu) or options.gpu == CPU:
        kind = f" with --gpu {options.gpu}" if options.gpu else ""
        raise ConfigError(
            f"--gpus {options.gpus}{kind}: give 1 or more, or --gpus 0 without --gpu for the cores of this machine"
        )
    shape = _model(options.model)
    data = found_data(options.data, options.question, options.answer)
    request, work = _asked(options, shape)
    given = {
        "name": Path(options.model.partition("@")[0]).name, "steps": work.steps,
        "model": {"path": shape.path or options.model},
        "data": {"train": data.train} | ({"eval": data.eval} if data.eval else {}),
        "reward": {"parts": [{"name": data.reward}]},
        **({"eval": {"every_steps": 20}} if data.eval else {}),
        "checkpoint": {"every_steps": max(1, min(50, work.steps))},
        "trainer": work.trainer.model_dump(include=set(KEPT), exclude_defaults=True),
    }  # fmt: skip
    found = first_run(request, given, options.adapters)
    check_parts(found.config)
    text = _text(found, data)
    write_output(path, text)
    print("\n".join(_summary(found, options)) + f"\nwrote {path}; check it, then start:\n"
          f"  llamarl train {path} --dry-run\n  llamarl train {path}")  # fmt: skip
    return 0


def _model(name: str) -> DecoderShape:
    """Returns the shape of a model. Fetches only config.json, and nothing for a built-in shape. Raises ConfigError."""
    of_hub = hub_name(name)
    if built_in(name) and not Path(name).exists():
        return find_model(name)
    try:
        folder = open_hub().fetched(of_hub, choose=config_only).folder if of_hub else Path(name)
        if not folder.is_dir():
            raise ConfigError(missing_folder(name))
        config = read_json(folder / "config.json", "give a Hugging Face folder, or a name of the Hub")
        return DecoderShape.from_hf(config, name)
    except ConfigError as error:
        raise ConfigError(f"--model {name}: {error}") from None


def _asked(options: argparse.Namespace, shape: DecoderShape) -> tuple[PlanRequest, RunConfig]:
    """Returns the planning request and the settings of its workload. Raises ConfigError."""
    of_kind = {"trainer": {"dtype": "bfloat16"}} if options.gpus else {"rollout": BASE["rollout"] | BASE_OF_CORES}
    base = BASE | of_kind
    work, context = resolved(base, options.overrides), shape.max_position_embeddings
    response = work.rollout.max_new_tokens
    if not any("max_new_tokens" in one for one in options.overrides):
        response = min(response, context // 2)
    prompt = work.data.max_prompt_tokens
    if not any("max_prompt_tokens" in one for one in options.overrides):
        prompt = max(1, min(prompt, context - response))
    profile = load_profile(options.profile)
    gpu = profile.device(find_gpu(options.gpu or ("h100-80g" if options.gpus else CPU)))
    request = PlanRequest.of_run(
        work.data, work.rollout, model=shape, prompt_tokens=prompt, lengths=Lengths.lognormal(limit_tokens=response),
        pools=(Pool(gpu=gpu, count=max(1, options.gpus)),), constants=profile.constants,
    ).with_trainer(work.trainer)  # fmt: skip
    if options.gpus == 0:
        request = cpu_request(request)
        request = replace(request, constants=profile.constants) if options.profile else request
    request.check()
    return request, work


def _summary(found: FirstRun, options: argparse.Namespace) -> Iterator[str]:
    """Yields lines on the chosen settings and the expected performance."""
    plan, config = found.plan, found.config
    lora = f"adapters of rank {config.trainer.lora.rank}" if config.trainer.lora else "all weights"
    yield f"trains      {lora}" + (f", as for all weights {found.because}" if found.because else "")
    roles = "share them and take turns" if config.cluster.placement == "colocated" else "have their own"
    layout, generator = config.trainer.parallelism, config.generator
    where = "threads" if options.gpus == 0 else "GPUs"
    counts = layout.num_ranks, generator.replicas * generator.tensor_parallel
    if options.gpus == 0:
        counts = config.trainer.threads, generator.threads * generator.replicas
    yield f"{where:<12}{counts[0]} for the trainer, {counts[1]} for the generators, which {roles}"
    for one in found.held[:2]:
        yield f"{one.executor:<12}takes {taken(one.parts)} per {'process' if options.gpus == 0 else 'GPU'}"
    whole_s = plan.step_s * config.steps
    source = options.profile or "the tables of `llamarl plan`, not a measurement"
    yield f"time        about {duration(plan.step_s)} a step, {duration(whole_s)} for {config.steps} steps, by {source}"
    if options.gpus and plan.dollars_per_hour:
        dollars = whole_s / 3600 * plan.dollars_per_hour
        yield f"cost        about {dollars:,.{0 if dollars >= 10 else 2}f} USD at the table's prices"


def _text(found: FirstRun, data: FoundData) -> str:
    """Returns the run file: settings that differ from the defaults, with reasons. Raises ConfigError."""
    config = found.config
    every, kept = config.model_dump(exclude_none=True), config.model_dump(exclude_defaults=True, exclude_none=True)
    for section, names in STATED.items():
        stated = {name: every[section][name] for name in names if name in every[section]}
        kept[section] = stated | kept.get(section, {}) | stated
    if config.cluster.kind != "hosts":  # the best that a machine has
        kept["cluster"].pop("kind", None)
    why = _reasons(found, data)
    lines = [f"# {one}" for one in why.pop("")]
    for row in tomli_w.dumps(kept).splitlines():
        section = row.strip("[]") if row.startswith("[") and row.endswith("]") else ""
        lines += [f"# {one}" for one in why.pop(section, [])] if section else []
        lines.append(row)
    text = "\n".join(lines) + "\n"
    assert validated(tomllib.loads(text), RunConfig) == config, "the file says what was planned"
    return text


def _reasons(found: FirstRun, data: FoundData) -> dict[str, list[str]]:
    """Returns comments by section. An empty section means the top of the file."""
    plan, config = found.plan, found.config
    rollout, trainer, generator = config.rollout, config.trainer, config.generator
    held = {one.executor: taken(one.parts) for one in found.held}
    on_cores = trainer.device == "cpu"
    each, pool = "of this machine" if on_cores else "per GPU", plan.request.pools[0]
    cores = f"{trainer.threads + generator.threads} threads"
    where = cores if on_cores else f"{plan.gpus} of {pool.count} x {pool.gpu.name}"
    step, whole = duration(plan.step_s), duration(plan.step_s * config.steps)
    reasons = {
        "": [
            f"Written by `llamarl init` for {plan.request.model.name} on {where}.",
            f"Estimated from tables, not measured: {step} a step, {whole} in all.",
        ],
        "data": data.why,
        "reward": [f"{data.reward!r}: responses end with {ENDS[data.reward]}; data.system may tell a chat model so"],
        "rollout": [f"prompts may have {config.data.max_prompt_tokens} tokens, responses {rollout.max_new_tokens}",
                    f"staleness {rollout.max_staleness}: the smallest within 10 % of the fastest"
                    if rollout.max_staleness else "staleness 0: trainer and generators take turns on the same devices"],
        "generator": [f"takes {held['generator-0']} {each}"],
        "trainer": [f"takes {held['trainer']} {each}"],
        "trainer.lora": [found.because or "adapters, as --adapters always asks for"],
    }  # fmt: skip
    if config.cluster.kind == "hosts":
        reasons["cluster"] = [f"{config.cluster.num_hosts} hosts; put this machine's address in place of {LISTEN}"]
    return reasons
