"""Which hosts are here: who is let in, who is refused and hears why, who is lost and when."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import ConfigError
from llamarl.net.entrance import MAX_UNPROVED
from llamarl.observability.files import code_fingerprint
from llamarl.parts.hosts import agent, home, registry
from llamarl.parts.hosts.agent import HostRefused, call
from llamarl.parts.hosts.certificates import CONTROLLER, client_context, make_certificates
from llamarl.parts.hosts.home import SILENT_S, Inventory, Line, own_inventory
from llamarl.parts.hosts.registry import Host, HostLost, Registry
from tests.nightly import nightly

ADDRESSES = {"b": "127.0.0.3", "c": "127.0.0.4"}
MEMBERS = {CONTROLLER: (CONTROLLER, "127.0.0.2"), **{name: (name, address) for name, address in ADDRESSES.items()}}

FOREIGN = "certificate was issued by another authority than"


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "pki"
    make_certificates(folder, MEMBERS, days=2)
    return folder


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is silent for longer than a host may be; tests of silence limit it once all hosts are there."""
    monkeypatch.setattr(agent, "SILENT_S", 60.0)
    monkeypatch.setattr(Line.hear, "__defaults__", (60.0,))


class Bench:
    """A registry, and agents without an engine."""

    def __init__(self, pki: Path, logs: Path) -> None:
        self.pki, self.told, self.joined = pki, list[str](), list[str]()
        self.registry = Registry(pki, logs, self.told.append)
        self.registry.joined = lambda host: self.joined.append(host.name)
        self.place = ""

    async def call(self, name: str, address: str | None = None, context: ssl.SSLContext | None = None) -> Line:
        return await call(self.place, context or client_context(self.pki, name), address or ADDRESSES[name])

    def inventory(self, name: str) -> dict[str, Any]:
        return own_inventory(name, ADDRESSES[name], "/tmp", 2).model_dump()

    async def come(self, name: str = "b", ahead_s: float = 0.0) -> tuple[Line, Host]:
        """A host that has been let in and has answered once."""
        line, times = await self.call(name), self.joined.count(name)
        assert "run" in await line.hear()
        line.tell(**self.inventory(name))
        assert "logs" in await line.hear()
        line.tell(url="tls://nowhere", keeper=["127.0.0.3:1", "secret"])
        await answer(line, ahead_s)
        while self.joined.count(name) == times:
            await asyncio.sleep(0.001)
        return line, self.registry.hosts[name]

    async def refused(self, who: str, at: str | None = None, /, **changes: Any) -> str:
        line = await self.call(who, at)
        await line.hear()
        line.tell(**self.inventory(who) | changes)
        return str((await line.hear()).get("refused"))


async def answer(line: Line, ahead_s: float = 0.0, **more: Any) -> None:
    """To the next question."""
    question = await line.hear(240.0)
    line.tell(answer=question["ask"], time=time.time() + ahead_s, **more)


async def limit_silence(monkeypatch: pytest.MonkeyPatch, *lines: Line) -> None:
    """From the next answer of each on, the registry waits for `SILENT_S`."""
    monkeypatch.setattr(Line.hear, "__defaults__", (SILENT_S,))
    for line in lines:
        await answer(line)


async def lost(host: Host) -> str:
    while not host.lost:
        await asyncio.sleep(0.001)
    return host.lost


def run(pki: Path, logs: Path, main: Callable[[Bench], Awaitable[None]]) -> Bench:
    bench = Bench(pki, logs)

    async def within() -> None:
        bench.place = await bench.registry.open("127.0.0.2:0")
        async with asyncio.timeout(240.0):
            await main(bench)
        await bench.registry.close()

    asyncio.run(within())
    return bench


