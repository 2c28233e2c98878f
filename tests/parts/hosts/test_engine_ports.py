"""Strangers at the port of Monarch's own on a host: it keeps its descriptors, and who has a certificate is answered."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from llamarl.parts.hosts.certificates import CONTROLLER, client_context, make_certificates
from tests.end_to_end.tiny import ROOT
from tests.nightly import some

ADDRESS, WAIT_S = "127.0.0.3", 240.0
NUM_FILES, NUM_STRANGERS = 512, 1_000
SERVE = f"from llamarl.cluster.monarch import serve_host; serve_host({ADDRESS!r})"


class Port:
    """Monarch's, in a process that may open few files."""

    def __init__(self, pki: Path) -> None:
        names = {"CA": "ca.crt", "CERT": "b.crt", "KEY": "b.key"}
        env = os.environ | {f"HYPERACTOR_TLS_{kind}": str(pki / name) for kind, name in names.items()}
        env["TMPDIR"] = str(pki.parent)  # what a killed process leaves goes with the test
        command = ["bash", "-c", f'ulimit -n {NUM_FILES}; exec "$@"', "limited", sys.executable, "-c", SERVE]
        self.process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        found = re.search(rf"{ADDRESS}:(\d+)", json.loads(self.process.stdout.readline())["url"])
        assert found is not None
        self._place, self._context = (ADDRESS, int(found[1])), client_context(pki, CONTROLLER)
        self._context.check_hostname = False
        while True:  # it says where before it listens
            with suppress(ConnectionRefusedError):
                self.knock().close()
                break

    def knock(self) -> socket.socket:
        return socket.create_connection(self._place, WAIT_S)

    def answered(self) -> ssl.SSLSocket:
        return self._context.wrap_socket(self.knock())

    def hello(self) -> bytes:
        """What a client of TLS says first, for which it needs no certificate."""
        out = ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            self._context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
        return out.read()

    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    folder = tmp_path_factory.mktemp("port") / "pki"
    make_certificates(folder, {CONTROLLER: (CONTROLLER, "127.0.0.2"), "b": ("b", ADDRESS)}, days=2)
    made = Port(folder)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("words", some(["nothing", "a byte", "nonsense", "hello"], 2))
def test_strangers_cost_few_descriptors_and_keep_nobody_away(port: Port, words: str) -> None:
    said = {"nothing": b"", "a byte": b"\x16", "nonsense": b"GET / HTTP/1.1\r\n\r\n", "hello": port.hello()}[words]
    with ExitStack() as stack:
        known = stack.enter_context(port.answered())
        for number in range(NUM_STRANGERS):
            one = stack.enter_context(port.knock())
            with suppress(OSError):  # hung up on
                one.sendall(said)
            if number % 100 == 99:
                assert port.num_files() < NUM_FILES - 100
                port.answered().close()
        known.settimeout(0.1)
        with pytest.raises(TimeoutError):  # neither closed nor told anything
            known.recv(1)
    assert port.process.poll() is None
