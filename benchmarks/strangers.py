"""What strangers who say nothing, or nonsense, cost a run: its ports, its executors, and who comes to them by right.

    python benchmarks/strangers.py [--seconds 60] [--connections 2000] [--files 1024] [--words HEX]

A tiny run over two hosts, which are addresses of the loopback: a trainer of two ranks, two generators, p2p, agents,
and Prometheus where its package is installed. Each process may open so many files (`ulimit -n`). At each of its TCP
ports so many connections are opened at once and held, by a process per port; meanwhile a connection that asks
properly is made to each port again and again. Reported is how long these were not answered, which ports closed, which
processes ended, what the run said, and how many steps it took before, meanwhile and after. gloo's ports answer
nobody, so they are only watched.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from _record import write_result

from llamarl.distributed.links import GREETING
from llamarl.parts.hosts.agent import descendants
from llamarl.parts.hosts.certificates import client_context, make_certificates
from tests.end_to_end.tiny import make_model, write_toml

ROOT = Path(__file__).parents[1]
ADDRESSES = {"controller": "127.0.0.2", "host-b": "127.0.0.3", "host-c": "127.0.0.4"}
WAIT_S, ANSWER_S, LOOK_S = 180.0, 20.0, 0.5
WORDS = ("is lost", "started again", "had no answer", "refused", "cut off", "Too many open files")
"""Of lines that tell of harm."""
QUESTION = b"GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"


class Port(NamedTuple):
    """Where a process listens."""

    who: str
    address: str
    number: int


class TinyRun:
    """A controller and two agents, each with all that it starts."""

    def __init__(self, folder: Path, files: int) -> None:
        self.folder, self._files = folder, files
        toml = write_toml(folder, make_model(folder / "model"))
        make_certificates(folder / "pki", {name: (name, one) for name, one in ADDRESSES.items()}, days=2)
        with socket.create_server((ADDRESSES["controller"], 0)) as probe:
            self.place = f"{ADDRESSES['controller']}:{probe.getsockname()[1]}"
        options: list[object] = [
            *("--cluster.kind", "hosts", "--cluster.listen", self.place, "--cluster.num_hosts", 2),
            *("--trainer.parallelism.fsdp", 2, "--generator.replicas", 2, "--weight_sync.transport", "p2p"),
            *("--cluster.place.trainer", "['host-b']", "--cluster.place.generator", "['host-c']"),
            *("--steps", 1_000_000, "--screen.kind", "lines", "--rollout.agent", "tests.parts.episodes.agents:run"),
        ]
        if importlib.util.find_spec("prometheus_client"):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                options += ["--metrics.sinks", "['prometheus']", "--metrics.port", probe.getsockname()[1]]
        self.processes = {"controller": self._start("controller", "train", toml, *options)}
        for name in ("host-b", "host-c"):
            words = ("host", self.place, "--name", name, "--address", ADDRESSES[name])
            self.processes[name] = self._start(name, *words)

    def _start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        limited = f"ulimit -n {self._files}; exec {shlex.join([sys.executable, '-m', 'llamarl', *map(str, words)])}"
        with (self.folder / f"{name}.txt").open("wb") as output:
            env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(["bash", "-c", limited], cwd=self.folder, env=env, stdout=output, stderr=output)

    def said(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.txt")))

    def num_steps(self) -> int:
        path = self.folder / "runs/tiny/metrics.jsonl"
        return path.read_text().count('"kind": "step"') if path.exists() else 0

    def until_steps(self, number: int) -> None:
        end_s = time.monotonic() + WAIT_S
        while self.num_steps() < number:
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if ended or time.monotonic() > end_s:
                raise RuntimeError(f"{ended} ended; {self.said()}")
            time.sleep(0.1)

    def names(self) -> dict[int, str]:
        """Of all processes, by their ids: an executor's output is a log file of its name."""
        found = dict[int, str]()
        for name, process in self.processes.items():
            found[process.pid] = name
            for pid in descendants(process.pid):
                with suppress(OSError):
                    target = Path(os.readlink(f"/proc/{pid}/fd/1"))
                    found[pid] = target.stem if target.suffix == ".log" else f"{name}'s child"
        return found

    def ports(self) -> list[Port]:
        """Of all processes, by the kernel."""
        owners = dict[str, str]()
        for pid, name in self.names().items():
            with suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        owners.setdefault(os.readlink(descriptor), name)
        rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        found = list[Port]()
        for row in rows:
            if row[3] == "0A" and (who := owners.get(f"socket:[{row[9]}]")):
                address, number = row[1].split(":")
                found.append(Port(who, socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(number, 16)))
        return sorted(found)

    def end(self) -> None:
        pids = self.names()
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(ANSWER_S)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def answered_s(port: Port, kind: str, pki: Path, limit_s: float = ANSWER_S) -> float:
    """Until the port has answered one who asks properly, or all of `limit_s`. Raises ConnectionRefusedError."""
    start_s = time.monotonic()
    while (left_s := limit_s - (time.monotonic() - start_s)) > 0:
        try:
            with socket.create_connection((port.address, port.number), left_s) as one:
                one.settimeout(left_s)
                if has_answered(one, kind, pki):
                    return time.monotonic() - start_s
        except (TimeoutError, ConnectionResetError, BrokenPipeError, ssl.SSLError):  # put out, or not its language
            time.sleep(0.01)
    return limit_s


