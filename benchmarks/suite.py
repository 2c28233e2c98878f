"""How long `make test` takes, and `make test-all` if asked.

    python benchmarks/suite.py [--repeats 3] [--busy] [--all]

Measure on a machine that does nothing else. The environment of the tests is installed before the clock starts.
`cpu_minutes` counts every process that was waited for, in the median run. If `make` ends before its tests, the
measurement ends. `loop_s` says how fast the machine is: ten million steps of a loop in Python.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _record import children_s, write_result

ROOT = Path(__file__).parents[1]
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")
NOTES = [
    "make_test_s: median of the runs, lint and types included.",
    "failed: of each run of `make test`.",
    "busy: one more run, beside two processes that compute all the time.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy", action="store_true", help="also run `make test` beside two busy processes")
    parser.add_argument("--all", action="store_true", help="also run `make test-all`, once")
    options = parser.parse_args()
    subprocess.run(["make", "lint"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    loop_s = loop_seconds()
    runs = [run("test") for _ in range(options.repeats)]
    figures: dict[str, Any] = {
        "loop_s": loop_s,
        "make_test_s": statistics.median(one["seconds"] for one in runs),
        "cpu_minutes": statistics.median(one["cpu_s"] for one in runs) / 60,
        "tests": runs[-1]["passed"] + runs[-1]["failed"],
        "failed": [one["failed"] for one in runs],
        "runs": runs,
    }
    if options.busy:
        figures["busy"] = run_beside_busy_processes()
    if options.all:
        night = run("test-all")
        figures |= {"test_all_s": night["seconds"], "test_all_failed": night["failed"], "test_all": night}
    print(write_result("suite", {"repeats": options.repeats}, figures, NOTES), flush=True)


def loop_seconds() -> float:
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "total = 0\nfor step in range(10**7): total += step"], check=True)
    return round(time.monotonic() - start_s, 2)


def run_beside_busy_processes() -> dict[str, Any]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        return run("test")
    finally:
        for one in busy:
            one.kill()
            one.wait()


def run(target: str) -> dict[str, Any]:
    """Returns seconds, CPU seconds and numbers of tests of one run. Raises RuntimeError if no test ran."""
    start_s, cpu_s = time.monotonic(), children_s()
    done = subprocess.run(["make", target], check=False, cwd=ROOT, capture_output=True, text=True)
    found = {"seconds": round(time.monotonic() - start_s, 1), "cpu_s": round(children_s() - cpu_s, 1)}
    lines = done.stdout.splitlines()
    counts = {kind: int(count) for count, kind in COUNTS.findall(lines[-1])} if lines else {}
    if "passed" not in counts:
        raise RuntimeError(f"`make {target}` ran no tests: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return found | {"passed": counts["passed"], "failed": len(failed), "which_failed": failed}


if __name__ == "__main__":
    main()
