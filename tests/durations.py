"""Files of tests in order, longest first: what comes last is short, so that no process waits long for the other.

Every run notes in pytest's cache what each file took; `durations.json` beside this module says it where nothing is
noted yet. `python -m tests.durations` shows the notes, and writes that table with `--keep`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

NOTES = "llamarl/durations"
TABLE = Path(__file__).with_suffix(".json")
KEPT_ABOVE_S = 3.0
"""Shorter files need no line in the table: as unknown ones they come first."""


class Durations:
    """Sorts the files that are collected, and notes what they took."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds = Counter[str]()
        self._tests = Counter[str]()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Every process of the tests must come to the same order: notes change at the end of a run only."""
        items[:] = longest_first(items, json.loads(TABLE.read_text()) | noted_seconds(self._notes()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self._seconds[file] += report.duration
        self._tests[file] += report.when == "setup"

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if hasattr(self._config, "workerinput") or exitstatus not in (0, 1) or not runs_whole_files(self._config):
            return
        took = {file: {"seconds": round(self._seconds[file], 2), "tests": self._tests[file]} for file in self._seconds}
        if (cache := self._cache()) is not None:
            cache.set(NOTES, self._notes() | took)

    def _notes(self) -> dict[str, dict[str, float]]:
        return {} if (cache := self._cache()) is None else cache.get(NOTES, {})

    def _cache(self) -> pytest.Cache | None:
        return getattr(self._config, "cache", None)  # `-p no:cacheprovider`


def longest_first(items: list[Any], seconds: Mapping[str, float]) -> list[Any]:
    """Files that nobody knows come before all; tests of one file stay in their order."""
    return sorted(items, key=lambda item: -seconds.get(file_of(item.nodeid), math.inf))


def noted_seconds(notes: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {file: took["seconds"] for file, took in notes.items()}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def runs_whole_files(config: pytest.Config) -> bool:
    options = config.option
    chosen = options.keyword or options.markexpr or options.maxfail or getattr(options, "lf", False)
    return not chosen and not any("::" in argument for argument in config.args)


def main() -> None:
    parser = argparse.ArgumentParser(description="What each file of tests took, when it last ran whole.")
    parser.add_argument("--keep", action="store_true", help=f"write {TABLE.name} from it")
    keep = parser.parse_args().keep
    path = TABLE.parents[1] / ".pytest_cache" / "v" / NOTES
    notes = {file: took for file, took in json.loads(path.read_text()).items() if (TABLE.parents[1] / file).exists()}
    for file, took in sorted(notes.items(), key=lambda note: -note[1]["seconds"]):
        print(f"{took['seconds']:8.1f} s {took['tests']:5} tests  {file}")  # noqa: T201
    print(f"{sum(noted_seconds(notes).values()):8.1f} s in all")  # noqa: T201
    if keep:
        kept = {file: round(took) for file, took in noted_seconds(notes).items() if took >= KEPT_ABOVE_S}
        TABLE.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
