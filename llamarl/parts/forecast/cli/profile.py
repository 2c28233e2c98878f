"""`llamarl profile RUN [--output FILE]`, and `llamarl profile RUN --flame`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamarl.cli.options import check_output, command_parser, write_output
from llamarl.config import ConfigError
from llamarl.parts.forecast.flame import record
from llamarl.parts.forecast.profile import make_profile
from llamarl.parts.forecast.recorded import read_run

EPILOG = """The profile is valid for the model, threads and machine of the run. It predicts other settings:
  llamarl simulate RUN.toml --costs RUN/profile.json --rollout.group_size 4
  llamarl plan --config RUN.toml --gpus 2 --gpu cpu-core --profile RUN/profile.json
--flame shows where the processes of a running run on this machine spend their time (llamarl[flame])."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = command_parser(
        "profile", "Turn a short real run into measured constants for `plan` and `simulate`.", EPILOG
    )
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="where to write the profile (RUN/profile.json), or the flame graph (RUN/flame.svg)",
    )
    parser.add_argument("--flame", action="store_true", help="draw a flame graph of a running run instead")
    parser.add_argument("--seconds", type=float, metavar="N", help="with --flame: seconds to sample (15)")
    parser.add_argument("--gpu", metavar="KIND", help="kind of GPU of the run, as in `llamarl plan`")
    parser.add_argument(
        "--cores", type=float, metavar="N", help="cores that the executors shared (those of this machine)"
    )
    options = parser.parse_args(arguments)
    if options.flame:
        return _flame(options)
    if options.seconds is not None:
        raise ConfigError("--seconds is for --flame; leave it out, or add --flame")
    cores = os.cpu_count() or 1 if options.cores is None else options.cores
    if not 0 < cores < float("inf"):
        raise ConfigError(f"`--cores {cores:g}` must be above 0")
    run = read_run(options.run)
    profile = make_profile(run, cores=cores, gpu=options.gpu)
    path = check_output(options.output or run.path / "profile.json")
    write_output(path, json.dumps(profile) + "\n")
    print(_render(profile["costs"]) + f"\nwrote {path}")
    return 0


def _flame(options: argparse.Namespace) -> int:
    for name in ("gpu", "cores"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} is for a profile, not for a flame graph; leave it or --flame out")
    seconds = 15.0 if options.seconds is None else options.seconds
    if not 1 <= seconds <= 3600:
        raise ConfigError(f"--seconds {seconds:g} must be from 1 to 3600")
    path = check_output(options.output or Path(options.run, "flame.svg"))
    record(Path(options.run), seconds, path)
    print(f"wrote {path}; open it in a browser")
    return 0


def _render(costs: dict[str, Any]) -> str:
    def ms(name: str) -> str:
        return f"{costs[name] * 1e3:.3g} ms"

    facts = {
        "train step": f"{ms('train_base_s')} and {ms('train_token_gpu_s')} per computed token",
        "decode step": f"{ms('decode_base_s')} and {ms('decode_per_rollout_s')} per rollout in it",
        "prefill": f"{ms('prefill_token_s')} per token, prompts of {costs['prompt_tokens']} tokens",
        "weight sync": f"{ms('publish_s')} to publish, {ms('adopt_s')} to adopt, {ms('probe_s')} to probe",
        "score": f"{ms('score_s')} per response",
        "call": f"{ms('call_s')} there and back",
        "controller": f"{ms('controller_call_s')} per call and {ms('controller_rollout_s')} per rollout",
        "contention": f"{costs['contention']:.3f} times longer while two threads work at once",
    }
    return "\n".join(f"{name:<12} {text}" for name, text in facts.items())
