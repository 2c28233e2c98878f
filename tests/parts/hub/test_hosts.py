"""Hosts fetch a model that is named, each into its own cache: real agents on two addresses of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamarl.parts.hosts.certificates import make_certificates
from tests.end_to_end.tiny import ROOT, Command, make_model, write_toml
from tests.nightly import nightly
from tests.parts.hub.server import HubServer

ADDRESSES = {"b": "127.0.0.3", "c": "127.0.0.4"}
WAIT_S = 240.0


@pytest.fixture
def commit(hub: HubServer, tmp_path: Path) -> str:
    folder = make_model(tmp_path / "model")
    return hub.add("tiny/model", {path.name: path.read_bytes() for path in folder.iterdir()})


class Agents:
    """One process for each host, with a cache of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.2", 0)) as probe:
            self.place = f"127.0.0.2:{probe.getsockname()[1]}"
        self.folder, self.processes = folder, dict[str, subprocess.Popen[bytes]]()
        members = {name: (name, address) for name, address in ADDRESSES.items()}
        make_certificates(folder / "pki", members | {"controller": ("controller", "127.0.0.2")}, days=2)

    def start(self, name: str, **env: str) -> None:
        command = [sys.executable, "-m", "llamarl", "host", self.place, "--pki", str(self.folder / "pki")]
        command += ["--name", name, "--address", ADDRESSES[name]]
        own = {"HF_HOME": str(self.home(name)), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (self.folder / f"{name}.txt").open("w") as output:
            self.processes[name] = subprocess.Popen(
                command, env=os.environ | own | env, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT
            )

    def home(self, name: str) -> Path:
        return self.folder / f"hf-{name}"

    def told(self) -> str:
        return "\n".join((self.folder / f"{name}.txt").read_text() for name in self.processes)

    def end(self) -> None:
        for process in self.processes.values():
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.1)
        for process in self.processes.values():
            process.wait(WAIT_S)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(tmp_path)
    yield found
    found.end()


def train(folder: Path, place: str, *options: object) -> Command:
    toml = write_toml(folder, Path("tiny/model"))
    return Command.start(
        folder, "train", toml, "--output", folder / "runs", "--cluster.kind", "hosts", "--cluster.listen",
        place, "--cluster.num_hosts", 2, "--cluster.pki", folder / "pki", "--steps", 3,
        "--generator.replicas", 1, *options,
    )  # fmt: skip


def weights(home: Path) -> list[Path]:
    return list(home.glob("hub/models--tiny--model/snapshots/*/model.safetensors"))


@nightly("a fetch is in test_fetch.py, and hosts are in hosts/namespaces")
def test_each_host_fetches_into_its_own_cache(hub: HubServer, commit: str, agents: Agents, tmp_path: Path) -> None:
    run = train(tmp_path, agents.place)
    for name in ADDRESSES:
        agents.start(name)
    code, said = run.wait(WAIT_S)
    assert code == 0, f"{said}\n{agents.told()}"
    assert f"hosts fetch tiny/model@{commit}, unless they have it" in run.out.read_text()
    assert [len(weights(agents.home(name))) for name in ADDRESSES] == [1, 1]
    assert not weights(Path(os.environ["HF_HOME"])), "the controller computes nothing"
    assert hub.asked("/lfs/") == 2, "once for each host, however many executors it has"


@nightly("a fetch that fails is in test_fetch.py")
def test_a_host_that_cannot_fetch_ends_the_start_and_says_why(
    hub: HubServer, commit: str, agents: Agents, tmp_path: Path
) -> None:
    run = train(tmp_path, agents.place)
    agents.start("b")
    agents.start("c", HF_HUB_OFFLINE="1")
    code, said = run.wait(WAIT_S)
    assert code == 2, said
    assert f"host c: tiny/model@{commit}: HF_HUB_OFFLINE is set, so the Hub is not asked" in said


@nightly("agents are in parts/hosts/test_agent.py")
def test_a_fetch_ends_with_the_agent(hub: HubServer, commit: str, agents: Agents, tmp_path: Path) -> None:
    hub.fail("/lfs/", bytes_per_s=200)
    run = train(tmp_path, agents.place)
    for name in ADDRESSES:
        agents.start(name)
    until(lambda: hub.asked("/lfs/") == 2)
    start_s = time.monotonic()
    agents.processes["c"].kill()
    code, said = run.wait(WAIT_S)
    assert code == 2 and "host c has not fetched tiny/model@" in said and "is lost" in said, said
    agents.end()
    assert time.monotonic() - start_s < 120.0, "nobody waits for the rest of the file"


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
