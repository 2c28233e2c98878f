"""What a run listens at is in the table of docs/security.md, and nobody else gets anywhere with it."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

from llamarl.cluster.engine_files import PREFIX
from tests.end_to_end.tiny import ROOT, Command, descendants, make_model, rows, write_toml
from tests.nightly import nightly

NOBODY = 65534
LISTENS = 0x10000
"""Flag in /proc/net/unix."""
OPTIONS = (
    "--steps", 1_000_000, "--trainer.parallelism.fsdp", 2, "--weight_sync.transport", "p2p",
    "--reward.parts", "[{name = 'exact'}, {name = 'math'}]", "--rollout.agent", "tests.parts.episodes.agents:unhurried",
)  # fmt: skip


KEYS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
SECRET = "hush-4f1d0c"


class Listener(NamedTuple):
    who: str
    kind: str
    place: str
    """Path, or address."""
    port: int = 0


class Bomb:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._canary,)


class Live:
    """A run that trains."""

    def __init__(self, folder: Path) -> None:
        toml = write_toml(folder, make_model(folder / "model"))
        self.command = Command.start(folder, "train", toml, "--output", folder, *OPTIONS)
        self.folder, self.metrics = folder / "tiny", folder / "tiny/metrics.jsonl"
        self.goes_on(2)
        self.names = {pid: name for name, pid in self.command.children().items()}
        self.names[self.command.process.pid] = "controller"

    def goes_on(self, steps: int = 3) -> None:
        """So many steps more are taken."""
        before = self.steps()
        self.command.until(lambda: self.steps() >= before + steps)

    def steps(self) -> int:
        text = self.metrics.read_text() if self.metrics.exists() else ""
        return text.count('"kind": "step"')

    def listeners(self) -> list[Listener]:
        """Of all its processes, by the kernel."""
        sockets = dict[str, str]()
        for pid in (self.command.process.pid, *descendants(self.command.process.pid)):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
                except OSError:
                    continue
                if found:
                    sockets.setdefault(found[1], self.names.get(pid, "another process"))
        listeners = []
        for kind in ("tcp", "tcp6", "udp", "udp6"):
            for row in (line.split() for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]):
                if row[9] in sockets and (row[3] == "0A" or kind.startswith("udp")):
                    address, port = row[1].split(":")
                    place = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address
                    listeners.append(Listener(sockets[row[9]], kind, place, int(port, 16)))
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        mine = [row for row in rows if row[6] in sockets and int(row[3], 16) & LISTENS]
        return listeners + [Listener(sockets[row[6]], "unix", row[7]) for row in mine]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        for name in KEYS:
            patch.setenv(name, SECRET)
        run = Live(tmp_path_factory.mktemp("security"))
    yield run
    if run.command.process.poll() is None:
        run.command.end(signal.SIGINT)


def documented() -> list[Listener]:
    """The table of the page."""
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `([^`]+)` \| (\w+) \| `([^`]+)` \|", page, re.MULTILINE)
    return [Listener(*row) for row in found]


def own_folder(live: Live) -> Path:
    """The run's temporary folder."""
    (found,) = {path.parent for one in live.listeners() if (path := Path(one.place)).name.startswith("m-")}
    assert found.name.startswith(PREFIX)
    return found


@nightly("runs of processes; tests of the entrance, the tokens and the engine's ports refuse strangers by day")
def test_all_that_listens_is_in_the_table(live: Live) -> None:
    table, folder, found = documented(), str(own_folder(live)), live.listeners()
    for one in found:
        place = one.place.replace(folder, "TMPDIR")
        assert any(row.kind == one.kind and fnmatch(one.who, row.who) and fnmatch(place, row.place) for row in table), (
            f"{one} is not in docs/security.md"
        )
    assert {(one.who, one.kind) for one in found} >= {
        ("controller", "unix"), ("trainer.0", "tcp"), ("generator-0", "unix"), ("reward", "unix"),
    }  # fmt: skip
    assert not any(one.place.startswith("@") for one in found), "every user can connect to an abstract socket"


@nightly("a run of processes; run/test_folder.py and distributed/test_links.py ask for rights by day")
def test_files_and_sockets_are_their_user_s_alone(live: Live) -> None:
    folder = own_folder(live)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in (*folder.rglob("*"), *live.folder.rglob("*")):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # a checkpoint was let go
            continue
        assert not mode & 0o022, f"others may write to {path}"
    assert stat.S_IMODE((live.folder / "logs/monarch.log").stat().st_mode) == 0o600


