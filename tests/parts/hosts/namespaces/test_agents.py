"""Real agents and executors on three addresses of this machine: what dies, freezes, comes back and is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamarl.parts.hosts.agent import descendants
from llamarl.parts.hosts.certificates import make_certificates
from tests.cluster.harness import is_alive
from tests.nightly import nightly

ADDRESSES = {"b": "127.0.0.3", "c": "127.0.0.4"}
WEIGHTS = {"c": "127.0.0.104"}
"""Addresses that weights take where it is another."""
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[4])}
WAIT_S = 240.0
SOON_S = 60.0
"""Much less than `scenario.WAIT_S`, as long as it would take who waits for what is lost."""
KILLED = r"{}: pid {} on host c (was killed by SIGKILL|has ended)"
"""On a busy machine the engine may reap a process before its agent has seen how it ended."""


class Controller:
    """A process that runs `scenario.py`."""

    def __init__(self, pki: Path, logs: Path) -> None:
        script = str(Path(__file__).with_name("scenario.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, str(pki), str(logs)], env=ENV, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def begin(self, method: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()

    def ended(self) -> Any:
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline() or '{"error": "the controller has ended"}')
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def do(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.ended()


class Agents:
    """One process for each host."""

    def __init__(self, pki: Path, place: str, folder: Path) -> None:
        self.pki, self.place, self.folder = pki, place, folder
        self.processes = {name: self.start(name) for name in ADDRESSES}

    def start(self, name: str) -> subprocess.Popen[bytes]:
        places = f"127.0.0.2:1,{self.place}"  # nobody is at the first
        command = [sys.executable, "-m", "llamarl", "host", places, "--pki", str(self.pki), "--name", name]
        with (self.folder / f"{name}.txt").open("ab") as output:
            return subprocess.Popen(
                [*command, "--address", ADDRESSES[name], "--weights-address", WEIGHTS.get(name, "")],
                env=ENV,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def below(self, name: str) -> set[int]:
        """Processes that have come from it and live."""
        return {pid for pid in descendants(self.processes[name].pid) if is_alive(pid)}


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    members = {"controller": ("controller", "127.0.0.2")} | {name: (name, one) for name, one in ADDRESSES.items()}
    make_certificates(tmp_path / "pki", members, days=2)
    return tmp_path / "pki"


@pytest.fixture
def controller(pki: Path, tmp_path: Path) -> Iterator[Controller]:
    (tmp_path / "logs").mkdir()
    controller = Controller(pki, tmp_path / "logs")
    yield controller
    controller.process.kill()
    controller.process.wait()


@pytest.fixture
def agents(controller: Controller, pki: Path, tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(pki, controller.do("open"), tmp_path)
    yield agents
    everyone = [pid for name in ADDRESSES for pid in agents.below(name)]
    for process in agents.processes.values():
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
    until(lambda: not any(map(is_alive, everyone)))


def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> float:
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < timeout_s, "the condition did not come true in time"
        time.sleep(0.01)
    return time.monotonic() - start_s


@nightly("runs over hosts; test_hosts.py and test_agent.py have agents and lost hosts by day")
def test_executors_on_hosts_that_die_freeze_and_come_back(
    controller: Controller, agents: Agents, tmp_path: Path
) -> None:
    do = controller.do
    do("until", "b", "c")
    on_both, on_c = do("spawn", "both", ["b", "c"]), do("spawn", "one", ["c"])
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LLAMARL_TEST", "LLAMARL_ADDRESS", "LLAMARL_WEIGHTS_ADDRESS")
    assert do("call", "both", "environ", *names) == [
        ["0", "0", "2", "on b", "127.0.0.3", "127.0.0.3"],
        ["1", "0", "2", "on c", "127.0.0.4", "127.0.0.104"],
    ]
    assert do("call", "both", "echo", "x" * (3 << 20)) == ["x" * (3 << 20)] * 2, "longer than a message"
    assert on_both[0] in agents.below("b")
    assert {on_both[1], *on_c} <= agents.below("c")
    do("call", "both", "say", "hello")
    until(lambda: all("hello" in _text(tmp_path / "logs" / f"both.{i}.log").splitlines() for i in (0, 1)))

    assert 1000.0 <= do("span_age", "both") < 1240.0, "its clock is not ours"

    # a rank dies
    controller.begin("failed", "one")
    os.kill(on_c[0], signal.SIGKILL)
    cause, after_s = controller.ended()
    assert after_s < SOON_S
    assert re.fullmatch(KILLED.format(r"one \(rank 0\)", on_c[0]), cause)

    # a host freezes: known, named, and when it wakes up it ends what it had and comes back
    do("spawn", "other", ["c"])
    before = agents.below("c")
    controller.begin("failed", "other")
    agents.send("c", signal.SIGSTOP)
    cause, after_s = controller.ended()
    assert cause == "other (rank 0): host c (127.0.0.4) is lost: it has been silent for 3 s"
    assert after_s < SOON_S
    assert do("failed", "both")[0].startswith("both (rank 1): host c"), "the rank on b alone is no executor"
    assert do("stop", "both") < SOON_S
    agents.send("c", signal.SIGCONT)
    do("until", "b", "c")
    until(lambda: not any(map(is_alive, before)))
    assert do("spawn", "third", ["b", "c"])

    # an agent is killed: nothing of it is left, and another one takes its name
    below = agents.below("c")
    controller.begin("failed", "third")
    agents.send("c", signal.SIGKILL)
    cause, after_s = controller.ended()
    assert cause.startswith("third (rank 1): host c (127.0.0.4) is lost: ")
    assert after_s < SOON_S
    until(lambda: not any(map(is_alive, below)))
    agents.processes["c"].wait()
    agents.processes["c"] = agents.start("c")
    do("until", "b", "c")
    do("spawn", "fourth", ["c"])

    # the run ends: executors end, agents stay for the next one
    assert do("end") < SOON_S
    until(lambda: not agents.below("b") and not agents.below("c"))
    assert all(process.poll() is None for process in agents.processes.values())
    agents.send("b", signal.SIGTERM)
    assert agents.processes["b"].wait(WAIT_S) == 0


@nightly("how hosts share ranks is in test_hosting.py")
def test_unequal_shares_are_a_mesh_each_the_largest_first(controller: Controller, agents: Agents) -> None:
    """A rank that dies leaves other executors alone."""
    do = controller.do
    do("until", "b", "c")
    do("spawn", "both", ["b", "c"])
    uneven = do("spawn", "uneven", ["b", "c", "c"])
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LLAMARL_TEST", "LLAMARL_ADDRESS", "LLAMARL_WEIGHTS_ADDRESS")
    assert do("call", "uneven", "environ", *names) == [
        ["0", "0", "3", "on c", "127.0.0.4", "127.0.0.104"],
        ["1", "1", "3", "on c", "127.0.0.4", "127.0.0.104"],
        ["2", "0", "3", "on b", "127.0.0.3", "127.0.0.3"],
    ]
    controller.begin("failed", "uneven")
    os.kill(uneven[1], signal.SIGKILL)
    cause, after_s = controller.ended()
    assert after_s < SOON_S
    assert re.fullmatch(KILLED.format(r"uneven \(rank 1\)", uneven[1]), cause)
    assert do("stop", "uneven") < SOON_S
    assert do("call", "both", "echo", 1) == [1, 1]


@nightly("runs over hosts; test_hosts.py and test_agent.py have agents and lost hosts by day")
def test_agents_end_what_they_started_when_the_controller_is_gone(controller: Controller, agents: Agents) -> None:
    do = controller.do
    do("until", "b", "c")
    do("spawn", "both", ["b", "c"])
    below = agents.below("b") | agents.below("c")
    assert len(below) >= 4
    controller.process.kill()
    until(lambda: not any(map(is_alive, below)))


@nightly("a controller that is gone is, above")
def test_a_frozen_controller_is_lost_too(controller: Controller, agents: Agents) -> None:
    do = controller.do
    do("until", "b", "c")
    do("spawn", "one", ["b"])
    below = agents.below("b")
    controller.process.send_signal(signal.SIGSTOP)
    until(lambda: not any(map(is_alive, below)))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
