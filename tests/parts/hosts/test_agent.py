"""What an agent keeps of a host's logs, without a registry."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.parts.hosts import agent, heartbeat
from llamarl.parts.hosts.agent import HostAgent, HostIdentity, _kill, _pull, _seen, _watch
from llamarl.parts.hosts.certificates import make_certificates
from llamarl.parts.hosts.home import HUNG_UP, MAX_LINE_BYTES, Line
from tests.architecture.repository import ROOT
from tests.cluster.harness import is_alive
from tests.nightly import nightly


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostAgent:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_certificates(tmp_path / "pki", {"b": ("b", "127.0.0.3")}, days=2)
    return HostAgent(
        ["127.0.0.2:1"], HostIdentity(name="b", address="127.0.0.3", pki=tmp_path / "pki"), print, once=False
    )


def test_logs_go_on_where_the_registry_has_them_and_begin_anew_with_a_new_agent(one: HostAgent) -> None:
    one._welcomed("first", {"logs": {"host-b.log": 4}})
    log = one._logs / "host-b.log"
    log.write_text("a new agent's own")
    assert [piece["data"] for piece in one._new_logs()] == ["a new agent's own"]
    one._welcomed("first", {"logs": {"host-b.log": 10}})  # the rest was lost with the connection
    assert [piece["data"] for piece in one._new_logs()] == ["t's own"]
    one._welcomed("second", {"logs": {}})
    assert not log.exists()


def test_many_logs_at_once_fit_into_messages(one: HostAgent) -> None:
    for i in range(20):
        (one._logs / f"{i}.log").write_bytes("世".encode() * 40_000)
    num_bytes = 0
    while pieces := list(one._new_logs()):
        assert len(json.dumps({"logs": pieces})) < MAX_LINE_BYTES
        num_bytes += sum(len(piece["data"]) for piece in pieces)
    assert num_bytes == 20 * 3 * 40_000


def test_processes_that_have_not_come_from_the_agent_are_not_killed() -> None:
    """Whatever the controller says."""
    code = "import sys; sys.stdin.read()"
    parent = subprocess.Popen(["sh", "-c", "setsid sleep 60 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True)
    stranger = int(parent.communicate(timeout=240)[0])  # adopted by init
    own = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    try:
        asyncio.run(_kill([stranger, own.pid]))
        own.communicate(timeout=240)
        assert own.returncode == -9
        assert is_alive(stranger)
    finally:
        os.kill(stranger, 9)


@pytest.mark.parametrize("is_reaped", [False, True])
@pytest.mark.parametrize(
    ("how", "cause"), [("kill -9 $$", "was killed by SIGKILL"), ("exit 3", "ended with exit code 3")]
)
def test_the_end_of_a_process_is_told_with_its_status(how: str, cause: str, is_reaped: bool) -> None:
    """Whether or not its parent has waited for it."""
    told = list[dict[str, Any]]()
    child = subprocess.Popen(["sh", "-c", f"read _; {how}"], stdin=subprocess.PIPE, start_new_session=True)

    async def main() -> None:
        watching = asyncio.create_task(_watch(SimpleNamespace(tell=lambda **message: told.append(message)), child.pid))  # pyrefly: ignore[bad-argument-type]
        await asyncio.sleep(0)
        assert child.stdin is not None
        child.stdin.close()
        if is_reaped:
            child.wait(240)
        await asyncio.wait_for(watching, 240)

    asyncio.run(main())
    child.wait(240)
    assert told == [{"ended": child.pid, "cause": cause}]
    told.clear()
    asyncio.run(_watch(SimpleNamespace(tell=lambda **message: told.append(message)), child.pid))  # pyrefly: ignore[bad-argument-type]
    assert told == [{"ended": child.pid, "cause": ""}], "it had gone before"


def test_the_run_s_folder_is_known_by_what_is_written_there(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("token")
    here = {"paths": [str(tmp_path), "/no/model"], "token": "token"}
    assert _seen(folder=str(tmp_path), **here) == {"missing": ["/no/model"], "folder": ""}
    assert _seen(folder="", **here)["folder"] == ""
    assert "No such file" in _seen(folder=str(tmp_path / "elsewhere"), **here)["folder"]
    (tmp_path / "token").write_text("another run's")
    assert _seen(folder=str(tmp_path), **here)["folder"] == "another folder is there"


def test_the_wire_is_measured_with_who_knows_the_secret_only(one: HostAgent) -> None:
    async def main() -> None:
        port = (await one._offer(1 << 20, "a" * 32))["port"]
        assert await _pull("127.0.0.3", port, 1 << 20, "b" * 32) == {"failed": HUNG_UP}
        assert (await _pull("127.0.0.3", port, 1 << 20, "a" * 32))["bytes_per_s"] > 0
        assert await _pull("127.0.0.3", port, 1 << 20, "a" * 32) == {"failed": "no process listens there"}

    asyncio.run(main())


def test_looking_at_a_shared_folder_changes_nothing_that_others_read(tmp_path: Path) -> None:
    """All hosts of a run look at the same time."""
    token = tmp_path / ".seen-1"
    token.write_text(token.name)
    token.chmod(0o444)
    before = token.stat().st_mtime_ns
    asked = {"paths": [str(tmp_path), str(tmp_path / "gone")], "folder": str(tmp_path), "token": token.name}
    assert _seen(**asked) == {"missing": [str(tmp_path / "gone")], "folder": ""}
    assert token.stat().st_mtime_ns == before and list(tmp_path.iterdir()) == [token]
    token.write_text("of another run")
    assert _seen(**asked)["folder"] == "another folder is there"
    token.unlink()
    assert "No such file" in _seen(**asked)["folder"]


def test_why_it_calls_again_is_said_in_plain_words_and_once_more_after_a_while(
    one: HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that nobody knows, among others: in a cluster it may be known later."""
    told, asked = list[str](), list[str]()
    one._controllers, one._tell = deque(["nobody.invalid:1", "127.0.0.2:1"]), told.append
    monkeypatch.setattr(agent, "BACK_OFF_S", (0.001, 0.001))

    async def main(seconds: float) -> None:
        monkeypatch.setattr(agent, "SAY_S", seconds)

        async def look(host: str, *_: Any, **__: Any) -> Any:
            asked.append(host)
            await asyncio.sleep(0.003)  # longer than two pauses
            one._is_leaving = len(asked) == 6
            if host == "nobody.invalid":
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(0, 0, 0, "", (host, 1))]

        asyncio.get_running_loop().getaddrinfo = look
        await one._stay()

    unknown = "nobody.invalid:1: the host name is unknown; correct it, or use an IP address; calls again"
    closed = "127.0.0.2:1: no process listens there; calls again"
    asyncio.run(main(60.0))
    assert told == [unknown, closed] and len(asked) == 6
    asked.clear()
    one._is_leaving = False
    asyncio.run(main(0.0))
    assert told[2:] == [unknown, closed] * 3


