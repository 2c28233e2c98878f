"""`llamarl sft SFT.toml [--key value ...]`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamarl.cli.options import command_parser
from llamarl.config import load_sft_config


def main(arguments: Sequence[str]) -> int:
    """Runs the command; the exit code."""
    parser = command_parser(
        "sft",
        "Make a small base model, tokenizer included, by a supervised warm start.",
        "Every setting of the file can be overridden: --output runs/base/mine --steps 500 --shape.num_layers 4.",
    )
    parser.add_argument("config", metavar="SFT.toml")
    options, overrides = parser.parse_known_args(arguments)
    config = load_sft_config(options.config, overrides)

    from llamarl.training.sft import SftProgress, run_sft

    columns = (TextColumn("warm start"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=config.steps, loss=float("nan"))

        def show(progress: SftProgress) -> None:
            bar.update(task, completed=progress.step, loss=progress.loss)

        folder = run_sft(config, show)
    print(f"base model: {folder}")
    return 0
