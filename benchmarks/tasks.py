"""How machines for episodes start, how many live at the same time, what abuses get out of them; how many episodes wait
in one process; and the figures of credit by turn and of distillation.

    python benchmarks/tasks.py [--starters 4] [--machines 64] [--rounds 3]

Needs an idle machine with bubblewrap. Each measure is a function in `MEASURES`, which returns its figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from _record import write_result

from llamarl.config import Ref
from llamarl.data.tokenizer import Tokenizer
from llamarl.executors.replies import Replied
from llamarl.parts.episodes.executors.environment import EnvironmentExecutor
from llamarl.parts.episodes.machines import Machine, MachineLimits
from llamarl.parts.episodes.machines.bubblewrap import Bubblewrap
from llamarl.parts.episodes.ports import OpenTurn
from llamarl.types import Prompt

SETTINGS = {"starters": 4, "machines": 64, "rounds": 3, "waiting": 1000}
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
    (
        "waiting_per_process: episodes of one process whose replies wait half a second at the same time; waiting_s: "
        "seconds until all have a reply, most of which are tokenization and JSON."
    ),
    "credit_steps_ratio, distill_gap, distill_steps_ratio: of the newest credit-DATE.json and distillation-DATE.json.",
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


def waiting(settings: dict[str, Any]) -> dict[str, Any]:
    """Lets episodes of one process wait at the same time."""
    from tests.end_to_end.tiny import make_model

    environment = Ref.model_validate({"name": "tests.parts.episodes.environments.worlds:Slow", "step_s": 60.0})
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        token_ids_T = np.array([1], np.int32)
        prompt = Prompt(
            prompt_id="p", text="", token_ids_T=token_ids_T, answer="", metadata={"folder": folder, "level": 1}
        )
        said = [(True, Tokenizer(model).encode("a"))]
        with closing(EnvironmentExecutor(str(model), environment)) as executor:

            def seconds_of(first: int, count: int) -> float:
                start_s, found = time.monotonic(), list[Replied]()
                executor.submit([OpenTurn(0, first + number, prompt, said, 0.0) for number in range(count)])
                while len(found) < count:
                    found += executor.collect().result(timeout=120)
                assert all(one.observation_T is not None for one in found), "a reply failed"
                return time.monotonic() - start_s

            seconds_of(0, 1)  # the process starts
            seconds = seconds_of(1, settings["waiting"])
    return {"waiting_per_process": settings["waiting"], "waiting_s": round(seconds, 2)}


def earlier(_: dict[str, Any]) -> dict[str, Any]:
    """Repeats figures of the benchmarks of credit by turn and of distillation."""
    results, found = Path(__file__).parent / "results", dict[str, Any]()
    for name, keys in (("credit", ["credit_steps_ratio"]), ("distillation", ["distill_gap", "distill_steps_ratio"])):
        newest = json.loads(max(results.glob(f"{name}-*.json")).read_text())
        found |= {key: newest[key] for key in keys}
    return found


MEASURES: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (machines, abuses, waiting, earlier)

if __name__ == "__main__":
    main()
