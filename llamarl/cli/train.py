"""`llamarl train RUN.toml [--section.key value ...]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.cli.main import FAILURE, INTERRUPTED
from llamarl.cli.options import TRUST, command_parser, report_delays, with_settings
from llamarl.cli.restarts import WOULD_FAIL_AGAIN, run_with_restarts
from llamarl.config import ConfigError, RunConfig, dump_toml, load_config
from llamarl.config.hub import NotFetched, nothing_fetched
from llamarl.config.ref import part
from llamarl.observability.screen import print_to
from llamarl.observability.spans import now_s, stage

if TYPE_CHECKING:
    from llamarl.run.memory import MachineMemory

EPILOG = """Every setting of the file can be overridden: --steps 10 --trainer.learning_rate 1e-5
--trainer.loss aipo --trainer.loss.rho 8. A recipe sets what file and command line do not: --recipe grpo.
Your own classes are `package.module:Class`, imported from the working folder.
Exit codes: 0 all steps done, 1 the run failed, 2 a setting cannot work, 130 ended by Ctrl-C or SIGTERM."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    started_s = now_s()
    parser = command_parser("train", "Asynchronous reinforcement learning from a TOML file.", EPILOG)
    parser.add_argument("config", metavar="RUN.toml")
    parser.add_argument("--resume", action="store_true", help="continue the run from where it ended")
    parser.add_argument("--trust", action="store_true", help=f"with --resume: {TRUST}")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing run folder")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the settings, print how the run would start, and stop"
    )
    parser.add_argument("--settings", action="store_true", help="with --dry-run: print all settings as TOML first")
    parser.add_argument("--gpus", metavar="NxGB", help="with --dry-run: GPUs of the target machine, such as 8x80")
    parser.add_argument(
        "--json", action="store_true", help="with --dry-run: print one JSON object, as `llamarl explain --json`"
    )
    parser.add_argument("--restarts", type=int, metavar="N", help="if the run dies, resume it, at most N times")
    parser.add_argument("--watch", action="store_true", help="also show the run in a browser, as `llamarl watch` does")
    options, overrides = with_settings(parser, arguments)
    config = load_config(options.config, overrides)
    if options.dry_run:
        return _dry_run(config, options, overrides)
    if options.gpus is not None:
        parser.error("--gpus is for --dry-run; a run uses the GPUs of this machine")
    if options.json:
        parser.error("--json is for --dry-run; a run's numbers are in its metrics.jsonl")
    if options.settings:
        parser.error("--settings is for --dry-run; a run writes its settings to its config.toml")
    if options.restarts:
        return run_with_restarts(arguments, options.restarts, Path(config.output, config.name))
    from llamarl.cluster.fork_server import fork_server

    with fork_server(config.cluster.kind):  # imports torch while this process imports what a controller needs
        return _run(config, options, started_s)


def _run(config: RunConfig, options: argparse.Namespace, started_s: float) -> int:
    """Runs the training in this process. Returns the exit code."""
    from llamarl.cluster.api import ExecutorError, MeshFailed
    from llamarl.controller.admission import TooManyInvalid
    from llamarl.controller.supervision import Interrupted, Stalled
    from llamarl.controller.train_loop import NotSaved
    from llamarl.controller.weights import WeightsWrong
    from llamarl.observability.report import render_summary
    from llamarl.run.folder import FolderLost, next_commands
    from llamarl.run.prepare import begin
    from llamarl.run.train import run
    from llamarl.training.result import NonFiniteStep

    begun = begin(
        config, resume=options.resume, overwrite=options.overwrite, command="llamarl train", trust=options.trust,
        tell=lambda text: print_to(sys.stdout, text), delays=lambda: report_delays("train"),
    )  # fmt: skip
    folder = begun.folder
    try:
        with part("page", "watching")(folder.path) if options.watch else nullcontext("") as address:
            if address:
                print(f"llamarl train: {address}", file=sys.stderr)
            summary = run(
                begun.config, begun.prepared, folder, resume=options.resume, command_started_s=started_s, watch=address
            )  # fmt: skip
    except Interrupted as error:
        _say_last("".join(error.__notes__), f"the summary is in {folder.summary}")
        print(f"llamarl train: {error}; continue with --resume. Files: {folder.path}", file=sys.stderr)
        return INTERRUPTED
    except (ExecutorError, FolderLost, NonFiniteStep, NotSaved, Stalled, TooManyInvalid, WeightsWrong) as error:
        if isinstance(error, NotSaved):  # before a summary whose numbers look like success
            print(f"llamarl train: the model after the last step was not saved: {error}", file=sys.stderr, flush=True)
        _say_last("".join(getattr(error, "__notes__", ())), f"the summary is in {folder.summary}")
        way_on = f"; {folder.way_on()}" if isinstance(error, MeshFailed | NotSaved) else ""
        print(f"llamarl train: {type(error).__name__}: {error}{way_on}", file=sys.stderr)
        print(f"Files: {folder.path}; output of each executor: {folder.logs}", file=sys.stderr)
        lasts = options.restarts is not None and isinstance(error, (FolderLost, NonFiniteStep, TooManyInvalid))
        return WOULD_FAIL_AGAIN if lasts else FAILURE
    then = "\n".join(next_commands(begun.config, folder))
    _say_last(f"{render_summary(summary)}\n{then}", f"the summary is in {folder.summary}")
    return 0


