"""`--restarts` over a command that ends as it is told to."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.cli import restarts
from llamarl.cli.restarts import run_with_restarts

SCRIPT = """#!/bin/sh
cd {folder}
echo $$ > .lock
echo "$@" >> commands
code=$(head -n 1 codes)
sed -i 1d codes
[ $code = -9 ] && kill -9 $$
exit $code
"""


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Signals."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("codes", "num_starts", "code"),
    [
        ([0], 1, 0),
        ([2], 1, 2),  # a mistake of the user's
        ([-9, 1, 0], 3, 0),
        ([-9, 2, 2, 0], 4, 0),  # a disk that was full at both
        ([1, 3], 2, 1),  # would fail again
        ([1, 130], 2, 130),
        ([-9] * 5, 5, 137),
        ([-9, 2, 2, 2, 2], 5, 2),
    ],
)
def test_what_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: list[int], num_starts: int, code: int
) -> None:
    script = tmp_path / "python"
    script.write_text(SCRIPT.format(folder=tmp_path))
    script.chmod(0o755)
    (tmp_path / "codes").write_text("".join(f"{one}\n" for one in codes))
    pauses = list[float]()
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(restarts.time, "sleep", pauses.append)
    assert run_with_restarts(["run.toml", "--overwrite"], 4, tmp_path) == code
    commands = (tmp_path / "commands").read_text().splitlines()
    assert len(commands) == num_starts
    assert "--overwrite" in commands[0] and all("--resume" in one and "--over" not in one for one in commands[1:])
    refused = [one == 2 for one in codes[: num_starts - 1]]
    assert all((pause > restarts.PAUSE_S) == was for pause, was in zip(pauses, refused, strict=True))
