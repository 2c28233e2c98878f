"""None of the abuses gets out of a machine, gains a right in it, or exceeds its limits."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import pytest

from llamarl.parts.episodes.machines import Machine, MachineLost
from tests.architecture.repository import ROOT
from tests.nightly import NIGHTLY
from tests.parts.episodes.machines import abuse
from tests.parts.episodes.machines.here import needs_machines, said, started
from tests.parts.episodes.machines.test_bubblewrap import running
from tests.sandbox.test_pool import until

SMALL = {"memory_bytes": 1 << 28, "disk_bytes": 1 << 24, "files": 500, "processes": 32, "cpu_s": 3}
BATCH = 25
"""Abuses of one machine."""


def sample(abuses: dict[str, str], step: int) -> list[tuple[str, str]]:
    """Returns all abuses at night, by day each `step`-th."""
    return list(islice(abuses.items(), 0, None, 1 if NIGHTLY else step))


@contextmanager
def host_of_abuses() -> Iterator[dict[str, str]]:
    """What the host has and a machine must not get, as variables of the abuses."""
    name = f"llamarl-abuse-{os.getpid()}"
    os.environ["LLAMARL_SECRET"] = "7919"
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, subprocess.Popen(["sleep", "7919.5"]) as program:
        os.chmod(folder, 0o755)
        listeners[1].bind(f"\0{name}")
        listeners[2].bind(f"{folder}/s")
        os.chmod(f"{folder}/s", 0o666)
        for one in listeners[1:]:
            one.listen()
        yield {"SECRET": str(ROOT / "LICENSE"), "FOLDER": str(ROOT), "PORT": str(listeners[0].getsockname()[1]),
               "NAME": name, "SOCKET": f"{folder}/s", "PROGRAM": "7919.5"}  # fmt: skip
        program.kill()
    for one in listeners:
        one.close()
    del os.environ["LLAMARL_SECRET"]


def run_all(commands: list[tuple[str, str]], host: dict[str, str]) -> list[str]:
    """Runs each command in a machine that others use, too. Returns the names of those that work."""
    worked = list[str]()
    for first in range(0, len(commands), BATCH):
        machine = started(processes=64)
        try:
            said(machine, "export " + " ".join(f"{key}={shlex.quote(value)}" for key, value in host.items()))
            for name, command in commands[first : first + BATCH]:
                try:
                    output = machine.run(command, 20.0, 1 << 12).output
                    output += machine.run("true", 20.0, 1 << 12).output
                    if b"GOT" in output:
                        worked.append(f"{name}: {output!r}")
                except MachineLost:  # its own machine, and not more
                    machine = started(processes=64)
        finally:
            machine.close()
    return worked


def python(code: str) -> str:
    return f"python3 -c {shlex.quote(abuse.PRELUDE + code)}"


@needs_machines
def test_no_abuse_gets_anything() -> None:
    commands = sample(abuse.IN_SHELL, 12)
    commands += [(name, python(code)) for name, code in sample(abuse.IN_PYTHON, 12)]
    with host_of_abuses() as host:
        worked = run_all(commands, host)
    assert not worked, "\n".join(worked)


EXCEEDS = sample(abuse.EXCEEDS, 7)


def exceeds(code: str) -> bool:
    """Returns whether a program exceeds the limits of its machine."""
    machine = started(**SMALL)
    try:
        return b"GOT" in machine.run(python(code) + "; setsid sleep 7919.25 & disown", 10.0, 1 << 12).output
    except MachineLost:  # its own machine, and not more
        return False
    finally:
        machine.close()


@needs_machines
@pytest.mark.parametrize("code", [code for _, code in EXCEEDS], ids=[name for name, _ in EXCEEDS])
def test_no_abuse_exceeds_a_limit(code: str) -> None:
    assert not exceeds(code)
    until(lambda: not running("7919.25"), "the machine ends")


@needs_machines
def test_the_prelude_of_the_abuses_works() -> None:
    """Otherwise none of them could be seen to work."""
    machine: Machine = started()
    try:
        assert said(machine, python("does(os.getpid)")) == "GOT\n"
        assert said(machine, python("if call(39)[0] == os.getpid(): got()")) == "GOT\n" or abuse.COLUMN
        assert said(machine, "test -w /work && echo GOT") == "GOT\n"
    finally:
        machine.close()


def test_pages_count_the_abuses_of_machines() -> None:
    assert len(abuse.ABUSES) >= 200
    for page in ("machines.md", "security.md"):
        assert f"{len(abuse.ABUSES)} abuses" in (ROOT / "docs" / page).read_text(encoding="utf-8"), page
