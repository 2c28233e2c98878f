"""Machines of a service over HTTP, whose machines are those of bubblewrap."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.config import ConfigError
from llamarl.parts.episodes.machines import MachineLimits, MachineLost
from llamarl.parts.episodes.machines._base import pack, unpack
from llamarl.parts.episodes.machines.remote import Remote
from llamarl.types import Outcome
from tests.nightly import nightly
from tests.parts.episodes.environments.test_machine import BY_CALLS, RIGHT, row, sh, talk
from tests.parts.episodes.machines.here import BACKEND, needs_machines, said
from tests.parts.episodes.machines.service import Service

pytestmark = needs_machines
TOKEN = "LLAMARL_MACHINES_TOKEN"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv(TOKEN, "secret")
    with Service(BACKEND, "secret") as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield served
        served.shutdown()
        thread.join()
        for name in list(served.machines):
            served.close({"machine": name})


def test_a_machine_of_a_service(service: Service, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    backend = Remote(url=service.url)
    assert backend.problem() == "" and not service.machines
    machine = backend.start(str(tmp_path), MachineLimits())
    assert said(machine, "cat a; cd /tmp; x=5") == "one" and said(machine, "pwd; echo $x") == "/tmp\n5\n"
    done = machine.run("head -c 100000 /dev/zero; echo end", 60.0, 100)
    assert (done.total, done.output[-4:], len(done.output)) == (100_004, b"end\n", 100)
    assert machine.run("sleep 100", 0.2, 10).is_late
    machine.put(pack({"sub/b": b"\0two"}))
    assert unpack(machine.get(["a", "sub/b", "c"], 50), ["a", "sub/b"], 50) == {"a": b"one", "sub/b": b"\0two"}
    program = (
        "import os\nwhile os.read(3, 1):\n    print(open('/run/shell/text').read(), flush=True); os.write(4, b'.')"
    )
    assert machine.ask(program, "six", 60.0, 100).output == b"six\n"
    with pytest.raises(OSError, match="do not fit"):
        machine.put(pack({"huge": b"x" * (1 << 26)}))
    machine.close()
    machine.close()
    assert not service.machines
    with pytest.raises(MachineLost):
        machine.run("true", 60.0, 100)


@nightly("the service once more; machines exceed limits in test_bubblewrap.py by day")
def test_a_machine_that_exceeds_its_limits_is_lost(service: Service) -> None:
    machine = Remote(url=service.url).start(None, MachineLimits(cpu_s=1))
    with pytest.raises(MachineLost, match="CPU time"):
        machine.run("for n in 1 2 3; do (while :; do :; done) & done; wait", 60.0, 100)
    machine.close()


def test_what_is_wrong_is_named(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    assert "refused" in Remote(url=f"http://127.0.0.1:{port}").problem()
    assert "no such path" in Remote(url=f"{service.url}/v2").problem()
    assert "NO_TOKEN" in Remote(url=service.url, token="NO_TOKEN").problem()
    with pytest.raises(ConfigError, match="not a folder"):
        Remote(url=service.url).start("/no/such/folder", MachineLimits())
    monkeypatch.setenv(TOKEN, "wrong")
    with pytest.raises(ConfigError, match="token is wrong"):
        Remote(url=service.url).start(None, MachineLimits())
    monkeypatch.setattr(service, "start", lambda body: {"name": "x"})
    monkeypatch.setattr(service, "token", "wrong")
    assert "protocol" in Remote(url=service.url).problem()
    with pytest.raises(ValueError, match="http"):
        Remote(url="ftp://here")


def test_machines_of_which_nobody_asks_end(service: Service) -> None:
    Remote(url=service.url, idle_s=1e-3).start(None, MachineLimits())
    threading.Event().wait(0.01)
    service.end_idle()
    assert not service.machines


def test_episodes_in_machines_of_a_service(service: Service) -> None:
    backend = {"name": "remote", "url": service.url}
    fixed, end = talk(row(BY_CALLS), sh(f"printf '{RIGHT}' > calc.py"), "", backend=backend)
    assert fixed == "```output\n\n```\n" and end.outcome is Outcome.SCORE and not service.machines
