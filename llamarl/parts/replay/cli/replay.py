"""`llamarl replay RUN [--steps A:B] [--only PART] [--jobs N] [--against OTHER] [--trainer.key value ...]`."""

from __future__ import annotations

import argparse
import io
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamarl.cli.main import FAILURE
from llamarl.cli.options import TRUST, command_parser, report_delays, with_settings
from llamarl.cluster.api import ExecutorError
from llamarl.cluster.fork_server import fork_server
from llamarl.config import ConfigError, RunConfig, load_recorded
from llamarl.config.section import not_a_run
from llamarl.observability.metrics import counted
from llamarl.parts.replay.against import first_divergence
from llamarl.parts.replay.recorded import Diverged, Recorded, other_code
from llamarl.parts.replay.replay import PARTS, ReplayRequest, Tally, arithmetic, replay, replayable
from llamarl.parts.replay.what_if import what_if
from llamarl.run.folder import RunFolder
from llamarl.run.hub_pins import resolved
from llamarl.run.prepare import prepare
from llamarl.run.trust import check_trust, with_trusted

EPILOG = """It compares the weights after each step, tokens, log-probabilities and rewards with the record of RUN.
With --trainer.key or --shaping.key it trains on the recorded rollouts with other settings, in a new run folder.
Exit codes: 0 all equal, 1 a difference, which is named, or a process died, 2 the run cannot be replayed."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = command_parser("replay", "Repeat a run from its record and name the first difference.", EPILOG)
    parser.add_argument("run", metavar="RUN", help="folder of a run, such as runs/demo")
    parser.add_argument("--steps", metavar="A:B", default="", help="first and last step (all)")
    parser.add_argument("--only", choices=PARTS, help="replay one part only (all three)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the steps (1)")
    parser.add_argument(
        "--against", metavar="OTHER", help="name the first difference between RUN and OTHER; nothing is computed"
    )
    parser.add_argument("--name", help="name of the new run (RUN-replay)")
    parser.add_argument("--overwrite", action="store_true", help="replace its folder")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    options, overrides = with_settings(parser, arguments)
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: give at least 1")
    if overrides and (options.against or options.only or options.jobs > 1):
        raise ConfigError(f"{overrides[0]}: cannot be combined with --against, --only or --jobs; leave one of them out")
    if options.against and (options.only or options.steps):
        raise ConfigError("--against compares everything that both runs recorded; leave --only and --steps out")
    if not overrides and (options.name or options.overwrite):
        raise ConfigError("--name and --overwrite need another setting, such as --trainer.learning_rate VALUE")
    try:
        if options.against:
            steps, found = first_divergence(_folder(options.run), _folder(options.against))
            num, gap = len(steps), f", from step {steps[0]} on," if steps and steps[0] > 1 else ""
            said = f"{counted(num, 'step')}{gap} {'is' if num == 1 else 'are'} equal"
            print(said + (f"; the first difference: {found}" if found else ""))
            return FAILURE if found else 0
        _settings(options)  # before any of it is executed
        first, last = _range(options.steps, _folder(options.run).done_steps())
        return _what_if(options, overrides, first, last) if overrides else _replay(options, first, last)
    except (Diverged, ExecutorError) as error:
        print(f"llamarl replay: {error}", file=sys.stderr)
    return FAILURE


def _folder(path: str) -> RunFolder:
    if not (folder := RunFolder(Path(path))).config.exists():
        raise not_a_run(path)
    if not folder.journal.exists() and not folder.trace.exists():
        raise ConfigError(f"{path} has no journal, as runs of `llamarl sft`; give one of `llamarl train`")
    return folder


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that shows the number of completed steps."""
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stdout), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def _replay(options: argparse.Namespace, first: int, last: int) -> int:
    tally, jobs = Tally(), min(options.jobs, last - first + 1)
    cuts = [first + (last - first + 1) * job // jobs for job in range(jobs + 1)]
    with _bar(jobs if jobs > 1 else last - first + 1) as told:
        if jobs == 1:
            compare(options, (first, last + 1), told, tally)
        else:
            with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
                for done, one in enumerate(pool.map(compare, [options] * jobs, pairwise(cuts)), start=1):
                    tally.add(one)
                    told(done)
    for text in (*dict.fromkeys(tally.notes), *tally.rewards):
        print(text, file=sys.stderr)
    compared = [counted(tally.steps, "step"), counted(tally.rollouts, "rollout")]
    compared += [counted(many, noun) for many, noun in ((tally.tokens, "token"), (tally.judged, "reward")) if many]
    differ = "differs" if len(tally.rewards) == 1 else "differ"
    equal = f"{counted(len(tally.rewards), 'reward')} {differ}, all else is equal" if tally.rewards else "all equal"
    print(f"replayed {', '.join(compared)}: {equal}")
    return FAILURE if tally.rewards else 0


def compare(
    options: argparse.Namespace, steps: tuple[int, int], told: Callable[[int], None] = print, tally: Tally | None = None
) -> Tally:
    """Replays the steps from the first to before the second, in this or in a separate process. Raises Diverged,
    ConfigError, ExecutorError."""
    folder, tally = _folder(options.run), tally or Tally()
    run = _pinned(_settings(options), folder)
    config, parts = replayable(run, [options.only] if options.only else PARTS, tally)
    close, cause = arithmetic(run, folder, tally)
    cause = cause or other_code(folder)
    with fork_server(config.cluster.kind), redirect_stdout(io.StringIO()):  # suppresses output of executors
        request = _request(run, config, folder, steps[0], steps[1] - 1, tally)
        was = Recorded(folder, close, cause)
        request = request._replace(parts=parts, close=close, cause=cause, read=was.check_journal, trained=was.check)
        replay(request._replace(on_step=lambda step: told(step - steps[0] + 1)))
    return tally


def _settings(
    options: argparse.Namespace, overrides: Sequence[str] = (), own: Mapping[str, Any] = MappingProxyType({})
) -> RunConfig:
    """Returns the settings of a replayed run, whose code is executed. Raises ConfigError if they are damaged or not
    trusted."""
    folder = _folder(options.run)
    config = load_recorded(folder.config, overrides, own)
    check_trust(folder.path, config, command="llamarl replay", is_trusted=options.trust)
    return with_trusted(config) if options.trust else config


def _pinned(config: RunConfig, folder: RunFolder, command: str = "llamarl replay") -> RunConfig:
    """Returns settings with the commits of the run's start."""
    return resolved(config, run=folder.path, command=command)


def _request(
    run: RunConfig, config: RunConfig, folder: RunFolder, first: int, last: int, tally: Tally
) -> ReplayRequest:
    with report_delays("replay", "reading the run"):
        problems = prepare(config).problems
    return ReplayRequest(
        config=config, journal=run, problems=problems, folder=folder, first=first, last=last, tally=tally
    )


def _what_if(options: argparse.Namespace, overrides: Sequence[str], first: int, last: int) -> int:
    folder, said, tally = _folder(options.run), list[str](), Tally()
    name = {"name": options.name or f"{folder.path.name}-replay", "output": str(folder.path.parent), "steps": last}
    asked = _settings(options, overrides, name)
    pinned = _pinned(asked, folder)
    config = replayable(pinned, ("train",), tally)[0]
    request = _request(_pinned(_settings(options), folder, ""), config, folder, first, last, tally)
    with fork_server(config.cluster.kind), _bar(last - first + 1) as told, redirect_stdout(io.StringIO()):
        request = request._replace(parts=("train",), is_same=False, on_step=lambda step: told(step - first + 1))
        path = what_if(request, pinned, asked, overwrite=options.overwrite, tell=said.append)
    print(*said, f"llamarl report {options.run} {path} shows both", sep="\n")
    return 0


def _range(text: str, done: int) -> tuple[int, int]:
    """Parses the first and last step of `A:B`. Either may be missing. Raises ConfigError."""
    found = re.fullmatch(r"([0-9]*):([0-9]*)", text or ":")
    first, last = (int(found[1] or 1), int(found[2] or done)) if found else (0, 0)
    if not 1 <= first <= last <= done:
        raise ConfigError(
            f"--steps {text}: the run has done steps 1 to {done}; give two of these, as in --steps 1:{done}"
        )
    return first, last
