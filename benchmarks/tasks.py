"""How machines for episodes start, how many live at the same time, and what abuses get out of them.

    python benchmarks/tasks.py [--starters 4] [--machines 64] [--rounds 3]

Needs an idle machine with bubblewrap. Each measure is a function in `MEASURES`, which returns its figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from _record import write_result

from llamarl.parts.episodes.machines import Machine, MachineLimits
from llamarl.parts.episodes.machines.bubblewrap import Bubblewrap

SETTINGS = {"starters": 4, "machines": 64, "rounds": 3}
NOTES = [
    (
        "machine_start_s: seconds from the request until a machine has run its first command, with `starters` at a "
        "time: the median of all starts. machine_start_p95_s is their 95th percentile."
    ),
    (
        "machines_at_once: machines that are alive and answer at the same time. commands_s: seconds until each of them "
        "has run a command, all at the same time."
    ),
    (
        "abuses_tried: commands of tests/parts/episodes/machines/abuse.py that try to get out of a machine, to gain a "
        "right or to exceed a limit. abuses_failed: abuses that got nothing. The goal is that all of them fail."
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    settings = vars(parser.parse_args())
    figures = dict[str, Any]()
    for measure in MEASURES:
        figures |= measure(settings)
        print(figures, flush=True)
    print(write_result("tasks", settings, figures, NOTES))


def machines(settings: dict[str, Any]) -> dict[str, Any]:
    """Starts machines by several starters, and uses all of them at the same time."""
    backend, seconds, commands_s, at_once = Bubblewrap(), list[float](), list[float](), list[int]()
    backend.start(None, MachineLimits()).close()  # the process that starts them

    def started(_: int) -> Machine:
        start_s = time.monotonic()
        machine = backend.start(None, MachineLimits())
        machine.run("true", 60.0, 100)
        seconds.append(time.monotonic() - start_s)
        return machine

    for _ in range(settings["rounds"]):
        with ThreadPoolExecutor(settings["starters"]) as starters:
            alive = list(starters.map(started, range(settings["machines"])))
        with ThreadPoolExecutor(settings["machines"]) as users:
            start_s = time.monotonic()
            said = list(users.map(lambda machine: machine.run("echo alive", 60.0, 100).output, alive))
            commands_s.append(time.monotonic() - start_s)
        at_once.append(said.count(b"alive\n"))
        for machine in alive:
            machine.close()
    cuts = statistics.quantiles(seconds, n=20)
    return {
        "machine_start_s": round(statistics.median(seconds), 3), "machine_start_p95_s": round(cuts[-1], 3),
        "machines_at_once": min(at_once), "commands_s": round(statistics.median(commands_s), 3),
    }  # fmt: skip


def abuses(_: dict[str, Any]) -> dict[str, Any]:
    """Tries all abuses, those of limits in a machine each."""
    from tests.parts.episodes.machines import abuse
    from tests.parts.episodes.machines.test_abuse import exceeds, host_of_abuses, python, run_all

    commands = [*abuse.IN_SHELL.items(), *((name, python(code)) for name, code in abuse.IN_PYTHON.items())]
    with host_of_abuses() as host:
        succeeded = run_all(commands, host)
    succeeded += [name for name, code in abuse.EXCEEDS.items() if exceeds(code)]
    tried = len(abuse.ABUSES)
    return {"abuses_tried": tried, "abuses_failed": tried - len(succeeded), "abuses_that_succeeded": succeeded}


MEASURES: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (machines, abuses)

if __name__ == "__main__":
    main()
