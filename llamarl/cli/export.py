"""`llamarl export RUN [FOLDER]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llamarl.cli.options import base_model, command_parser
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
    options = parser.parse_args(arguments)
    run = Path(options.run)
    if not (run / "config.toml").exists():
        raise ConfigError(f"RUN = {options.run!r} is no run folder (no config.toml in it); name one, such as runs/demo")
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
