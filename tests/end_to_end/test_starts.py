"""Starts at the same moment do not trip each other."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.end_to_end.tiny import SOMETIME_S, environment, make_model, write_toml
from tests.nightly import nightly

TAKE = """
import sys
from llamarl.cluster.engine_files import log_env, own_temporary_folder
print(flush=True)
sys.stdin.readline()
own_temporary_folder()
log_env(None)
print("here", flush=True)
sys.stdin.readline()
"""


def take_at_once(count: int, temporary: Path) -> None:
    """Processes take their temporary folders at the same moment, and some are killed."""
    command = [sys.executable, "-c", TAKE]
    env = environment() | {"TMPDIR": str(temporary)}
    started = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        for said in ("\n", "here\n"):
            for one in started:
                assert one.stdout is not None and one.stdout.readline() == said
            if said == "\n":
                for one in started:
                    assert one.stdin is not None
                    one.stdin.write("\n")
                    one.stdin.flush()
        assert len(list(temporary.iterdir())) >= count
    finally:
        for number, one in enumerate(started):
            if number % 2:  # what these leave is swept by the next starts, at the same moment
                one.kill()
            one.communicate("\n")


def test_a_few_processes_start_at_once() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        take_at_once(4, Path(folder))


@nightly("takes a minute")
def test_twenty_processes_start_at_once() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for _ in range(5):
            take_at_once(20, Path(folder))


@nightly("four runs with processes of their own")
def test_runs_start_at_once(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))
    command = [sys.executable, "-m", "llamarl", "train", str(toml), "--steps=1"]
    own = environment() | {"PYTHONPATH": os.getcwd()}
    started = [
        subprocess.Popen([*command, f"--name=run-{n}"], cwd=tmp_path, env=own, stderr=subprocess.PIPE, text=True)
        for n in range(4)
    ]
    ended = [one.communicate(timeout=2 * SOMETIME_S)[1] for one in started]
    assert [one.returncode for one in started] == [0] * 4, ended
