"""`llamarl export RUN [FOLDER]`, `llamarl export RUN --rollouts [--output FILE]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llamarl.cli.options import base_model, command_parser, write_output
from llamarl.config import ConfigError, load_config


def main(arguments: Sequence[str]) -> int:
    """Runs the command; the exit code."""
    parser = command_parser(
        "export",
        "Write a run's newest valid checkpoint as a Hugging Face folder, or a LoRA run's adapters as PEFT's.",
    )
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/demo")
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", help="where to write (RUN/export; RUN/merged with --merge)"
    )
    parser.add_argument("--merge", action="store_true", help="merge a LoRA run's adapters: write a whole model")
    parser.add_argument("--step", type=int, help="checkpoint of this step (the newest)")
    parser.add_argument(
        "--rollouts", action="store_true", help="write instead every rollout that was trained on, a line of JSON each"
    )
    parser.add_argument("--output", metavar="FILE", help="of --rollouts (RUN/rollouts.jsonl)")
    options = parser.parse_args(arguments)
    run = Path(options.run)
    if not (run / "config.toml").exists():
        raise ConfigError(f"RUN = {options.run!r} is no run folder (no config.toml in it); name one, such as runs/demo")
    if options.rollouts:
        return _export_rollouts(run, options)
    if options.output:
        raise ConfigError("--output is for --rollouts; name the folder of the model behind RUN")
    folder = Path(options.folder) if options.folder else run / ("merged" if options.merge else "export")

    from llamarl.checkpoint.export import export_checkpoint

    config = load_config(run / "config.toml")
    lora = config.trainer.lora
    if options.merge and not lora:
        raise ConfigError("--merge is for adapters, and this run trained all weights; leave it out")
    base = base_model(run, config.model.path, config.output)
    step = export_checkpoint(run / "checkpoints", base, folder, options.step, lora, options.merge)
    print(f"step {step}: {folder}")
    return 0


def _export_rollouts(run: Path, options: argparse.Namespace) -> int:
    from llamarl.run.rollouts import rollout_lines

    for name in ("folder", "merge", "step"):
        if getattr(options, name) not in (None, False):
            raise ConfigError(f"--rollouts writes rows and no model, so {name} means nothing; leave one of them out")
    output = Path(options.output) if options.output else run / "rollouts.jsonl"
    lacks = list[str]()
    write_output(output, (f"{line}\n" for line in rollout_lines(run, lacks.append, output)))
    print(output)
    print(*lacks, sep="\n", end="\n" * bool(lacks), file=sys.stderr)
    return 0