CALL = """
import json, os, socket, sys
places, messages = json.loads(sys.stdin.readline()), [bytes.fromhex(one) for one in json.loads(sys.stdin.readline())]
if sys.argv[1] == "nobody":
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
told = []
for place, port in places:
    for message in messages if port or sys.argv[1] == "self" else [b""]:
        one = socket.socket(socket.AF_INET if port else socket.AF_UNIX)
        one.settimeout(1.0)
        told.append("deaf")  # as gloo's ports are
        try:
            one.connect((place, port) if port else place)
            told[-1] = "reached"
            one.settimeout(5.0)
            one.sendall(message)
            one.settimeout(0.05)
            one.recv(1 << 16)
        except PermissionError:
            told[-1] = "denied"
        except (ConnectionRefusedError, FileNotFoundError):
            told[-1] = "refused"
        except OSError:
            pass
        one.close()
        if told[-1] == "deaf":
            break
print(json.dumps(told))
"""


def strangers(live: Live, canary: Path, who: str, *prefix: str) -> set[str]:
    """What comes of messages that somebody else sends to all that listens."""
    bomb = pickle.dumps(Bomb(canary))
    messages = [
        os.urandom(1 << 16), (2**40).to_bytes(8, "big") * 2, (2**40).to_bytes(8, "little") * 2,
        b"\xff\xff\xff\xff" + (2**40).to_bytes(8, "big"), len(bomb).to_bytes(4, "big") + bomb, bomb,
        len(bomb).to_bytes(8, "big") + bomb, b"[" * (1 << 16),
    ]  # fmt: skip
    given = f"{json.dumps([(one.place, one.port) for one in live.listeners()])}\n"
    given += f"{json.dumps([one.hex() for one in messages])}\n"
    done = subprocess.run(
        [*prefix, sys.executable, "-c", CALL, who], input=given, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@nightly("runs of processes; tests of the entrance, the tokens and the engine's ports refuse strangers by day")
def test_nobody_gets_anywhere(live: Live, tmp_path: Path) -> None:
    """Nothing is executed, no process dies, memory stays, and the run goes on."""
    canary = tmp_path / "canary"
    tmp_path.chmod(0o777)
    sizes = {pid: resident_bytes(pid) for pid in live.names}
    assert "reached" in strangers(live, canary, "self")
    if os.geteuid() == 0:
        assert "denied" in strangers(live, canary, "nobody")
    live.goes_on()
    assert not canary.exists()
    for pid, before in sizes.items():
        assert resident_bytes(pid) - before < 64 << 20, live.names[pid]
    assert all(row["kind"] in ("step", "eval") for row in rows(live.metrics))


@nightly("a run of processes; by day sockets refuse strangers in distributed/test_links.py and net/test_entrance.py")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_sockets_refuse_another_user(live: Live, tmp_path: Path) -> None:
    paths = [one.place for one in live.listeners() if one.kind == "unix"]
    code = f"import os, socket\nos.setgroups([])\nos.setgid({NOBODY})\nos.setuid({NOBODY})\nfor path in {paths!r}:\n"
    code += "    try:\n        socket.socket(socket.AF_UNIX).connect(path)\n        print('in', path)\n"
    code += "    except PermissionError:\n        pass\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@nightly("a run of processes; by day sockets refuse strangers in distributed/test_links.py and net/test_entrance.py")
def test_another_network_reaches_nothing(live: Live, tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-n", "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let us have a network namespace")
    code = f"import socket\nfor port in {[one.port for one in live.listeners() if one.port]!r}:\n"
    code += "    try:\n        socket.create_connection(('127.0.0.1', port), 2)\n        print('in', port)\n"
    code += "    except OSError:\n        pass\n"
    done = subprocess.run([unshare, "-n", sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@nightly("runs with secrets; sandbox/test_pool.py keeps them from workers by day")
def test_secrets_of_the_environment_are_in_no_file(live: Live) -> None:
    """Of the run, nor in what it says, when an executor has been killed and the run was ended."""
    os.kill(live.command.children()["reward"], signal.SIGKILL)
    live.command.end(signal.SIGINT)
    files = [path for path in live.folder.parent.rglob("*") if path.is_file()]
    assert any(path.name == "summary.json" for path in files) and any("logs" in path.parts for path in files)
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
