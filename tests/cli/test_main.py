"""What the system gives a command to work with, what that starts, and how it ends when a signal ends it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import llamarl
from llamarl.cli import doctor
from llamarl.cli.main import main
from llamarl.config import load_config
from tests.end_to_end.tiny import ROOT, environment, llamarl_here


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_named(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it comes, also before a run has begun to listen to signals itself."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(sys, "argv", ["llamarl", "doctor"])
    monkeypatch.setattr(doctor, "main", lambda _: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as ended:
        main()
    for one, handler in before.items():
        signal.signal(one, handler)
    assert (ended.value.code, capsys.readouterr().err) == (130, f"llamarl doctor: ended by {number.name}\n")


def test_closed_streams_are_there_for_all_that_is_started() -> None:
    """Else the first file that a process opens becomes its standard output."""
    code = (
        "import subprocess, sys; from llamarl.cli.main import _check_surroundings; _check_surroundings()\n"
        "child = 'import os, sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr) or len(os.listdir(0)))'\n"
        "child = 'import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', child]).returncode)"
    )
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], env=environment(), cwd=ROOT).returncode == 0


def test_a_host_meets_others_at_ipv4() -> None:
    done = llamarl_here("host", "127.0.0.2:6700", "--address", "fd00::1")
    assert done.returncode == 2 and "--address fd00::1: " in done.stderr


def test_as_many_files_as_the_system_allows() -> None:
    code = (
        "import resource; from llamarl.cli.main import _check_surroundings; _check_surroundings()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (3000, 3000)"
    )
    command = f"ulimit -Sn 600; ulimit -Hn 3000; {shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    assert subprocess.run(["bash", "-c", command], env=environment(), cwd=ROOT).returncode == 0


def test_the_version() -> None:
    for option in ("--version", "-V"):
        assert llamarl_here(option).stdout == f"llamarl {llamarl.__version__}\n"


def test_a_run_that_comes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder; a file of the user's own comes first, and a name that nobody knows is answered with those."""
    monkeypatch.chdir(tmp_path)
    assert load_config("demo") == load_config(ROOT / "configs/demo.toml")
    assert Path(load_config("demo").model.warm_start).is_file()
    assert llamarl_here("train", "demoo").stderr.endswith("did you mean `demo`?\n")
    done = llamarl_here("train", "something_else")
    assert done.returncode == 2 and "or one of calculator, " in done.stderr and " demo, " in done.stderr
    (tmp_path / "demo").write_text("name = 'mine'\n[model]\npath = 'm'\n[data]\ntrain = 'running_total'\n")
    assert load_config("demo").name == "mine"
