"""`llamarl sft RUN.toml|SFT.toml [--key value ...]`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamarl.cli.main import FAILURE, INTERRUPTED
from llamarl.cli.options import TRUST, command_parser, report_delays, with_settings
from llamarl.config import ConfigError, RunConfig, SftConfig, load_sft
from llamarl.observability.metrics import ABSENT, duration, remaining_s

EPILOG = """RUN.toml, as for `llamarl train`: trains model.path on the field data.solution of data.train, with the
settings of trainer, checkpoint and cluster; a step takes rollout.prompts_per_step documents. `llamarl export` writes
the model.
SFT.toml, without a section `model`: makes a small base model from scratch, tokenizer included.
Every setting of the file can be overridden: --steps 500 --trainer.learning_rate 1e-5."""


class Show(Protocol):
    def __call__(self, step: int, metrics: Mapping[str, float]) -> None: ...


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = command_parser("sft", "Supervised training on worked solutions.", EPILOG)
    parser.add_argument("config", metavar="TOML")
    parser.add_argument("--resume", action="store_true", help="continue from the run's newest valid checkpoint")
    parser.add_argument("--trust", action="store_true", help=f"with --resume: {TRUST}")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing run folder")
    parser.add_argument(
        "--dry-run", action="store_true", help="check settings, model and data, print what the run would do, and stop"
    )
    options, overrides = with_settings(parser, arguments, SftConfig)
    config = load_sft(options.config, overrides)
    if isinstance(config, RunConfig):
        from llamarl.run.prepare import trusted

        config = trusted(config, options.trust, resume=options.resume, keep=True)
        return _fine_tune(config, options)
    if options.resume or options.overwrite or options.trust:
        raise ConfigError(
            "--resume, --trust and --overwrite are for run files, which have a section `model`; leave them out"
        )
    if options.dry_run:
        print(f"start:\n  {config.steps:,} steps make a base model in {config.output}")
        return 0
    return _warm_start(config)


def _warm_start(config: SftConfig) -> int:
    from llamarl.parts.sft.warm_start import warm_start

    with _bar("warm start", config.steps) as show:
        folder = warm_start(config, show)
    print(f"base model: {folder}")
    return 0


def _dry_run(config: RunConfig, options: argparse.Namespace) -> int:
    """Prints what the run would do and whether it can start. Returns the exit code. Raises ConfigError if it cannot
    start."""
    from llamarl.cluster.open import check_cluster
    from llamarl.parts.sft.run import load_documents, place_trainer
    from llamarl.run.folder import FolderTaken, check_run_folder
    from llamarl.run.hub_pins import resolved
    from llamarl.run.models import with_start_model
    from llamarl.run.prepare import has_base_model, resolve

    taken = ""
    with report_delays("sft"):
        check_cluster(config.cluster)
        config = with_start_model(config, command="llamarl sft", writes=False)
        try:
            check_run_folder(config, resume=options.resume, overwrite=options.overwrite)
        except FolderTaken as error:
            taken = str(error)
        data = f"not known until the start has made {config.model.path}"
        if has_base_model(config):
            run = Path(config.output, config.name) if options.resume else None
            pinned = resolved(config, weights=False, run=run, command="llamarl sft")
            _, pinned = resolve(config, pinned, resume=options.resume)
            data = f"{len(load_documents(pinned, print)):,} documents"
            if placer := place_trainer(pinned):
                print("executors:", *(f"  {line}" for line in placer.table()), sep="\n")
    ready = f"not yet: {taken}" if taken else "ready: the same command without --dry-run starts the run"
    work = f"{config.name}: {config.steps:,} steps of {config.rollout.prompts_per_step:,} documents"
    print(f"data:\n  {data}\nstart:\n  {work}\n  {ready}")
    return 0


def _fine_tune(config: RunConfig, options: argparse.Namespace) -> int:
    if options.dry_run:
        return _dry_run(config, options)
    from llamarl.cluster.fork_server import fork_server

    with fork_server(config.cluster.kind):  # imports torch while this process reads the documents
        return _train(config, options)


def _train(config: RunConfig, options: argparse.Namespace) -> int:
    resume, overwrite = options.resume, options.overwrite

    from llamarl.cluster.api import ExecutorError
    from llamarl.cluster.open import check_cluster
    from llamarl.controller.supervision import Interrupted
    from llamarl.controller.train_loop import NotSaved
    from llamarl.parts.sft.base_model import ensure_base_model
    from llamarl.parts.sft.run import SftRun, load_documents, place_trainer
    from llamarl.run.folder import FolderLost, check_run_folder, next_commands, prepare_run_folder
    from llamarl.run.hub_pins import resolved
    from llamarl.run.models import with_start_model
    from llamarl.run.prepare import resolve
    from llamarl.training.result import NonFiniteStep

    def warn(said: str) -> None:
        print(f"llamarl sft: {said}", file=sys.stderr)

    with report_delays("sft"):
        check_cluster(config.cluster)
        config = with_start_model(config, command="llamarl sft")
        path = check_run_folder(config, resume=resume, overwrite=overwrite)
    ensure_base_model(config)
    here = config.cluster.kind != "hosts"  # hosts fetch weights for themselves
    pinned = resolved(config, weights=here, run=path if resume else None, command="llamarl sft")
    with report_delays("sft"):
        config, pinned = resolve(config, pinned, resume=resume)
        documents, placer = load_documents(pinned, warn), place_trainer(pinned)
    folder = prepare_run_folder(config, resume=resume, overwrite=overwrite, pinned=pinned)
    try:
        with _bar(config.name, config.steps) as show:
            SftRun(
                config=pinned, documents=documents, placer=placer, folder=folder, resume=resume, progress=show,
                warn=warn,
            ).run()  # fmt: skip
    except Interrupted as error:
        warn(f"{error}; continue with --resume. Files: {folder.path}")
        return INTERRUPTED
    except (ExecutorError, FolderLost, NonFiniteStep, NotSaved) as error:
        warn(f"{type(error).__name__}: {error}; {folder.way_on()}")
        warn(f"files: {folder.path}; output of each rank: {folder.logs}")
        return FAILURE
    print(f"checkpoints: {folder.checkpoints}", *next_commands(config, folder, of_sft=True), sep="\n")
    return 0


@contextmanager
def _bar(name: str, steps: int) -> Iterator[Show]:
    """Shows progress: a bar on a terminal, otherwise (notebook, log) a line for each tenth of the steps."""
    if not sys.stdout.isatty():
        yield _StepLines(name, steps)
        return
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=steps, loss=ABSENT)

        def show(step: int, metrics: Mapping[str, float]) -> None:
            bar.update(task, completed=step, loss=f"{metrics['loss']:.3f}")

        yield show


class _StepLines:
    """Prints a line for each tenth of the steps, with the estimated time left."""

    def __init__(self, name: str, steps: int) -> None:
        self._name, self._steps = name, steps
        self._first: tuple[int, float] | None = None
        """The first reported step and its time. Steps before it (startup, resumed steps) have another speed."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        now_s, steps = time.monotonic(), self._steps
        first, first_s = self._first = self._first or (step, now_s)
        if step == steps or step % max(1, steps // 10) == 0:
            left_s = remaining_s(steps - step, (now_s - first_s) / (step - first)) if step > first else None
            left = f", about {duration(left_s)} left" if left_s else ""
            print(f"{self._name}: {step} of {steps} steps, loss {metrics['loss']:.3f}{left}", flush=True)
