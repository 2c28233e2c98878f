"""`llamarl explain RUN.toml [--section.key value ...] [--json]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from llamarl.cli.options import TRUST, command_parser, report_delays, with_settings
from llamarl.config import ConfigError, RunConfig, load_config
from llamarl.config.hub import HubName, nothing_fetched, open_hub, why_offline
from llamarl.config.load import given
from llamarl.config.ref import nothing_run, part
from llamarl.config.section import Section
from llamarl.observability.spans import stage
from llamarl.parts.forecast.cli import plan
from llamarl.parts.forecast.constants import load_profile, of_these_cores
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.feasibility import plans
from llamarl.parts.forecast.hardware import CPU, GPUS
from llamarl.parts.forecast.shapes import DecoderShape, built_in
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.run import simulate
from llamarl.parts.forecast.simulator.split import choose_split
from llamarl.run.checks import check_layout
from llamarl.run.disk import disk_need
from llamarl.run.folder import RunFolder
from llamarl.run.hub_pins import named, resolved
from llamarl.run.memory import MachineMemory, described_machine, memory_lines
from llamarl.run.placement import LocalPlacer, models_in_use
from llamarl.run.prepare import check_parts, train_prompts

EPILOG = "Settings that have no effect together with the others are refused, as by `llamarl train`."
SAMPLED = 256
"""Prompts that are read to estimate their length."""
SIMULATED_STEPS = 40
SHARED_BYTES = 1e15
"""Bytes of memory per core that act as no limit."""
_UNITS = {"_s": "seconds", "_bytes": "bytes", "_tokens": "tokens", "steps": "optimizer steps", "_mismatch": "nats",
          "staleness": "optimizer steps", "tflops": "TFLOP/s"}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = command_parser(
        "explain", "Show each setting of a run, where it comes from, and what they result in.", EPILOG
    )
    parser.add_argument("config", metavar="RUN.toml")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--gpus", metavar="NxGB", help="GPUs of the target machine (default: this machine)")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    options, overrides = with_settings(parser, arguments)
    machine = None if options.gpus is None else described_machine(options.gpus)
    with nullcontext([]) if options.trust else nothing_run() as left_out:
        config = load_config(options.config, overrides)
        with report_delays("explain"), nothing_fetched("`llamarl explain` does not access the Hub"):
            found = explained(config, options.config, overrides, machine)
    if left_out:
        print(f"llamarl explain: not imported and not checked without --trust: {', '.join(left_out)}", file=sys.stderr)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for row in found["settings"]:
        unit = f" {row['unit']}" if row["unit"] and row["value"] is not None else ""
        print(f"{row['name']} = {json.dumps(row['value'])}{unit}  ({row['origin']})\n    {row['meaning']}")
    follows = found["consequences"].items()
    print(*(f"\n{name}:\n" + "\n".join(f"  {line}" for line in lines) for name, lines in follows), sep="")
    return 0


def explained(
    config: RunConfig, path: str, overrides: Sequence[str], machine: MachineMemory | None = None
) -> dict[str, Any]:
    """Returns all facts about a run on `machine`, or on this machine, as one object. Fetches no weights from the Hub.
    Raises ConfigError if the run cannot work."""
    check_parts(config)
    return {"settings": list(settings(config, *given(path, overrides))), "consequences": consequences(config, machine)}


def _pinned(config: RunConfig) -> RunConfig | None:
    """Returns settings with commits for models of the Hub. None means that they are not in the cache. Raises
    ConfigError."""
    try:
        return resolved(config, weights=False, data=False)
    except ConfigError as error:
        if not why_offline():
            raise
        if built_in_model(config):
            return None
        print(f"llamarl: memory and step time are not known: {error}", file=sys.stderr)
        return None


def built_in_model(config: RunConfig) -> DecoderShape | None:
    """Returns the built-in shape of the run's model. None means that there is none, or that the run uses other models
    too."""
    return None if any(one.path for one in models_in_use(config).values()) else built_in(config.model.path)


def settings(config: Section, file: set[str], line: set[str], where: str = "", recipe: str = "") -> Iterator[Any]:
    """Yields name, value, origin, unit and meaning of each setting. `file` and `line` are the names set there."""
    recipe = config.recipe if isinstance(config, RunConfig) else recipe
    for name, field in type(config).model_fields.items():
        value, dotted = getattr(config, name), where + name
        if isinstance(value, Section) and isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from settings(value, file, line, f"{dotted}.", recipe)
            continue
        if isinstance(value, list) and value and all(isinstance(one, Section) for one in value):
            for number, one in enumerate(value):  # of a source, what it settles itself
                own = settings(one, file, line, f"{dotted}.{number}.", recipe)
                yield from (row for row in own if row["value"] not in (None, []))
            continue

        is_default = not field.is_required() and (
            bool(field.validate_default) or value == field.get_default(call_default_factory=True)
        )
        origin = "default" if is_default or not recipe else f"recipe {recipe}"
        for names, where_from in ((file, "file"), (line, "command line")):
            if any(f"{one}.".startswith(f"{dotted}.") or dotted.startswith(f"{one}.") for one in names):
                origin = where_from
        unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
        plain = config.model_dump(mode="json", include={name})[name]
        meaning = " ".join((field.description or "").split())
        yield {"name": dotted, "value": plain, "origin": origin, "unit": unit, "meaning": meaning}


def consequences(config: RunConfig, machine: MachineMemory | None = None) -> dict[str, list[str]]:
    """Returns the consequences of all settings, as lines by topic. Raises ConfigError if no layout fits."""
    placer: LocalPlacer | None = None
    if config.cluster.kind == "hosts":
        hosting, gpus = part("hosts", "imagined")(config)
        each = f"with {gpus} GPUs each" if gpus else "without GPUs"
        table = [f"on hosts {each}; `llamarl doctor --hosts` checks connected hosts", *hosting.table()]
    else:
        placer = LocalPlacer(config, len(machine.gpus) if machine else None)
        table = [*placer.table(), *filter(None, [placer.sharing])]
        for said in filter(None, (placer.lack, *placer.crowded())):
            print(f"llamarl: {said}", file=sys.stderr)
    rollout, sync = config.rollout, config.weight_sync
    limit = rollout.staleness_limit
    folder = RunFolder(Path(config.output, config.name))
    how = (
        "the transport that is measured to be the fastest at the start" if sync.transport == "auto" else sync.transport
    )
    found = {"executors": table, "files": [f"{path}  {meaning}" for path, meaning in folder.files.items()]}
    found["staleness"] = [f"tokens are at most {limit} optimizer steps old when they are trained on"]
    found["weights"] = [f"sent by {how}{', changes only' if sync.delta else ''}"]
    is_here = Path(config.model.path).exists() or not config.model.warm_start  # which makes it on first use
    if is_here and (pinned := _pinned(config)):
        if of_hub := [_of_hub(one.name) for one in named(pinned) if one.kind == "model" and one.name]:
            found["models"] = of_hub
        shape, warnings = check_layout(config := pinned)
        for warning in warnings:
            print(f"llamarl: {warning}", file=sys.stderr)
        found["memory"] = memory_lines(config, shape, machine)
        if machine is None and config.cluster.kind != "hosts":  # their trainers write to other disks
            found["disk"] = disk_need(config, shape).lines()
        found["step time"] = [_step_time(config, shape.max_position_embeddings, _pool(config, machine, placer))]
    elif is_here and not Path(config.model.path).exists() and (known := built_in_model(config)):
        found |= _of_built_in(config, known, _pool(config, machine, placer), machine)
    return found


def _of_built_in(config: RunConfig, shape: DecoderShape, pool: tuple[int, str], machine: MachineMemory | None) -> Any:
    """Returns lines by topic about a model that is not on this machine, from its built-in shape. Raises ConfigError."""
    return {
        "models": [f"{config.model.path} is not on this machine; its built-in shape is used"],
        "memory": memory_lines(config, shape, machine),
        "step time": [_step_time(config, shape.max_position_embeddings, pool)],
    }


def _of_hub(name: HubName) -> str:
    """Returns a line about a model of the Hub, whose files are listed here."""
    hub = open_hub()
    files = hub.listing(name)[1]
    try:
        weights = sum(files[path] for path in hub.model_files(files) if path.endswith(".safetensors"))
    except ConfigError as error:
        return f"{name}: {error}"
    where = "in the cache" if hub.cached(name) else "which a run downloads"
    return f"{name}: {weights / 1e6:,.1f} MB of weights, {where}"


def _pool(config: RunConfig, machine: MachineMemory | None, placer: LocalPlacer | None) -> tuple[int, str]:
    """Returns the number of devices that train and generate (a shared device counts once), and their kind in the
    planner's table: cores, or the fastest GPU whose memory is nearest to that of `machine`."""
    trainer, generator = config.trainer, config.generator
    is_cpu = trainer.device == "cpu"
    count = trainer.parallelism.num_ranks * (trainer.threads if is_cpu else 1)
    count += generator.replicas * generator.tensor_parallel * (generator.threads if is_cpu else 1)
    if is_cpu:
        return count, CPU
    if placer is not None:
        used = {
            one for role in ("trainer", "generator") for name in placer.of_role(role) for one in placer.devices(name)
        }
        count = len(used) or count
    if machine is None or not machine.gpus:
        return count, "h100-80g"
    known = [one for name, one in GPUS.items() if name != CPU]
    return count, min(known, key=lambda one: (abs(one.memory_bytes - machine.gpus[0]), -one.bf16_flops)).name