def _say_last(text: str, instead: str) -> None:
    """Prints a run's last text. A failure to print does not change the exit code."""
    try:
        print(text, flush=True)
    except OSError as error:
        print(f"llamarl train: {error.strerror} while writing the output; {instead}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _dry_run(config: RunConfig, options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints what follows from the settings and how the run would start. With --settings, all settings come first, and
    the rest as comments. Returns the exit code. Raises ConfigError if the run cannot start."""
    from llamarl.run.memory import described_machine
    from llamarl.run.models import with_start_model

    machine = None if options.gpus is None else described_machine(options.gpus)
    with report_delays("train"), ExitStack() as opened:
        start = with_start_model(config, command="llamarl train", writes=False)
        try:
            taken, beginning = _beginning(start, options, machine)  # fetches what it needs, and the forecast finds it
        except NotFetched as error:
            _check_built_in(start, machine, error)
            taken, beginning = str(error), {"first prompt": ["not known: the model or the data are not here"]}
            opened.enter_context(nothing_fetched(str(error)))
        try:
            explained = part("forecast", "explained")
        except ConfigError as error:
            if options.json:
                raise
            found: dict[str, Any] = {"consequences": {"forecast": [f"unknown: {error}"]}}
        else:
            found = explained(start, options.config, overrides, machine)
        found["consequences"] |= beginning | {"start": _start_lines(start, options, taken)}
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    if options.settings:
        print(dump_toml(config))
    begin, indent = ("# ", "# ") if options.settings else ("", "  ")
    for name, said in found["consequences"].items():
        print(f"{begin}{name}:", *(f"{indent}{line}" for line in said), sep="\n")
    return 0


def _check_built_in(config: RunConfig, machine: MachineMemory | None, error: NotFetched) -> None:
    """Checks a run whose files cannot be fetched by the built-in shape of its model. Raises ConfigError: there is no
    such shape, or the model does not fit."""
    from llamarl.run.memory import check_memory

    try:
        shape = part("forecast", "built_in_model")(config)
    except ConfigError:
        shape = None
    if shape is None:
        raise ConfigError(f"{error}; a dry run of a model without a built-in shape needs the Hub, or a folder")
    check_memory(config, shape, machine)


def _start_lines(config: RunConfig, options: argparse.Namespace, taken: str) -> list[str]:
    """Returns the last lines of a dry run: what the run does, and whether it can start now."""
    rollout = config.rollout
    num = rollout.prompts_per_step * rollout.group_size
    work = f"{config.name}: {config.steps:,} steps of {num:,} rollouts ({rollout.prompts_per_step} prompts x "
    ready = f"not yet: {taken}" if taken else "ready: the same command without --dry-run starts the run"
    if options.gpus:
        ready = f"the checks passed for a machine of {options.gpus}" + (f"; {taken}" if taken else "")
    return [f"{work}{rollout.group_size})", ready]


def _beginning(
    config: RunConfig, options: argparse.Namespace, machine: MachineMemory | None
) -> tuple[str, dict[str, list[str]]]:
    """Returns why the folder or the disk prevent a start (empty means nothing), and lines by topic with first prompt
    and answers of each source. Raises ConfigError if the run cannot start."""
    from llamarl.run.disk import disk_need
    from llamarl.run.folder import FolderTaken, check_run_folder
    from llamarl.run.prepare import (
        check_before_folder,
        each_source,
        errors_name_source,
        has_base_model,
        looked_ahead,
        trusted,
    )
    from llamarl.run.preview import answers, first_prompt

    config = trusted(config, options.trust, resume=options.resume, keep=False)
    check_before_folder(config, is_here=machine is None)
    taken, path = "", Path(config.output, config.name)
    try:
        check_run_folder(config, resume=options.resume, overwrite=options.overwrite)
    except FolderTaken as error:
        taken = str(error)
    run = path if options.resume else None
    if not has_base_model(config):
        return taken, {"first prompt": [f"not known until the start has made {config.model.path}"]}
    _, pinned, prepared = looked_ahead(config, run, command="llamarl train", weights=False, machine=machine)
    if machine is None and pinned.cluster.kind != "hosts":
        taken = taken or disk_need(pinned, prepared.shape).lack
    found = dict[str, list[str]]()
    for label, one, own in each_source(pinned, prepared.problems.train):
        with errors_name_source(label):
            whose = f" of source {label!r}" if label else ""
            with stage("scoring the answers of the first rows"):
                found |= {f"first prompt{whose}": first_prompt(own[0]), f"answers{whose}": [*answers(one, own)]}
    return taken, found
