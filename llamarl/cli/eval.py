"""`llamarl eval MODEL DATA`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamarl.cli.main import FAILURE, INTERRUPTED
from llamarl.cli.options import MODEL_HELP, add_settings, command_parser, told_of_delay, write_output
from llamarl.config import ConfigError, RunConfig, load_config, settled
from llamarl.data.files import suffix
from llamarl.run.answering import ENGINE
from llamarl.run.scored import BASE, completed, settings_for

if TYPE_CHECKING:
    from llamarl.controller.evaluation import EvalResult

SETTINGS = (
    "data.template", "data.system", "data.examples", "data.template_arguments", "data.date", "reward.parts",
    "rollout.max_new_tokens", "eval.samples", "eval.temperature", "eval.max_prompts", "seed", *ENGINE,
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "eval",
        "Score a checkpoint on held-out problems: accuracy with its interval of 95 %, pass@k, mean length.",
        "With --config, data, reward, limits, turns, device and types are that run's; options here win. Several "
        "samples are drawn at temperature 1 where nothing else is said.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("data", metavar="DATA", nargs="?", help="file of problems; default: data.eval of --config")
    parser.add_argument("--config", metavar="RUN.toml", help="a run's settings, for example its config.toml")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="of several sets this one; may be repeated"
    )
    parser.add_argument(
        "--against", metavar="MODEL", help="another model, which gets the same problems: the difference is told"
    )
    parser.add_argument("--output", metavar="FILE", help="write every response of MODEL as JSON Lines")
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON for each set, and the rest on standard error"
    )
    add_settings(parser, BASE, *SETTINGS)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command; the exit code."""
    options = _parser().parse_args(arguments)
    from llamarl.cluster.api import ExecutorError
    from llamarl.controller.supervision import Interrupted, Stalled
    from llamarl.run.compare import compared
    from llamarl.run.evaluate import response_rows

    try:
        results = _evaluated(options, options.model)
        others = _evaluated(options, options.against) if options.against else []
    except Interrupted as error:
        print(f"llamarl eval: {error}", file=sys.stderr)
        return INTERRUPTED
    except (ExecutorError, Stalled) as error:
        print(f"llamarl eval: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILURE
    differences = compared(results, others) if others else []
    if options.json:
        told = [one.to_json() for one in differences] or [{} for _ in results]
        rows = [one.metrics.to_json() | difference for one, difference in zip(results, told, strict=True)]
        print(*map(json.dumps, rows), sep="\n")
    else:
        _show(results, options.model if others else "")
        if others:
            _show(others, options.against)
        for one in differences:
            print(f"{options.model} minus {options.against}: {one}")
    if options.output:
        write_output(Path(options.output), "".join(json.dumps(row) + "\n" for row in response_rows(results)))
    return 0


def _show(results: Sequence[EvalResult], model: str) -> None:
    from llamarl.observability.screen import eval_facts, eval_table

    if model:
        print(f"{model}:")
    entries = [one.metrics for one in results]
    print(eval_facts(entries[0]) if entries[0].name is None else eval_table(entries))


def _evaluated(options: argparse.Namespace, model: str) -> list[EvalResult]:
    """Results of all sets that are asked for. Raises ConfigError, ExecutorError, Interrupted, Stalled."""
    from llamarl.run.evaluate import evaluate_checkpoint
    from llamarl.run.held_out import check_names
    from llamarl.run.scored import ready

    run = load_config(options.config) if options.config else None
    config = ready(_config(options, model, run), run, options.config, "llamarl eval", lambda: told_of_delay("eval"))
    check_names(config, options.only)
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=options.json)
    with Progress(*columns, console=console) as bar, ExitStack() as preparing:
        preparing.enter_context(told_of_delay("eval"))
        task = bar.add_task("", total=None)

        def show(done: int, total: int) -> None:
            preparing.close()
            bar.update(task, completed=done, total=total)

        def tell(text: str) -> None:
            print(text, file=sys.stderr if options.json else sys.stdout)

        return evaluate_checkpoint(config, show, tell, options.only)


def _reader(path: str) -> str:
    return "file" if suffix(path) else "jsonl"


def _config(options: argparse.Namespace, model: str, run: RunConfig | None) -> RunConfig:
    """Settings of the command line over those of the run. Raises ConfigError."""
    settings = settings_for(model, run)
    if options.data:
        settings["data"] = settings["data"] | {"eval": {"name": _reader(options.data), "path": options.data}}
    config = completed(settings, lambda one: settled(one, options.overrides))
    if config.data.eval is None:
        cause = f"{options.config} has no data.eval" if options.config else "DATA is missing"
        raise ConfigError(f"{cause}; name a file of problems, or a run with --config that has some")
    return config