def has_answered(one: socket.socket, kind: str, pki: Path) -> bool:
    if kind == "tls":
        context = client_context(pki, "host-b")
        context.check_hostname = False
        with context.wrap_socket(one):
            return True
    one.sendall(QUESTION if kind == "http" else GREETING)
    return one.recv(1) == (b"H" if kind == "http" else b"\0")


def kind_of(port: Port, pki: Path) -> str:
    """How it is asked: it answers a greeting with a challenge, or speaks TLS or HTTP; or it answers nobody."""
    kinds = ("challenge", "tls", "http")
    return next((kind for kind in kinds if answered_s(port, kind, pki, LOOK_S) < LOOK_S), "none")


async def attacked(
    run: TinyRun, kinds: dict[Port, str], connections: int, seconds: float, words: str
) -> dict[Port, list[float]]:
    """Seconds until each port's answers, from the first stranger on to the end of the last one."""
    hold = [sys.executable, "-S", str(Path(__file__).with_name("_strangers.py"))]
    holders = [
        subprocess.Popen([*hold, port.address, str(port.number), str(connections), str(seconds), words])
        for port in kinds
    ]
    times = {port: list[float]() for port in kinds}

    async def ask(port: Port, kind: str) -> None:
        while any(holder.poll() is None for holder in holders):
            with suppress(ConnectionRefusedError):  # closed, which is seen afterwards
                times[port].append(await asyncio.to_thread(answered_s, port, kind, run.folder / "pki"))
            await asyncio.sleep(LOOK_S)

    await asyncio.gather(*(ask(port, kind) for port, kind in kinds.items() if kind != "none"))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="What connections of strangers cost a run.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--files", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="where the result goes, if not to benchmarks/results")
    parser.add_argument("--words", default="", metavar="HEX", help="what each of them says, in hexadecimal digits")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strangers-") as name:
        run = TinyRun(Path(name), options.files)
        try:
            figures = measured(run, options.connections, options.seconds, options.words)
        finally:
            run.end()
    print(json.dumps(figures, indent=2))
    settings = {name: getattr(options, name) for name in ("seconds", "connections", "files", "words")}
    notes = ["seconds until a proper question had its first answer; ports that answer nobody are gloo's"]
    where = {"folder": options.folder} if options.folder else {}
    print(write_result("strangers", settings, figures, notes, **where))


def measured(run: TinyRun, connections: int, seconds: float, words: str = "") -> dict[str, Any]:
    run.until_steps(5)
    pki, ports, names, start_s = run.folder / "pki", run.ports(), run.names(), time.monotonic()
    first = run.num_steps()
    kinds = {port: kind_of(port, pki) for port in ports}
    quiet = {port: answered_s(port, kind, pki) if kind != "none" else None for port, kind in kinds.items()}
    before, before_s, said = run.num_steps() - first, time.monotonic() - start_s, run.said()
    begin_s, first = time.monotonic(), run.num_steps()
    times = asyncio.run(attacked(run, kinds, connections, seconds, words))
    during_s, during, first = time.monotonic() - begin_s, run.num_steps() - first, run.num_steps()
    time.sleep(after_s := max(5.0, seconds / 4))
    left, after = run.ports(), run.num_steps() - first
    new = [line for line in run.said().splitlines() if line not in said and any(word in line for word in WORDS)]
    answers = [
        port._asdict()
        | {"kind": kind, "quiet_s": quiet[port], "asked": len(times[port]), "longest_s": max(times[port], default=None)}
        for port, kind in kinds.items()
    ]
    return {
        "ports": answers,
        "longest_s": max(max(times[port], default=ANSWER_S) for port, kind in kinds.items() if kind != "none"),
        "ports_closed": [port._asdict() for port in ports if port not in left],
        "processes_ended": [name for pid, name in names.items() if not Path(f"/proc/{pid}").exists()],
        "said": new[:20],
        "steps_per_s": {"before": before / before_s, "during": during / during_s, "after": after / after_s},
    }


if __name__ == "__main__":
    main()
