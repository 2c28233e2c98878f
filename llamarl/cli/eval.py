"""`llamarl eval MODEL DATA.jsonl`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamarl.cli.main import FAILURE, INTERRUPTED
from llamarl.cli.options import add_settings, command_parser, told_of_delay, write_output
from llamarl.config import ConfigError, RunConfig, load_config, settled

if TYPE_CHECKING:
    from llamarl.controller.evaluation import EvalResult

BASE: dict[str, Any] = {
    "model": {"path": ""}, "data": {"train": "jsonl"}, "eval": {"max_prompts": 1 << 30}, "cluster": {"kind": "inline"},
}  # fmt: skip
SETTINGS = (
    "data.template", "reward.parts", "rollout.max_new_tokens", "eval.samples", "eval.temperature", "eval.max_prompts",
    "generator.threads", "seed",
)  # fmt: skip
OF_RUN: Any = {
    "data": True, "reward": True, "rollout": {"max_new_tokens", "stop_strings", "environment", "agent"},
}  # fmt: skip
"""Sections, and settings of one, that --config gives."""


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "eval",
        "Score a checkpoint on held-out problems: pass@1, pass@k, mean length.",
        "With --config, data, reward, limits and turns are that run's; options here win. Several samples are drawn at "
        "temperature 1 where nothing else is said.",
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder")
    parser.add_argument("data", metavar="DATA.jsonl", nargs="?", help="problems; default: data.eval of --config")
    parser.add_argument("--config", metavar="RUN.toml", help="a run's settings, for example its config.toml")
    parser.add_argument("--output", metavar="FILE", help="write every response as JSON Lines")
    add_settings(parser, BASE, *SETTINGS)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command; the exit code."""
    options = _parser().parse_args(arguments)
    from llamarl.cluster.api import ExecutorError
    from llamarl.controller.supervision import Interrupted, Stalled
    from llamarl.observability.screen import eval_facts
    from llamarl.run.evaluate import evaluate_checkpoint

    config = _config(options)
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar, ExitStack() as preparing:
        preparing.enter_context(told_of_delay("eval"))
        task = bar.add_task("", total=None)

        def show(done: int, total: int) -> None:
            preparing.close()
            bar.update(task, completed=done, total=total)

        try:
            result = evaluate_checkpoint(config, show)
        except Interrupted as error:
            print(f"llamarl eval: {error}", file=sys.stderr)
            return INTERRUPTED
        except (ExecutorError, Stalled) as error:
            print(f"llamarl eval: {type(error).__name__}: {error}", file=sys.stderr)
            return FAILURE
    print(eval_facts(result.metrics))
    if options.output:
        _write_responses(Path(options.output), result)
    return 0


def _write_responses(path: Path, result: EvalResult) -> None:
    rows = (
        {
            "prompt_id": group.prompt.prompt_id,
            "prompt": group.prompt.text,
            "response": response,
            "answer": group.prompt.answer,
            "outcome": judged.outcome.value,
            "right": judged.is_right,
        }
        for group in result.groups
        for response, judged in zip(group.responses, group.results, strict=True)
    )
    write_output(path, "".join(json.dumps(row) + "\n" for row in rows))


def _config(options: argparse.Namespace) -> RunConfig:
    """Settings of the command line over those of the run. Raises ConfigError."""
    settings = BASE | {"model": {"path": options.model}}
    if options.config:
        settings |= load_config(options.config).model_dump(exclude_none=True, include=OF_RUN)
    if options.data:
        settings["data"] = settings["data"] | {"eval": {"name": "jsonl", "path": options.data}}
    config = settled(settings, options.overrides)
    if config.data.eval is None:
        cause = f"{options.config} has no data.eval" if options.config else "DATA.jsonl is missing"
        raise ConfigError(f"{cause}; name a file of problems, or a run with --config that has some")
    if config.eval.samples > 1:  # greedy ones are all the same
        config = settled(settings | {"eval": BASE["eval"] | {"temperature": 1.0}}, options.overrides)
    return config
