"""`llamarl export RUN [FOLDER]`, `llamarl export RUN --rollouts [--output FILE]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llamarl.cli.options import check_output, command_parser, write_into_run, write_output
from llamarl.config import ConfigError, RunConfig, load_recorded
from llamarl.config.hub import HubName, open_hub
from llamarl.config.ref import nothing_run
from llamarl.config.section import not_a_run


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = command_parser(
        "export",
        "Write a run's newest valid checkpoint as a Hugging Face folder, or a LoRA run's adapters in PEFT format.",
    )
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/demo")
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", help="where to write (RUN/export; RUN/merged with --merge)"
    )
    parser.add_argument("--merge", action="store_true", help="merge a LoRA run's adapters into a whole model")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="type of the weights (trainer.dtype; float32 for adapters)"
    )
    parser.add_argument("--step", type=int, help="checkpoint of this step (the newest)")
    parser.add_argument(
        "--rollouts",
        action="store_true",
        help="instead of the model, write every rollout that was trained on, as JSON Lines",
    )
    parser.add_argument("--output", metavar="FILE", help="with --rollouts: file to write (RUN/rollouts.jsonl)")
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload the result to the Hugging Face Hub, with a model card (needs HF_TOKEN)",
    )
    parser.add_argument(
        "--public", action="store_true", help="with --push: a repository that is created is public (private)"
    )
    options = parser.parse_args(arguments)
    with nothing_run():
        return _export(options)


def _export(options: argparse.Namespace) -> int:
    """Exports what the options name. Returns the exit code. Raises ConfigError."""
    run, name = Path(options.run), _name(options)
    if not (run / "config.toml").exists():
        raise not_a_run(run)
    if options.rollouts:
        return _export_rollouts(run, options)
    if options.output:
        raise ConfigError("--output is for --rollouts; give the model's folder after RUN")

    from llamarl.run.export import export

    config = load_recorded(run / "config.toml")
    found = export(
        run, config, options.folder, options.step, options.merge, command="llamarl export", dtype=options.dtype
    )
    print(f"step {found.step}: {found.folder}", found.why, found.prompts, sep="\n")
    if name is not None:
        _push(run, config, found.folder, found.step, name, options)
    return 0


def _name(options: argparse.Namespace) -> HubName | None:
    """Returns the repository for --push. None means no upload. Raises ConfigError."""
    if options.push is None:
        if options.public:
            raise ConfigError("--public is for --push; leave it out, or add --push OWNER/NAME")
        return None
    name = HubName.of(options.push)
    if name is None or name.revision or options.rollouts:
        why = "rollouts are not a model" if options.rollouts else "it is not the name of a repository"
        raise ConfigError(f"--push {options.push}: {why}; give OWNER/NAME, and a model to push")
    return name


def _push(run: Path, config: RunConfig, folder: Path, step: int, name: HubName, options: argparse.Namespace) -> None:
    adapters = config.trainer.lora is not None and not options.merge
    try:
        said = open_hub().push_model(run, config, folder, step, name, adapters=adapters, private=not options.public)
    except ConfigError as error:
        raise ConfigError(f"--push {name}: {error} (it is written to {folder})") from None
    print(f"pushed: {said}")


def _export_rollouts(run: Path, options: argparse.Namespace) -> int:
    from llamarl.run.rollouts import rollout_lines

    for name in ("folder", "merge", "step", "dtype"):
        if getattr(options, name) not in (None, False):
            raise ConfigError(f"--rollouts writes rows and not a model, so {name} has no effect; leave one of them out")
    output = check_output(options.output or run / "rollouts.jsonl")
    lacks = list[str]()
    write = write_output if options.output else write_into_run
    write(output, (f"{line}\n" for line in rollout_lines(run, lacks.append, output)))
    print(output)
    print(*lacks, sep="\n", end="\n" * bool(lacks), file=sys.stderr)
    return 0
