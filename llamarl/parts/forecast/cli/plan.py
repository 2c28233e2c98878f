"""`llamarl plan --model llama3-405b --gpus 1024 ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarl.cli.options import TRUST, add_settings, check_output, command_parser, write_output
from llamarl.config import ConfigError, RunConfig, load_config, resolved
from llamarl.config.ref import nothing_run
from llamarl.parts.forecast.constants import load_profile
from llamarl.parts.forecast.feasibility import plans
from llamarl.parts.forecast.hardware import GPUS, Pool, find_gpu
from llamarl.parts.forecast.lengths import Lengths
from llamarl.parts.forecast.report import choose, plan_curves, render_plans, verdict, write_forecast
from llamarl.parts.forecast.request import PlanRequest, uncounted
from llamarl.parts.forecast.run_file import run_toml
from llamarl.parts.forecast.shapes import MODELS, DecoderShape, find_model, model_of_run

EXAMPLE = """The synchronous plan, staleness 0, is always shown too.
Without --mean-response-tokens or --rollouts, the mean response is 30 % of the longest.
A profile is a JSON file {"constants": {...}, "gpu": {...}} whose numbers replace the built-in ones.
  llamarl plan --model qwen3-8b --gpus 8
  llamarl plan --model qwen3-1.7b --gpus 1 --gpu rtx4090-24g --trainer.lora '{rank = 16}'"""
BASE = {
    "model": {"path": ""}, "data": {"train": "jsonl", "max_prompt_tokens": 512},
    "rollout": {"prompts_per_step": 256, "group_size": 8, "max_staleness": 4, "max_new_tokens": 4096},
}  # fmt: skip
"""Default workload of a step without a run file."""
OF_WEIGHTS = ("lora", "weights", "moments", "moments_on", "dtype", "device")
"""Settings of the trainer that determine the bytes per weight."""
SETTINGS = (
    "data.max_prompt_tokens", *(f"rollout.{name}" for name in BASE["rollout"]),
    *(f"trainer.{name}" for name in OF_WEIGHTS),
)  # fmt: skip
OF_RUN: Any = {"data": {"train", "max_prompt_tokens"}, "rollout": set(BASE["rollout"]), "trainer": {*OF_WEIGHTS}}
"""Settings that --config provides."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    found = command_parser(
        "plan", "Find the best layout, split and staleness for a model on a cluster, before renting it.", EXAMPLE
    )
    add = found.add_argument
    add("--config", metavar="RUN.toml", help="take model, lengths and batch from a run file; options here win")
    add("--model", help=f"{', '.join(MODELS)}, a name of the Hub, or a Hugging Face folder")
    add("--gpus", type=int, required=True, metavar="N", help="GPUs in the cluster")
    add(
        "--gpu",
        default="h100-80g",
        metavar="KIND",
        help=f"{', '.join(GPUS)} (h100-80g)",
    )
    add("--second-gpus", type=int, metavar="N", help="a second pool of another kind")
    add("--second-gpu", default="l40s-48g", metavar="KIND", help="kind of the second pool (l40s-48g)")
    add("--price", type=float, metavar="USD", help="per GPU-hour (from the table)")
    add("--second-price", type=float, metavar="USD", help="per GPU-hour of the second pool (from the table)")
    add("--mean-response-tokens", type=float, metavar="N", help="mean response (30 %% of the longest)")
    add("--response-sigma", type=float, default=0.7, metavar="S", help="log-deviation of the response length (0.7)")
    add("--rollouts", metavar="RUN", help="take response lengths from a run's folder, or a file of its rollouts")
    add("--profile", metavar="FILE", help="measured constants of your machine, JSON")
    add("--output", metavar="RUN.toml", help="write the better plan as a run file")
    add("--data", default="train.jsonl", metavar="FILE", help="training prompts, for --output (train.jsonl)")
    add("--folder", metavar="FOLDER", help="write plans, split sweep and staleness curve there, for llamarl report")
    add("--trust", action="store_true", help=TRUST)
    add_settings(found, BASE, *SETTINGS)
    return found


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    options = parser().parse_args(arguments)
    output = options.output and check_output(options.output)
    with nullcontext() if options.trust else nothing_run():
        base = load_config(options.config) if options.config else None
    request = asked(options, base)
    synchronous, asynchronous = plans(request)
    if base and (said := uncounted(base)):
        print(f"llamarl plan: {said}", file=sys.stderr)
    print(text := render_plans(request, synchronous, asynchronous))
    plan = choose(synchronous, asynchronous)
    if output:
        write_output(output, run_toml(plan, data_path=options.data, base=base))
        print(f"wrote {output}")
    if options.folder:
        found = {"end": "planned", "verdict": verdict(synchronous, asynchronous)}
        write_forecast(Path(options.folder), found, text, plan_curves(request, max(1, plan.staleness)))
        print(f"llamarl report {options.folder} shows it")
    return 0


def asked(options: argparse.Namespace, base: RunConfig | None) -> PlanRequest:
    """Returns the planning request for the options. Raises ConfigError."""
    if options.model:
        shape = find_model(options.model)
    elif base:
        shape = model_of_run(base, f"--config {options.config}")
    else:
        raise ConfigError("no model to plan for; give --model NAME or --config RUN.toml")
    profile = load_profile(options.profile)
    kinds = [(options.gpu, options.gpus, options.price)]
    if options.second_gpus is not None:
        kinds.append((options.second_gpu, options.second_gpus, options.second_price))
    if len(kinds) > 1 and profile.gpu:
        raise ConfigError(f"{options.profile} measures one kind of GPU, not two pools; leave out its `gpu` part")
    pools = []
    for kind, count, price in kinds:
        gpu = profile.device(find_gpu(kind))
        if price is not None and not 0 <= price < float("inf"):
            raise ConfigError(f"{price} US dollars per GPU-hour is not a price; use 0 or more")
        pools.append(Pool(gpu=gpu if price is None else replace(gpu, price=price), count=count))
    config = resolved(BASE | (base.model_dump(include=OF_RUN) if base else {}), options.overrides)
    request = PlanRequest.of_run(
        config.data,
        config.rollout,
        model=shape,
        prompt_tokens=_prompt_tokens(options, config, shape),
        lengths=_lengths(options, config.rollout.max_new_tokens),
        pools=tuple(pools),
        constants=profile.constants,
    ).with_trainer(config.trainer)
    request.check()
    return request


def _prompt_tokens(options: argparse.Namespace, config: RunConfig, shape: DecoderShape) -> int:
    """Returns the prompt length: the option, or `data.max_prompt_tokens`, reduced to the context as in a run."""
    prompt, room = config.data.max_prompt_tokens, shape.max_position_embeddings - config.rollout.max_new_tokens
    is_said = any(one.startswith("--data.max_prompt_tokens=") for one in options.overrides)
    return prompt if is_said or room < 1 else min(prompt, room)


def _lengths(options: argparse.Namespace, limit: int) -> Lengths:
    if options.rollouts:
        return Lengths.from_rollouts(options.rollouts)
    if not 0 <= options.response_sigma < 10:
        raise ConfigError(f"`--response-sigma {options.response_sigma}` is not a log-deviation; use 0 to 3")
    return Lengths.lognormal(mean_tokens=options.mean_response_tokens, sigma=options.response_sigma, limit_tokens=limit)