@nightly("waits in real time; a clock does in test_hosts.py by day")
def test_a_host_that_no_run_has_ends_when_it_is_to_leave(one: HostAgent, tmp_path: Path) -> None:
    """Its agent alone, of all that run here; nobody has to answer it."""
    command = [sys.executable, "-m", "llamarl", "host", "127.0.0.2:1", "--pki", "pki", "--address", "127.0.0.3"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    make_certificates(tmp_path / "pki", {"c": ("c", "127.0.0.3")}, days=2)
    agents = {
        name: subprocess.Popen([*command, "--name", name], stdout=subprocess.PIPE, **options) for name in ("b", "c")
    }
    try:
        for waiting in agents.values():
            assert waiting.stdout is not None and "calls again" in waiting.stdout.readline()
        drain = [*command, "--drain", "--name"]
        assert subprocess.run([*drain, "b"], check=False, timeout=240, **options).returncode == 0
        assert agents["b"].communicate(timeout=240)[0] == "llamarl host: b ends\n" and agents["b"].returncode == 0
        nobody = subprocess.run([*drain, "b"], check=False, timeout=240, stderr=subprocess.PIPE, **options)
        assert nobody.returncode == 1 and "b does not call 127.0.0.2:1 from here" in nobody.stderr
        assert agents["c"].poll() is None
    finally:
        for waiting in agents.values():
            waiting.kill()
            waiting.communicate()


def test_a_host_is_drained_once_however_often_it_is_told_to(one: HostAgent) -> None:
    told = list[dict[str, Any]]()

    async def main() -> None:
        one._task = asyncio.current_task()
        one._line = SimpleNamespace(tell=lambda **message: told.append(message))  # pyrefly: ignore[bad-assignment]
        for _ in range(3):
            one._drain()
        await asyncio.sleep(0)
        one._leave()  # Ctrl-C, a second time
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(1)

    asyncio.run(main())
    assert told == [{"leaving": True}]


def test_each_call_has_the_fingerprint_of_what_is_there_now(one: HostAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit while an agent waits for a run ends no agent."""
    told = list[str]()

    class Closed(Line):
        def __init__(self) -> None:
            """To nobody."""

        def tell(self, **message: Any) -> None:
            told.append(message["code"])

        async def hear(self, timeout_s: float = 0.0) -> dict[str, Any]:
            return {"run": "1", "busy": "not now"}

        def close(self) -> None:
            pass

    async def call(*_: object) -> Line:
        return Closed()

    monkeypatch.setattr(agent, "call", call)
    for code in ("one", "other"):
        monkeypatch.setattr(agent, "code_fingerprint", lambda code=code: code)
        with pytest.raises(ConnectionRefusedError, match="not now"):
            asyncio.run(one._take_part())
    assert told == ["one", "other"]


def test_an_agent_gives_up_when_no_controller_answers(one: HostAgent, capsys: pytest.CaptureFixture[str]) -> None:
    one._give_up_s = 0.01
    asyncio.run(asyncio.wait_for(one._stay(), 240))
    assert "no controller has answered" in capsys.readouterr().out


def test_a_heartbeat_goes_on_as_long_as_its_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = tmp_path / "no folder" / "heartbeat"
    monkeypatch.setenv(heartbeat.VARIABLE, str(beat))
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.001)

    async def main() -> None:
        task = asyncio.create_task(heartbeat.beat())
        await asyncio.sleep(0.01)
        assert not task.done(), "a file that cannot be written ends nothing"
        beat.parent.mkdir()
        for _ in range(2):
            while not beat.exists():
                await asyncio.sleep(0.001)
            beat.unlink()
        task.cancel()

    asyncio.run(asyncio.wait_for(main(), 240))
    monkeypatch.delenv(heartbeat.VARIABLE)
    asyncio.run(asyncio.wait_for(heartbeat.beat(), 240))