def _simulated(config: RunConfig, profile: Path) -> str:
    """Returns a sentence on the seconds of a step by the costs of a profile, or empty without costs. Only executors
    that share this machine's processors are simulated. Raises ConfigError."""
    if "cpu" not in (config.trainer.device, config.generator.device) or not load_profile(profile).costs:
        return ""
    costs, steps = Costs.load(profile), min(config.steps, SIMULATED_STEPS)
    config = config.model_copy(update={"steps": steps})
    with TemporaryDirectory() as folder:
        split = choose_split(config, costs, None, None)
        found = simulate(config, costs, Faults(), split, Path(folder) / "metrics.jsonl")
    return f"{found.step_s.mean():.3g} s, the mean of {steps} steps simulated by {profile}"


def computed_tokens(prompts: Sequence[np.ndarray], per_step: int) -> float:
    """Returns the mean tokens that a step computes for each prompt. What all prompts begin with counts once."""
    shortest = min(map(len, prompts))
    stack = np.stack([prompt_T[:shortest] for prompt_T in prompts])
    differs = np.flatnonzero((stack != stack[0]).any(0))
    shared = int(differs[0]) if len(differs) else shortest
    return fmean(map(len, prompts)) - shared * (1 - 1 / per_step)


def _mean_prompt(config: RunConfig, context: int, kind: str) -> int:
    """Returns the mean tokens of a prompt that a step computes. For missing data, the maximum. Raises ConfigError."""
    try:
        prompts = train_prompts(config, context, most=SAMPLED).prompts
    except ConfigError:
        if why_offline() and built_in_model(config):
            return max(1, min(config.data.max_prompt_tokens, context - config.rollout.max_new_tokens))
        raise
    if kind == CPU:  # where trainer and generators share what prompts begin with
        return round(computed_tokens([one.token_ids_T for one in prompts], config.rollout.prompts_per_step))
    return round(fmean(len(prompt.token_ids_T) for prompt in prompts))


