"""`llamarl eval MODEL DATA`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamarl.cli.main import FAILURE, INTERRUPTED
from llamarl.cli.options import (
    ASKED_HELP,
    ENGINE,
    TRUST,
    add_settings,
    check_output,
    command_parser,
    report_delays,
    write_output,
)
from llamarl.config import ConfigError, RunConfig, load_config, resolved
from llamarl.data.files import suffix
from llamarl.parts.answers.scored import BASE, completed, settings_for

if TYPE_CHECKING:
    from llamarl.controller.evaluation import EvalResult

RATE_SAMPLES = 8
"""Default number of samples for a pass rate."""
SETTINGS = (
    "data.template", "data.system", "data.examples", "data.template_arguments", "data.date", "reward.parts",
    "rollout.max_new_tokens", "eval.samples", "eval.temperature", "eval.max_prompts", "seed", *ENGINE,
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "eval",
        "Score a checkpoint on held-out problems: accuracy with its 95 % interval, pass@k, mean length.",
        "With --config, data, reward, limits, environment, device and types are those of that run; options given here "
        "win. Several samples are drawn at temperature 1 unless eval.temperature is set. --rates measures training "
        "problems, of which data.filter then selects some.",
    )
    parser.add_argument("model", metavar="MODEL|RUN", help=ASKED_HELP)
    parser.add_argument(
        "data", metavar="DATA", nargs="?", help="file of problems; default: data.eval of RUN or --config"
    )
    parser.add_argument("--config", metavar="RUN.toml", help="a run's settings (those of RUN)")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="score only this set; may be repeated"
    )
    parser.add_argument(
        "--against", metavar="MODEL|RUN", help="score another model on the same problems and print the difference"
    )
    parser.add_argument("--output", metavar="FILE", help="write every response of MODEL as JSON Lines")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON line per set, and everything else on standard error"
    )
    parser.add_argument(
        "--rates", metavar="FILE",
        help="measure DATA, or data.train of --config, and write how often each problem is solved (8 samples each)",
    )  # fmt: skip
    parser.add_argument("--trust", action="store_true", help=f"for RUN: {TRUST}")
    add_settings(parser, BASE, *SETTINGS)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    options = _parser().parse_args(arguments)
    from llamarl.cluster.api import ExecutorError
    from llamarl.controller.supervision import Interrupted, Stalled
    from llamarl.parts.answers.evaluate import response_rows

    if options.rates and (unfit := [name for name in ("only", "against") if getattr(options, name)]):
        raise ConfigError(f"--rates measures all of data.train with one model; leave --{unfit[0]} out")
    for option in ("output", "rates"):
        if named := getattr(options, option):
            check_output(named, options.data, options.config, option=f"--{option}")
    try:
        with ExitStack() as opened:
            if options.json:  # executors write to standard output, too
                opened.enter_context(redirect_stdout(sys.stderr))
            # A mistake in the other model shows before the first one is asked.
            configs = _all_ready(options, opened)
            (results, rates), *more = [_evaluated(options, config) for config in configs]
            others = more[0][0] if more else []
    except Interrupted as error:
        print(f"llamarl eval: {error}", file=sys.stderr)
        return INTERRUPTED
    except (ExecutorError, Stalled) as error:
        print(f"llamarl eval: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILURE
    _tell(options, results, others)
    if options.output:
        write_output(Path(options.output), "".join(json.dumps(row) + "\n" for row in response_rows(results)))
    if options.rates:
        write_output(Path(options.rates), "".join(rates), option="--rates")
        spread = _spread([json.loads(line) for line in rates[1:]])
        print(f"{options.rates}: {spread}", file=sys.stderr if options.json else sys.stdout)
    return 0


def _all_ready(options: argparse.Namespace, opened: ExitStack) -> list[RunConfig]:
    """Returns the settings to evaluate each model: those of --config, otherwise those of the first named run, for all
    models. Raises ConfigError."""
    from llamarl.run.models import asked_model

    names = [("MODEL", options.model)] + [("--against", options.against)] * bool(options.against)
    with report_delays("eval"):
        asked = [opened.enter_context(asked_model(name, at, command="llamarl eval")) for at, name in names]
    try:
        run, place = load_config(options.config) if options.config else None, options.config
    except ConfigError as error:
        raise ConfigError(f"--config {options.config}: {error}") from None
    if run is None and (of_run := next((one for one in asked if one.run is not None), None)):
        run, place = of_run.run, of_run.place
    return [_ready(options, one.path, run, place) for one in asked]


def _ready(options: argparse.Namespace, model: str, run: RunConfig | None, place: object) -> RunConfig:
    """Returns the settings to evaluate one model, with the names resolved as at the start of a run. Raises
    ConfigError."""
    from llamarl.parts.answers.scored import check_names, ready, with_code_of

    which: Literal["train", "eval"] = "train" if options.rates else "eval"
    delays = partial(report_delays, "eval")
    config = _config(options, model, run, which)
    if run is not None and isinstance(place, Path):  # of a folder that was named as a model, not by --config
        config = with_code_of(run, place, config, "llamarl eval", is_trusted=options.trust)
    config = ready(config, run, place, "llamarl eval", delays, which)
    check_names(config, options.only)
    return config


def _evaluated(options: argparse.Namespace, config: RunConfig) -> tuple[list[EvalResult], list[str]]:
    """Returns the results of all requested sets, and lines of pass rates. Raises ConfigError, ExecutorError,
    Interrupted, Stalled."""
    from llamarl.parts.answers.evaluate import evaluate_checkpoint, measured_rates

    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar, ExitStack() as preparing:
        preparing.enter_context(report_delays("eval", "starting the engine"))
        task = bar.add_task("", total=None)

        def show(done: int, total: int) -> None:
            preparing.close()
            bar.update(task, completed=done, total=total)

        if options.rates:
            result, rates = measured_rates(config, options.model, show, print)
            return [result], rates
        return evaluate_checkpoint(config, show, print, options.only), []


def _tell(options: argparse.Namespace, results: Sequence[EvalResult], others: Sequence[EvalResult]) -> None:
    """Prints the results of the model, those of the other model, and their differences."""
    from llamarl.observability.screen import eval_facts
    from llamarl.parts.answers.compare import compared
    from llamarl.parts.answers.evaluate import tell_invalid
    from llamarl.parts.answers.table import eval_table

    differences = compared(results, others) if others else []
    if options.json:  # in the tables it stands beside the numbers
        tell_invalid([*results, *others])
        told = [one.to_json() for one in differences] or [{} for _ in results]
        rows = [one.metrics.to_json() | difference for one, difference in zip(results, told, strict=True)]
        print(*map(json.dumps, rows), sep="\n")
        return
    for model, found in ((options.model, results), (options.against, others)):
        if others:
            print(f"{model}:")
        entries = [one.metrics for one in found]
        if entries:
            print(eval_table(entries) if entries[0].name else eval_facts(entries[0]))
    for one in differences:
        print(f"{options.model} minus {options.against}: {one}")


def _spread(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns text: the number of problems solved never, always, sometimes, and without a verdict."""
    judged = [(row["right"], row["samples"]) for row in rows if row["samples"]]
    never, always = sum(not right for right, _ in judged), sum(right == samples for right, samples in judged)
    unjudged = f", {len(rows) - len(judged):,} that could not be judged" if len(judged) < len(rows) else ""
    between = len(judged) - never - always
    return f"{len(rows):,} problems: {never:,} never solved, {always:,} always, {between:,} in between{unjudged}"


def _reader(path: str) -> str:
    return "file" if suffix(path) else "jsonl"


def _config(
    options: argparse.Namespace, model: str, run: RunConfig | None, which: Literal["train", "eval"]
) -> RunConfig:
    """Returns the settings of the run, overridden by the command line. Raises ConfigError."""
    settings = settings_for(model, run)
    if which == "train":
        settings["eval"] = settings["eval"] | {"samples": RATE_SAMPLES}
    if options.data:
        settings["data"] = settings["data"] | {which: {"name": _reader(options.data), "path": options.data}}
    config = completed(settings, lambda one: resolved(one, options.overrides))
    if which == "train" and not (run or options.data):
        raise ConfigError("--rates: DATA is missing; name a file of problems, or a run with --config")
    if which == "eval" and config.data.eval is None:
        cause = f"{options.config or options.model} has no data.eval" if run else "DATA is missing"
        raise ConfigError(f"{cause}; name a file of problems, or a run with --config that has some")
    return config