def test_a_host_is_here_until_its_connection_ends(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        line, host = await bench.come()
        assert host.inventory.gpus == 2
        assert host.url == "tls://nowhere"
        waits = asyncio.create_task(host.ask("look"))
        line.close()
        assert await lost(host) == "host b (127.0.0.3) is lost: the other end has closed the connection"
        with pytest.raises(HostLost, match="is lost"):
            await waits
        assert bench.registry.hosts == {}
        await bench.come()

    bench = run(pki, tmp_path, main)
    assert bench.joined == ["b", "b"]
    assert bench.told == ["host b (127.0.0.3) is lost: the other end has closed the connection"]


def test_a_silent_host_is_lost_within_the_limit(pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(bench: Bench) -> None:
        (silent, host), (line, other) = await bench.come(), await bench.come("c")
        await limit_silence(monkeypatch, line, silent)
        start_s = time.monotonic()
        while not host.lost:
            await answer(line)
        assert SILENT_S - home.BEAT_S - 0.5 < time.monotonic() - start_s < 60.0
        assert host.lost == "host b (127.0.0.3) is lost: it has been silent for 3 s"
        assert not other.lost

    run(pki, tmp_path, main)


@nightly("real time; by day hosts come, are refused and are lost")
def test_a_message_starts_no_task(pki: Path, tmp_path: Path) -> None:
    """Thousands of hosts are answered twice a second."""

    async def main(bench: Bench) -> None:
        line, _ = await bench.come()
        started = list[str]()

        def start(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
            started.append(str(coroutine))
            return asyncio.Task(coroutine, loop=loop, **options)

        loops = bench.registry._loop, asyncio.get_running_loop()
        for loop in loops:
            loop.set_task_factory(start)
        for _ in range(3):
            await answer(line)
        for loop in loops:
            loop.set_task_factory(None)
        assert started == []

    run(pki, tmp_path, main)


def test_a_line_names_some_of_many_hosts() -> None:
    names = [f"n-{i:04}" for i in range(1024)]
    said = registry._some(names)
    assert said.startswith("n-0000, n-0001, ") and said.endswith(", n-0023, 1000 more")
    assert registry._some(names[:24]) == ", ".join(names[:24]) and registry._some([]) == ""


@nightly("real time; by day one silent host is lost within the limit")
def test_all_hosts_silent_at_once_mean_that_this_machine_is_cut_off(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(bench: Bench) -> None:
        come = await asyncio.gather(bench.come(), bench.come("c"))
        await limit_silence(monkeypatch, *(line for line, _ in come))  # or one is silent for longer than the other
        for name, (_, host) in zip("bc", come, strict=True):
            reason = rf"host {name} \(127.*\) is lost: this machine is cut off: all 2 hosts have been silent for over "
            assert re.match(reason, await lost(host))

    told = run(pki, tmp_path, main).told
    assert len(told) == 1 and told[0].startswith("this machine is cut off: all 2 hosts have been silent for over ")


def test_a_name_whose_address_is_told_late_may_call_again(pki: Path, tmp_path: Path, monkeypatch) -> None:
    """A pod that is back at a new address, and a name that nobody knows yet."""
    make_certificates(pki, {"d": ("d", "d.run")}, days=2)
    answers: list[set[str] | OSError] = [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        {"10.9.9.9"},
        {"127.0.0.4"},
    ]

    async def resolved(host: str) -> set[str]:
        assert host == "d.run"
        found = answers.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(registry, "_addresses", resolved)

    async def main(bench: Bench) -> None:
        heard = list[dict[str, Any]]()
        for _ in range(3):
            line = await bench.call("d", "127.0.0.4")
            await line.hear()
            line.tell(**bench.inventory("b") | {"name": "d", "address": "d.run"})
            heard.append(await line.hear())
        unknown = "its address d.run: the host name is unknown; correct it, or use an IP address"
        late = "it calls from 127.0.0.4, not from its address d.run, by DNS 10.9.9.9, which may be behind"
        assert heard == [{"busy": unknown}, {"busy": late}, {"logs": {}}]

    run(pki, tmp_path, main)


def test_mistakes_that_alternate_are_said_once_each(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        for number in range(6):
            await bench.refused("b", **({"code": "0"} if number % 2 else {"packages": {"torch": "1.0"}}))
        with pytest.raises(ConfigError, match=r"\n  127.0.0.3 was refused 3 times: its code is 0, the controller's "):
            await bench.registry.until(1, 0.1)

    assert len(run(pki, tmp_path, main).told) == 2


def test_strangers_keep_no_host_away(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        address, _, port = bench.place.rpartition(":")
        held = [socket.create_connection((address, int(port))) for _ in range(4 * MAX_UNPROVED)]
        for one in held[: 2 * MAX_UNPROVED]:
            one.sendall(b"\x16")
        await bench.come()
        for one in held:
            one.close()

    assert run(pki, tmp_path, main).joined == ["b"]


@nightly("real time; by day hosts come, are refused and are lost")
def test_clocks_are_known_as_well_as_the_quickest_answer_tells(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        line, host = await bench.come(ahead_s=100.0)
        assert abs(host.offset_s - 100.0) <= host.error_s < 60.0
        question = await line.hear()
        await asyncio.sleep(0.3)  # a slow one says less
        line.tell(answer=question["ask"], time=time.time() + 500.0)
        await answer(line, ahead_s=100.0)
        assert abs(host.offset_s - 100.0) < 0.1

    run(pki, tmp_path, main)


@pytest.mark.parametrize(
    ("name", "address", "changes", "reason"),
    [
        ("b", None, {"name": "c"}, "its certificate is for b, 127.0.0.3, not for c"),
        ("b", None, {"address": "127.0.0.4"}, "its certificate is for b, 127.0.0.3, not for 127.0.0.4"),
        ("b", "127.0.0.4", {}, "it calls from 127.0.0.4, not from its address 127.0.0.3"),
        ("b", None, {"code": "0"}, "its code is 0, the controller's .*; install the same at the same path"),
        ("b", None, {"python": "/usr/bin/python (3.8)"}, r"its Python is /usr/bin/python \(3.8\), the controller's"),
        ("b", None, {"packages": {"torch": "1.0"}}, "its torch is 1.0, the controller's"),
        ("b", None, {"cores": "many"}, "it speaks otherwise; install the same version"),
    ],
)
def test_who_does_not_fit_is_refused_and_both_ends_hear_why(
    pki: Path, tmp_path: Path, name: str, address: str | None, changes: dict[str, Any], reason: str
) -> None:
    heard = list[str]()

    async def main(bench: Bench) -> None:
        heard.append(await bench.refused(name, address, **changes))
        assert bench.registry.hosts == {}

    (told,) = run(pki, tmp_path, main).told
    assert re.match(reason, heard[0]), heard
    assert told == f"{address or ADDRESSES[name]} was refused as a host: {heard[0]}"


def test_a_stranger_s_certificate_is_refused_in_the_handshake(
    pki: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    foreign = tmp_path_factory.mktemp("foreign") / "pki"
    make_certificates(foreign, MEMBERS, days=2)
    (foreign / "ca.crt").write_bytes((pki / "ca.crt").read_bytes())  # it trusts us; we do not trust it

    async def main(bench: Bench) -> None:
        with pytest.raises(ssl.SSLError, match="ALERT"):
            await (await bench.call("b", context=client_context(foreign, "b"))).hear()
        command = ["-m", "llamarl", "host", bench.place, "--pki", foreign, "--name", "b", "--address", ADDRESSES["b"]]
        agent = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=subprocess.PIPE)
        _, heard = await agent.communicate()
        assert agent.returncode == 2
        assert f"does not accept b.crt: this end's {FOREIGN} the other end's ca.crt; it says more" in heard.decode()

    (told,) = run(pki, tmp_path, main).told
    assert told.startswith(f"127.0.0.3 was refused as a host: its {FOREIGN} this end's ca.crt; both ends need")


def test_a_controller_of_another_authority_is_none(
    pki: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    foreign = tmp_path_factory.mktemp("foreign") / "pki"
    make_certificates(foreign, MEMBERS, days=2)

    async def main(bench: Bench) -> None:
        why = f"127.0.0.2:\\d+ is not taken for the controller: its {FOREIGN} this end's ca.crt; "
        with pytest.raises(HostRefused, match=why):
            await bench.call("b", context=client_context(foreign, "b"))

    (told,) = run(pki, tmp_path, main).told
    assert told == f"127.0.0.3 was refused as a host: this end's {FOREIGN} the other end's ca.crt"


def test_noise_and_silence_at_the_port_harm_nobody(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        first, host = await bench.come()
        beats = asyncio.create_task(_beats(first))
        address, _, port = bench.place.rpartition(":")
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64):
            _, writer = await asyncio.open_connection(address, int(port))
            writer.write(noise)
            writer.close()
        line = await bench.call("c")
        line.tell(noise="x" * (home.MAX_LINE_BYTES + (1 << 17)))
        assert "run" in await line.hear()
        assert "refused" in await line.hear()
        beats.cancel()
        assert bench.registry.hosts == {"b": host}

    run(pki, tmp_path, main)


def test_a_second_host_of_a_name_waits_until_the_first_is_gone(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        first, host = await bench.come()
        line = await bench.call("b")
        await line.hear()
        line.tell(**bench.inventory("b"))
        assert "is here already" in (await line.hear())["busy"]
        first.close()
        await lost(host)
        await bench.come()

    run(pki, tmp_path, main)


def test_a_second_host_of_a_name_waits_while_the_first_starts(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        lines = [await bench.call("b") for _ in range(2)]
        for line in lines:
            await line.hear()
            line.tell(**bench.inventory("b"))
        answers = [await line.hear() for line in lines]
        assert sorted(next(iter(one)) for one in answers) == ["busy", "logs"]
        lines[0 if "logs" in answers[0] else 1].close()
        await asyncio.sleep(0.05)
        await bench.come()

    run(pki, tmp_path, main)


def test_who_leaves_before_anything_runs_there_goes_at_once(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        line, host = await bench.come()
        line.tell(leaving=True)
        assert await lost(host) == "nothing runs there"

    run(pki, tmp_path, main)


def test_too_few_hosts_are_named_with_what_was_refused(pki: Path, tmp_path: Path, monkeypatch) -> None:
    """And from time to time, who is here."""
    monkeypatch.setattr(registry, "SAY_S", 0.05)

    async def main(bench: Bench) -> None:
        line, _ = await bench.come()
        await bench.refused("c", code="0")
        beats = asyncio.create_task(_beats(line))
        with pytest.raises(
            ConfigError,
            match=r"^cluster.num_hosts = 3, but only b called within 0.2 s .*\n  127.0.0.4 was refused once: .*0",
        ):
            await bench.registry.until(3, 0.2)
        beats.cancel()

    told = run(pki, tmp_path, main).told
    assert any(re.fullmatch(r"1 of 3 hosts have called: b; 2 missing.*; refused: 127\.0\.0\.4", text) for text in told)


def test_who_is_missing_is_named_by_the_certificates(tmp_path: Path, monkeypatch) -> None:
    """Of the controller's own machine only where the others are too few."""
    monkeypatch.setattr(registry, "SAY_S", 0.05)
    own = {"a": ("a", "127.0.0.2"), CONTROLLER: (CONTROLLER, "a", "127.0.0.2")}
    make_certificates(tmp_path / "pki", MEMBERS | own, days=2)

    async def main(bench: Bench) -> None:
        for number in (1, 2, 3, 4):
            with pytest.raises(ConfigError, match=r"but no host called within 0.2 s"):
                await bench.registry.until(number, 0.2)

    told = run(tmp_path / "pki", tmp_path, main).told
    assert set(told) == {
        "0 of 1 hosts have called: none; 1 missing, of b, c",
        "0 of 2 hosts have called: none; 2 missing: b, c",
        "0 of 3 hosts have called: none; 3 missing: a, b, c",
        "0 of 4 hosts have called: none; 4 missing, of a, b, c",
    }


@nightly("real time; by day hosts come, are refused and are lost")
def test_fewer_hosts_are_enough_after_the_time_or_when_nobody_else_comes(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        line, _ = await bench.come()
        beats = asyncio.create_task(_beats(line))
        clock = asyncio.get_running_loop()
        for timeout_s, patience_s in ((0.3, 240.0), (240.0, 0.3)):
            start_s = clock.time()
            await bench.registry.until(2, timeout_s, 1, patience_s)
            assert 0.3 <= clock.time() - start_s < 60.0
        with pytest.raises(ConfigError, match=r"^cluster.min_hosts = 2, but only b called .* lower cluster.min_hosts$"):
            await bench.registry.until(3, 0.2, 2, 0.1)
        beats.cancel()

    run(pki, tmp_path, main)


def test_the_end_of_a_process_comes_to_who_asked_for_it(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        line, host = await bench.come()
        causes = list[str]()
        host.when_ended(7, causes.append)
        while (question := await line.hear())["what"] == "beat":
            line.tell(answer=question["ask"], time=time.time())
        assert (question["what"], question["pid"]) == ("watch", 7)
        for pid in (8, 7, 7):
            line.tell(ended=pid, cause="was killed")
        await answer(line)
        while not causes:
            await asyncio.sleep(0.001)
        assert causes == ["was killed"]

    run(pki, tmp_path, main)


@nightly("real time; by day hosts come, are refused and are lost")
def test_logs_are_brought_together_and_go_on_where_they_ended(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        line, host = await bench.come()
        await answer(line, logs=[{"file": "one.log", "upto": 3, "data": "ab\n"}])
        await answer(line, logs=[{"file": "../out.log", "upto": 3, "data": "ab\n"}])
        await answer(line, logs=[{"file": "one.log", "upto": 5, "data": "é\n"}])
        await asyncio.sleep(0.05)
        line.close()
        await lost(host)
        line = await bench.call("b")
        await line.hear()
        line.tell(**bench.inventory("b"))
        assert (await line.hear())["logs"] == {"one.log": 5}

    (logs := tmp_path / "logs").mkdir()
    run(pki, logs, main)
    assert (logs / "one.log").read_bytes() == b"ab\n\xe9\n"
    assert [path.name for path in tmp_path.rglob("*.log")] == ["one.log"]


def test_who_asks_to_leave_is_let_go_by_whom_the_run_tells(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        leaving = list[Host]()
        bench.registry.leaves = leaving.append
        line, host = await bench.come()
        for _ in range(2):
            line.tell(leaving=True)
        await asyncio.sleep(0.05)
        assert leaving == [host], "once, however often it asks"
        bench.registry.dismiss(host, "go")
        while (message := await line.hear())["what"] == "beat":
            pass
        assert (message["what"], message["reason"], message["is_final"]) == ("bye", "go", True)
        assert await lost(host) == "go"

    assert "host b is about to leave" in run(pki, tmp_path, main).told


def test_an_agent_s_own_reason_is_an_error_of_the_user(pki: Path, tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        line, host = await bench.come()
        asked = asyncio.create_task(host.ask("look", paths=[]))
        await asyncio.sleep(0)
        while (question := await line.hear())["what"] == "beat":
            line.tell(answer=question["ask"], time=time.time())
        line.tell(answer=question["ask"], time=time.time(), error="no")
        with pytest.raises(ConfigError, match=r"^host b: no$"):
            await asked

    run(pki, tmp_path, main)


async def _beats(line: Line) -> None:
    while True:
        await answer(line)


def test_the_fingerprint_of_code_is_of_names_and_contents() -> None:
    assert code_fingerprint() == code_fingerprint()
    assert Inventory.model_validate(own_inventory("b", "127.0.0.3", "", 0).model_dump()).code == code_fingerprint()