@stage("forecasting the time of a step")
def _step_time(config: RunConfig, context: int, pool: tuple[int, str]) -> str:
    """Returns a sentence with the estimated seconds of a step for prompts like the first ones of the data: simulated
    with the profile of an earlier run of this name if there is one, otherwise planned for the best layout."""
    trainer, (count, kind) = config.trainer, pool
    profile = Path(config.output, config.name, "profile.json")
    with suppress(ConfigError):
        if profile.exists() and (said := _simulated(config, profile)):
            return said
    try:
        mean = _mean_prompt(config, context, kind)
        words = {"--gpus": count, "--gpu": kind, "--data.max_prompt_tokens": mean}
        words |= {"--profile": profile} if profile.exists() else {}
        request = plan.asked(plan.parser().parse_args([str(word) for pair in words.items() for word in pair]), config)
        if kind == CPU:  # whose memory is not a core's; whether the run fits, `memory` says
            pools = [replace(one, gpu=replace(one.gpu, memory_bytes=SHARED_BYTES)) for one in request.pools]
            request = replace(request, pools=tuple(pools))
        if not profile.exists():
            constants = of_these_cores(trainer.dtype) if kind == CPU else request.constants
            constants = replace(constants, recompute=float(trainer.activation_checkpointing is True))
            request = replace(request, constants=constants)
        found = plans(request)[config.rollout.max_staleness > 0]
    except ConfigError as error:
        return f"not known: {error}"
    work = f"prompts of {mean} and responses of {request.lengths.mean_tokens:.0f} tokens on {count} x {kind}"
    seconds = f"{found.step_s:.3g} s, if every group has a gradient," if found else "no layout"
    source = f"by {profile}" if profile.exists() else "estimated from the tables of `llamarl plan`"
    return f"{seconds} for {work}, {source}"
