"""Machines by bubblewrap: a shell whose state lasts, files, limits, and what is left when someone is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.config import ConfigError
from llamarl.parts.episodes.machines import Machine, MachineLimits, MachineLost, bubblewrap
from llamarl.parts.episodes.machines._base import WORK, is_inside, pack, unpack
from llamarl.parts.episodes.machines.bubblewrap import Bubblewrap
from tests.nightly import nightly
from tests.parts.episodes.machines.here import BACKEND, below, needs_machines, said, started
from tests.sandbox.test_pool import until

pytestmark = needs_machines


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = started()
    yield made
    made.close()


def test_the_state_of_the_shell_lasts(machine: Machine) -> None:
    said(machine, "mkdir sub; cd sub; x=5; export Y=7; f() { echo $x-$1; }; alias hi='echo hello'; list=(1 'a b')")
    assert said(machine, 'pwd; f 2; hi; echo $Y; echo "${list[1]}"') == f"{WORK}/sub\n5-2\nhello\n7\na b\n"
    assert WORK == "/work"
    assert machine.run("x=6; cd /tmp; exit 7", 60.0, 100).code == 7
    assert said(machine, "f 1; pwd") == "6-1\n/tmp\n"
    assert machine.run("x=7; kill -9 $$", 60.0, 100).code == 137
    assert said(machine, 'echo $x; echo "it\'s" \'a "b" $c\' \\\\') == '6\nit\'s a "b" $c \\\n'
    assert machine.run("if", 60.0, 100).code != 0
    assert said(machine, "cat <<END\n$x\nEND\n#" + "x" * 200_000) == "6\n"


def test_a_late_command_is_killed_with_all_processes_and_keeps_the_state(machine: Machine) -> None:
    said(machine, "x=5; setsid sleep 1000 & disown")
    done = machine.run("x=6; (sleep 1000 &); echo then; sleep 1000", 0.5, 100)
    assert done.is_late and done.output == b"then\n"
    assert said(machine, "echo $x; ps ax | grep -c '[s]leep 1000' || true") == "5\n0\n"


def test_background_processes_hold_up_nothing(machine: Machine) -> None:
    start_s = time.monotonic()
    said(machine, "sleep 1000 & echo begun")
    assert time.monotonic() - start_s < 30.0
    assert said(machine, "ps ax | grep -c '[s]leep 1000'") == "1\n"


def test_output_is_cut_in_the_middle(machine: Machine) -> None:
    done = machine.run("echo first; seq 100000; echo last >&2", 60.0, 100)
    assert len(done.output) == 100 and done.total == 588_906
    assert done.output.startswith(b"first\n1\n2") and done.output.endswith(b"100000\nlast\n")
    assert said(machine, "true") == ""


def test_files_come_and_go_as_regular_files_alone(machine: Machine) -> None:
    machine.put(pack({"a": b"1", "sub/b": b"2", "big": b"x" * 100}))
    said(machine, "ln -s a link; ln a hard; mkfifo fifo; mkdir -p out; ln -s /etc etc; (sleep 0.2; echo late >> a) &")
    names = ["a", "sub/b", "big", "link", "hard", "fifo", "out", "missing", "etc/passwd"]
    tar = machine.get(names, 50)
    assert unpack(tar, names, 50) == {"a": b"1", "sub/b": b"2", "hard": b"1"}
    assert unpack(tar, ["a"], 50) == {"a": b"1"} and unpack(tar, names, 1) == {"a": b"1"}
    with pytest.raises(MachineLost, match="no archive"):
        unpack(tar[:700], names, 50)
    with pytest.raises(OSError, match="do not fit"):
        machine.put(pack({"huge": b"x" * (1 << 26)}))


def test_paths_that_leave_the_folder() -> None:
    assert all(map(is_inside, ["a", "a/b.c", "..a"]))
    assert not any(map(is_inside, ["", ".", "/a", "../a", "a/../b", "a//b", "a/", "./a", "a\0"]))


@pytest.mark.parametrize("owner", ["ours", "the machine's"])
def test_a_folder_of_the_host_stays_as_it_is(tmp_path: Path, owner: str) -> None:
    """The machine sees it through an overlay if it could change it, and gets a copy otherwise."""
    folder = tmp_path / "task"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("one")
    (folder / "sub" / "run.sh").write_text("echo hi")
    (folder / "sub" / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("a")
    if owner == "the machine's":
        if os.getuid():
            pytest.skip("only root gives files away")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, bubblewrap._unprivileged_uid(), -1, follow_symlinks=False)
    machine = started(str(folder))
    try:
        assert said(machine, "cat a link; sub/run.sh; echo two > a; rm -r sub; cat link; stat -f -c %T .").split() == [
            "oneonehi", "two", "overlayfs" if owner == "the machine's" else "tmpfs",
        ]  # fmt: skip
    finally:
        machine.close()
    assert (folder / "a").read_text() == "one" and (folder / "sub" / "run.sh").exists()


def test_shown_folders_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("one")
    machine = Bubblewrap(shows=[str(tmp_path / "data")]).start(None, MachineLimits())
    try:
        assert said(machine, f"cd {tmp_path}/data; cat a; test -w . || test -w a || echo '-'; ls ..") == "one-\ndata\n"
    finally:
        machine.close()
    with pytest.raises(ConfigError, match="not a folder"):
        Bubblewrap(shows=["/no/such/folder"]).start(None, MachineLimits())


def test_the_interpreter_has_the_packages_that_run_llamarl(machine: Machine) -> None:
    code = "import sys, numpy; print(sys.version_info[:3], numpy.__version__)"
    import numpy

    assert said(machine, f'python3 -c "{code}"').strip() == f"{sys.version_info[:3]} {numpy.__version__}"


@pytest.mark.parametrize(
    ("limits", "command", "reason"),
    [
        (
            {"memory_bytes": 1 << 28},
            "for n in 1 2 3 4; do python3 -c 'x = b\"x\" * 90_000_000; input()' <> <(:) & done; wait",
            "memory",
        ),
        ({"cpu_s": 1}, "for n in 1 2 3; do (while :; do :; done) & done; wait", "CPU time"),
    ],
)
def test_a_machine_that_exceeds_its_limits_is_lost(limits: dict[str, int], command: str, reason: str) -> None:
    machine = started(**limits)
    with pytest.raises(MachineLost, match=reason):
        machine.run(command, 60.0, 100)
    with pytest.raises(MachineLost):
        machine.run("true", 60.0, 100)


def test_shared_memory_of_many_processes_counts_once() -> None:
    machine = started(memory_bytes=1 << 28)
    code = "import os, time; x = b'x' * 60_000_000\nfor _ in range(9):\n    os.fork() or time.sleep(1)\nprint('shared')"
    try:
        assert "shared" in said(machine, f'python3 -c "{code}"')
    finally:
        machine.close()


def test_disk_files_and_processes_have_bounds() -> None:
    machine = started(disk_bytes=1 << 22, files=300, processes=20)
    try:
        for place in ("/work", "/tmp", "/dev/shm", "/run/shell"):
            assert "No space" in said(machine, f"head -c 5M /dev/zero > {place}/big || true; rm {place}/big")
            filled = f"mkdir {place}/d; touch {place}/d/{{1..400}} 2>&1 | tail -1; rm -r {place}/d"
            assert "No space" in said(machine, filled)
        assert 10 < forks(machine) < 20
    finally:
        machine.close()


def test_no_rights_remain(machine: Machine) -> None:
    """The user of the machine is no user of the host, and its programs cannot become another."""
    status = dict(line.split(":\t", 1) for line in said(machine, "cat /proc/self/status").splitlines() if ":\t" in line)
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    hold = threading.Thread(target=machine.run, args=("sleep 987654", 2.0, 10))
    hold.start()
    pids = list[str]()

    def is_found() -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_bytes() == b"sleep\0987654\0":
                    pids.append(path.parent.name)
            except OSError:
                continue
        return bool(pids)

    until(is_found, "the command runs")
    rights = (Path("/proc") / pids[0] / "status").read_text()
    uids = next(line for line in rights.splitlines() if line.startswith("Uid:")).split()[1:]
    assert set(uids) == {str(bubblewrap._unprivileged_uid())} and "0" not in uids
    hold.join()


def forks(machine: Machine) -> int:
    """Returns how many processes a program can have."""
    code = "import os, time; n = 0\ntry:\n    while n < 100 and (os.fork() or time.sleep(100)): n += 1\n"
    return int(said(machine, f"python3 -c '{code}except OSError: print(n)'"))


def test_many_machines_bound_their_processes_each() -> None:
    machines = [started(processes=20) for _ in range(3)]
    try:
        assert all(10 < forks(machine) < 20 for machine in machines)
    finally:
        for machine in machines:
            machine.close()


def test_close_wakes_up_a_command_and_leaves_nothing() -> None:
    machine = started()
    said(machine, "(setsid sleep 987653 &)")
    closer = threading.Timer(0.3, machine.close)
    closer.start()
    with pytest.raises(MachineLost):
        machine.run("sleep 987653", 60.0, 100)
    closer.join()
    machine.close()
    until(lambda: not running("987653"), "the machine ends")


def running(mark: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


OWNER = """
import sys, threading
sys.setswitchinterval(1e-5)
from llamarl.parts.episodes.machines import MachineLimits
from llamarl.parts.episodes.machines.bubblewrap import Bubblewrap
machines = []
def start(): machines.append(Bubblewrap().start(None, MachineLimits()))
threads = [threading.Thread(target=start) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for machine in machines: machine.run("(setsid sleep 987652 &)", 60.0, 100)
print("ready", flush=True)
machines[0].run("sleep 987652", 1000.0, 100)
"""


@nightly("processes that are killed; by day a machine ends with its pool and what it started with it")
@pytest.mark.parametrize("victim", ["the owner", "the starter"])
def test_no_machine_outlives_its_owner(victim: str) -> None:
    """Machines live on after the threads that asked for them, and end with the process. All have one starter, though
    their threads ask for it at the same time."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
            assert running("987652")
            (starter,) = below(owner.pid, b"_starter")
            os.kill(owner.pid if victim == "the owner" else starter, signal.SIGKILL)
            until(lambda: not running("987652"), "all machines end")
        finally:
            owner.kill()


ASKED_AT_ONCE = """
import threading, time
from llamarl.parts.episodes.machines import _watch, bubblewrap

class Slow:
    def __init__(self):
        time.sleep(0.3)
        made.append(self)

made = []
bubblewrap._Starter = _watch.MachineWatch = Slow
for ask in (bubblewrap._starter_of_this_process, _watch.watch):
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print(len(made))
"""


def test_threads_that_ask_at_the_same_time_get_the_same_starter_and_the_same_watch() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED_AT_ONCE], capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_without_bubblewrap_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    bubblewrap._problem.cache_clear()
    try:
        with pytest.raises(ConfigError, match="bwrap is missing"):
            BACKEND.start(None, MachineLimits())
    finally:
        bubblewrap._problem.cache_clear()


def test_root_without_a_free_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(bubblewrap.pwd, "getpwuid", lambda uid: uid)
    with pytest.raises(ConfigError, match="user id without an account"):
        bubblewrap._unprivileged_uid()
