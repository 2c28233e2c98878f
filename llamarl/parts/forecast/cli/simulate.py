"""`llamarl simulate RUN.toml --gpus 16384 --faults ... [--section.key value ...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from llamarl.cli.main import FAILURE
from llamarl.cli.options import command_parser, with_settings
from llamarl.config import ConfigError, RunConfig, load_config, read_json
from llamarl.config.schema import CheckpointConfig
from llamarl.observability.report import write_trace
from llamarl.parts.forecast.constants import Constants, of_these_cores
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.feasibility import plans
from llamarl.parts.forecast.hardware import CPU, Pool, find_gpu
from llamarl.parts.forecast.lengths import SIGMA, Lengths
from llamarl.parts.forecast.report import chosen, render_simulation, summary, write_events, write_forecast
from llamarl.parts.forecast.request import PlanRequest, uncounted
from llamarl.parts.forecast.shapes import DecoderShape, find_model, model_of_run
from llamarl.parts.forecast.simulator.faults import HELP, Faults
from llamarl.parts.forecast.simulator.run import simulate
from llamarl.parts.forecast.simulator.split import choose_split
from llamarl.run.folder import prepare_run_folder

EPILOG = """Runs the real controller under a virtual clock over simulated executors; needs neither GPUs nor torch.
Costs come from --costs (a JSON file), or from the planner: for --model on --gpu, or for the run's own model on its kind
of device. If that model is not on this machine, costs of a 70B model on H100s are used.
Every setting of the run file can be overridden: --rollout.max_staleness 2 --cluster.on_failure.generator respawn.
llamarl report shows its folder. Exit codes: 0 all steps done, 1 the simulated run failed, 2 a setting cannot work."""
DEFAULT_GPU = "h100-80g"
SHARED_BYTES = 1e15
"""Bytes of memory per core that act as no limit."""
TRACE_GENERATORS = 64
"""Maximum number of generators in the trace, because viewers cannot hold thousands."""


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("simulate", "Simulate a run on a cluster of any size.", EPILOG)
    add = parser.add_argument
    add("config", metavar="RUN.toml")
    add("--gpus", type=int, metavar="N", help="GPUs of the cluster (twice those of the run's generators)")
    add("--trainer-gpus", type=int, metavar="N", help="GPUs of the trainer (the split with the shortest step)")
    add("--faults", default="", metavar="LIST", help=HELP)
    add("--costs", metavar="FILE", help="JSON file of costs, such as RUN/profile.json")
    add("--model", metavar="NAME", help="use the planner's costs for this model, e.g. llama3-405b")
    add("--gpu", metavar="KIND", help="with --model: the kind of GPU (h100-80g)")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    options, overrides = with_settings(_parser(), arguments)
    config = load_config(options.config, overrides)

    if options.gpu and not options.model:
        raise ConfigError("--gpu chooses the kind of GPU for the planner; give --model NAME, or --gpus N for a number")
    if options.model and options.costs:
        raise ConfigError("--model and --costs both give the costs; give one")
    costs = Costs.load(options.costs) if options.costs else Costs()
    model = _model(options, config)
    if model:
        config, costs = _planned(options, config, model)
    split = choose_split(config, costs, options.gpus, options.trainer_gpus)
    faults = Faults.parse(options.faults, split.replicas)
    config = config.model_copy(update={"name": f"{config.name}-simulation", "checkpoint": CheckpointConfig()})
    folder = prepare_run_folder(config, resume=False, overwrite=True)
    simulation = simulate(config, costs, faults, split, folder.metrics)
    if said := uncounted(config):
        print(f"llamarl simulate: {said}", file=sys.stderr)
    print(text := f"{'costs':<12} {_source(options, config, model)}\n{render_simulation(simulation)}")
    write_trace(folder.trace, chosen(simulation.spans, TRACE_GENERATORS))
    costs.save(folder.path / "costs.json")
    write_events(folder.events, simulation)
    write_forecast(folder.path, summary(simulation), text)
    names = sorted(path.name for path in folder.path.iterdir() if path.is_file() and path.name[0] != ".")
    print(f"files        {folder.path}: {', '.join(names)}")
    return 0 if simulation.end == "finished" else FAILURE


def _model(options: argparse.Namespace, config: RunConfig) -> DecoderShape | None:
    """Returns the shape of --model or of the run's model. None means that --costs provides the times, or that the run's
    model is not on this machine. Raises ConfigError."""
    if options.model:
        return find_model(options.model)
    with suppress(ConfigError):
        return None if options.costs else model_of_run(config, options.config)
    return None


def _kind(options: argparse.Namespace, config: RunConfig) -> str:
    """Returns the kind of device of the simulated cluster."""
    on_cores = not options.model and config.trainer.device == config.generator.device == "cpu"
    return options.gpu or (CPU if on_cores else DEFAULT_GPU)


def _source(options: argparse.Namespace, config: RunConfig, model: DecoderShape | None) -> str:
    """Returns a description of the costs: model, device and source."""
    if model:
        measured = "" if options.model else "; --costs RUN/profile.json has measured ones"
        return f"of {model.name} on {_kind(options, config)}, by the tables of `llamarl plan`{measured}"
    if options.costs:
        run = read_json(options.costs, "give the JSON file of costs").get("run", {})
        model = run.get("model") if isinstance(run, dict) else None
        return f"as {options.costs} has them" + (f", measured with {model} on {run.get('device')}" if model else "")
    others = "--costs RUN/profile.json has measured ones, --model NAME the planner's"
    return f"of a 70B model on H100s, built in, and not those of model.path = {config.model.path!r}; {others}"


def _planned(options: argparse.Namespace, config: RunConfig, model: DecoderShape) -> tuple[RunConfig, Costs]:
    """Returns the settings and the planner's costs for the model, with the planned number of concurrent rollouts per
    generator. Raises ConfigError."""
    if options.gpus is None and options.model:
        raise ConfigError("--model uses the planner, which needs the size of the cluster; give --gpus N")
    rollout, gpu = config.rollout, find_gpu(_kind(options, config))
    count, constants, prompt = options.gpus, Constants(), config.data.max_prompt_tokens
    if count is None:
        count = max(2, 2 * config.generator.replicas * config.generator.tensor_parallel)
    if gpu.name == CPU:  # whose memory is not a core's
        gpu, constants = replace(gpu, memory_bytes=SHARED_BYTES), of_these_cores(config.trainer.dtype)
    if not options.model:  # cut as a run's are
        prompt = max(1, min(prompt, model.max_position_embeddings - rollout.max_new_tokens))
    request = PlanRequest.of_run(
        config.data,
        rollout,
        model=model,
        prompt_tokens=prompt,
        max_staleness=max(1, rollout.max_staleness),
        lengths=Lengths.lognormal(limit_tokens=rollout.max_new_tokens),
        pools=(Pool(gpu=gpu, count=count),),
        constants=constants,
    )
    request.check()
    _, plan = plans(request)
    if plan is None:
        raise ConfigError(f"no asynchronous split of {model.name} fits {count} x {gpu.name}; give more --gpus")
    generator = config.generator.model_copy(update={"max_running": plan.generator.slots})
    costs = replace(Costs.from_plan(plan), response_sigma=SIGMA)
    return config.model_copy(update={"generator": generator}), costs
