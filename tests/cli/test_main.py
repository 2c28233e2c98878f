"""What the system gives a command to work with, and what that starts."""

from __future__ import annotations

import shlex
import subprocess
import sys

from tests.end_to_end.tiny import ROOT, environment, llamarl_here


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
    assert done.returncode == 2 and "--address fd00::1: hosts meet at IPv4 addresses or names alone" in done.stderr


def test_as_many_files_as_the_system_allows() -> None:
    code = (
        "import resource; from llamarl.cli.main import _check_surroundings; _check_surroundings()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (3000, 3000)"
    )
    command = f"ulimit -Sn 600; ulimit -Hn 3000; {shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    assert subprocess.run(["bash", "-c", command], env=environment(), cwd=ROOT).returncode == 0
