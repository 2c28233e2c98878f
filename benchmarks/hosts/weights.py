"""Weights from a trainer on one host to generators on others: how much of the wire, and what relays save.

    python benchmarks/hosts/weights.py [--mib 1024] [--rounds 5] [--mbit 1000]

Hosts are network namespaces on this machine (`namespaces.py`), as root or in a user namespace; what the machine lacks
is named in the result. First FSDP 2 on one host to the two ranks of a TP 2 replica on two others, without a limit,
beside the wire: as many streams of plain TCP between the same namespaces (`iperf3` where it is installed, and always
the same processes, which send as many bytes from memory to memory). Then one and four replicas on hosts of their own
with `--mbit` each way per host.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: one thread per process

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import isqrt
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from _record import write_result
from namespaces import Forbidden, Namespaces, available

from llamarl.sharding.box import Box
from llamarl.sharding.tensor_parallel import tensor_parallel_box
from llamarl.weight_sync.base import Subscriber, plan_writers
from llamarl.weight_sync.layout import Address, TensorSpec, lay_out
from llamarl.weight_sync.relays import Chains
from llamarl.weight_sync.transports.p2p import P2pPublisher, P2pSubscriber

LAYERS, SHARDS = 8, 2
DEADLINE_S = 300.0
TAKEN = {"prove": Subscriber.prove, "relay_for": Chains.relay_for}


def shapes(mib: int) -> dict[str, tuple[int, int]]:
    """Decoder layers of so many MiB in float32."""
    hidden = max(64, isqrt((mib << 20) // (32 * LAYERS)) // 64 * 64)
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (2 * hidden, hidden),
        "mlp.up_proj": (2 * hidden, hidden),
        "mlp.down_proj": (hidden, 2 * hidden),
    }
    return {f"layers.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in layer.items()}


def specs(mib: int, cut: Callable[[str, tuple[int, int]], Box]) -> list[TensorSpec]:
    return [
        TensorSpec(name=name, global_shape=shape, box=cut(name, shape), dtype="float32")
        for name, shape in shapes(mib).items()
    ]


def held(mib: int, rank: int) -> list[TensorSpec]:
    """Rows, as FSDP2 cuts."""
    return specs(
        mib, lambda _, shape: Box.whole(shape).cut(0, rank * shape[0] // SHARDS, (rank + 1) * shape[0] // SHARDS)
    )


def wanted(mib: int, tp: int, rank: int) -> list[TensorSpec]:
    return specs(mib, lambda name, shape: tensor_parallel_box(name, shape, tp, rank, num_kv_heads=tp))


# What runs on the hosts


def work(path: str, role: str, rank: int, mib: int, tp: int, address: str) -> None:
    """A trainer rank or a generator rank, which does as it is told."""
    torch.set_num_threads(1)
    connection = Client(path, "AF_UNIX")
    connection.send((role, rank, address))
    if role == "trainer":
        train(connection, rank, mib, tp)
    else:
        generate(connection, wanted(mib, tp, rank), rank, address)


def train(connection: Connection, rank: int, mib: int, tp: int) -> None:
    def exchange(value: Any) -> list[Any]:
        connection.send(value)
        return connection.recv()

    mine = held(mib, rank)
    weights = {spec.name: torch.randn(spec.box.shape) for spec in mine}
    layouts = [lay_out(wanted(mib, tp, one)) for one in range(tp)]
    plan = plan_writers(layouts, exchange(mine))[rank]
    publisher = P2pPublisher(plan, exchange)
    source = torch.empty(max(layout.num_bytes for layout in layouts), dtype=torch.uint8)
    while (order := connection.recv()) is not None:
        if order[0] == "publish":
            _, version, relays = order
            Chains.relay_for = TAKEN["relay_for"] if relays else lambda *_: ""
            for weight in weights.values():
                weight.view(-1)[0] = version
            connection.send(publisher.publish(version, weights, [version - 1]))
        else:
            _, places, num_bytes = order
            with ThreadPoolExecutor(len(places)) as pool:
                list(pool.map(partial(blast, memory=source[:num_bytes].numpy().data), places))
            connection.send(None)
    publisher.close()


def blast(place: tuple[str, int], memory: memoryview) -> None:
    with socket.create_connection(place, DEADLINE_S) as one:
        one.settimeout(None)
        one.sendall(memory)
        one.recv(1)  # all has arrived


def swallow(listener: socket.socket, memory: memoryview) -> None:
    with listener.accept()[0] as one:
        at = 0
        while at < len(memory):
            at += one.recv_into(memory[at:], 0, socket.MSG_WAITALL)
        one.sendall(b".")


def generate(connection: Connection, own: list[TensorSpec], rank: int, address: str) -> None:
    subscriber, served = P2pSubscriber(own, rank), dict[str, torch.Tensor]()
    while (order := connection.recv()) is not None:
        if order[0] == "fetch":
            _, version, published, proves = order
            Subscriber.prove = TAKEN["prove"] if proves else lambda *_: None
            served = subscriber.fetch(version, published)
            connection.send(float(served[own[0].key].view(-1)[0]) == version or rank > 0)
        else:
            _, num_streams, num_bytes = order
            memories = [torch.empty(num_bytes, dtype=torch.uint8).numpy() for _ in range(num_streams)]
            for memory in memories:
                memory[:] = 1  # mapped, as what weights are received into is
            with ThreadPoolExecutor(num_streams) as pool, socket.create_server((address, 0)) as listener:
                jobs = [pool.submit(swallow, listener, memory.data) for memory in memories]
                connection.send(listener.getsockname())
                for job in jobs:
                    job.result()
            connection.send(None)
    subscriber.close()


# What tells them


class Fleet:
    """Processes on hosts: the trainer's ranks on the first, those of the replicas in turn on the others."""

    def __init__(self, hosts: Namespaces, mib: int, tp: int, num_replicas: int) -> None:
        self.hosts, self.mib, self.tp = hosts, mib, tp
        path = str(hosts.folder / f"control-{tp}-{num_replicas}")
        self._processes = list[Any]()
        trainer_host, *others = hosts.names
        places = [others[n % len(others)] for n in range(tp * num_replicas)]
        with Listener(path, "AF_UNIX") as listener:
            for rank in range(SHARDS):
                self._start(path, "trainer", rank, trainer_host)
            for number, host in enumerate(places):
                self._start(path, "generator", number % tp, host)
            came = [(connection := listener.accept(), connection.recv()) for _ in self._processes]
        self.trainers = [one for one, _ in sorted((c for c in came if c[1][0] == "trainer"), key=lambda c: c[1][1])]
        self.generators = [
            (one, said[2]) for one, said in sorted((c for c in came if c[1][0] != "trainer"), key=lambda c: c[1][2])
        ]
        for _ in range(3):  # what they hold, then what publishers exchange
            values = answers(self.trainers)
            tell(self.trainers, values)
        self._version = 0

    def _start(self, path: str, role: str, rank: int, host: str) -> None:
        address = self.hosts.addresses[host]
        argv = ["--work", path, role, str(rank), str(self.mib), str(self.tp), address]
        command = [sys.executable, __file__, *argv]
        self._processes.append(self.hosts.popen(host, command, env={"LLAMARL_ADDRESS": address}))

    def sync(self, num: int, *, proves: bool = True, relays: bool = True) -> float:
        """Seconds in which the first `num` generator ranks fetch a new version."""
        self._version += 1
        tell(self.trainers, ("publish", self._version, relays))
        address: Address = answers(self.trainers)[0]
        chosen = [one for one, _ in self.generators[:num]]
        start_s = time.perf_counter()
        tell(chosen, ("fetch", self._version, address, proves))
        assert all(answers(chosen))
        return time.perf_counter() - start_s

    def wire(self) -> float:
        """Seconds in which as many bytes go the same ways, from memory to memory."""
        generators = [one for one, _ in self.generators]
        num_bytes = sum(spec.num_bytes for spec in wanted(self.mib, self.tp, 0)) // SHARDS
        tell(generators, ("swallow", SHARDS, num_bytes))
        places = answers(generators)
        start_s = time.perf_counter()
        tell(self.trainers, ("blast", places, num_bytes))
        answers(self.trainers)
        seconds = time.perf_counter() - start_s
        answers(generators)
        return seconds

    def iperf(self) -> float | None:
        """Bytes per second of `iperf3` with as many streams the same ways; None: it is not installed."""
        if shutil.which("iperf3") is None:
            return None
        used = {address for _, address in self.generators}
        names = [name for name, address in self.hosts.addresses.items() if address in used]
        quiet = {"stdout": subprocess.DEVNULL}
        servers = [self.hosts.popen(name, ["iperf3", "-s", "-1"], **quiet) for name in names]
        time.sleep(0.5)
        clients = [
            self.hosts.popen(
                self.hosts.names[0],
                ["iperf3", "-J", "-t", "3", "-P", str(SHARDS), "-c", self.hosts.addresses[name]],
                stdout=subprocess.PIPE,
            )
            for name in names
        ]
        said = [json.loads(client.communicate(timeout=60)[0]) for client in clients]
        for server in servers:
            server.wait(20)
        return sum(one["end"]["sum_received"]["bits_per_second"] for one in said) / 8

    def end(self) -> None:
        tell([*self.trainers, *(one for one, _ in self.generators)], None)
        for process in self._processes:
            process.wait(DEADLINE_S)


def tell(connections: Sequence[Connection], order: Any) -> None:
    for connection in connections:
        connection.send(order)


def answers(connections: Sequence[Connection]) -> list[Any]:
    for connection in connections:
        assert connection.poll(DEADLINE_S), "a process does not answer"
    return [connection.recv() for connection in connections]


def shares(options: argparse.Namespace) -> dict[str, Any]:
    """A replica of two ranks on two hosts, and the wire."""
    num_bytes, rows = sum(spec.num_bytes for spec in wanted(options.mib, 1, 0)), list[dict[str, float]]()
    with Namespaces(3) as hosts:
        fleet = Fleet(hosts, options.mib, tp=2, num_replicas=1)
        for number in range(options.rounds + 2):  # the first two map memory
            row = {"tcp_s": fleet.wire()}
            for name in ("bare_s", "proved_s")[:: 1 if number % 2 else -1]:  # who is first comes behind other work
                row[name] = fleet.sync(2, proves=name == "proved_s")
            if rate := fleet.iperf():
                row["iperf3_s"] = num_bytes / rate
            print(f"round {number}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
            rows.append(row)
        fleet.end()
    yardstick = "iperf3" if "iperf3_s" in rows[0] else "tcp"

    def median(of: Callable[[dict[str, float]], float]) -> float:
        return round(statistics.median(map(of, rows[2:])), 4)

    return {
        "yardstick": {"iperf3": "iperf3", "tcp": "plain TCP from memory to memory; iperf3 is not installed"}[yardstick],
        "wire_bytes_per_s": median(lambda row: num_bytes / row[f"{yardstick}_s"]),
        "share_of_wire": median(lambda row: row[f"{yardstick}_s"] / row["bare_s"]),
        "share_of_wire_proved": median(lambda row: row[f"{yardstick}_s"] / row["proved_s"]),
        "share_of_tcp": median(lambda row: row["tcp_s"] / row["bare_s"]),
        "share_of_tcp_proved": median(lambda row: row["tcp_s"] / row["proved_s"]),
        "median_s": {name: median(lambda row, name=name: row[name]) for name in rows[0]},
        "rounds_s": rows[2:],
    }


def relayed(options: argparse.Namespace) -> dict[str, Any]:
    """Replicas on hosts of their own, all cables limited."""
    num, rows = options.replicas, list[dict[str, float]]()
    with Namespaces(num + 1) as hosts:
        for name in hosts.names:
            hosts.limit(name, mbit=options.mbit)
        fleet = Fleet(hosts, options.mib, tp=1, num_replicas=num)
        fleet.sync(num)  # maps memory
        for number in range(options.relay_rounds):
            row = {"one_s": fleet.sync(1), "relayed_s": fleet.sync(num)}
            if number == 0:
                row["direct_s"] = fleet.sync(num, relays=False)
            print(f"round {number}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
            rows.append(row)
        fleet.end()
    return {
        "relay_ratio": round(statistics.median(row["relayed_s"] / row["one_s"] for row in rows), 4),
        "direct_ratio": round(rows[0]["direct_s"] / rows[0]["one_s"], 4),
        "relay_rounds_s": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="of weights, in float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--relay-rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--mbit", type=int, default=1000, help="of each host in the second part")
    parser.add_argument("--only", choices=["shares", "relayed"], default="", help="one of the two parts")
    parser.add_argument("--folder", type=Path, help="of the result; default: benchmarks/results")
    options = parser.parse_args()
    figures, notes = dict[str, Any](), list[str]()
    if missing := available():
        raise SystemExit(f"hosts cannot be had here: {missing}")
    for part in (shares, relayed):
        if options.only not in ("", part.__name__):
            continue
        try:
            figures |= part(options)
        except Forbidden as error:
            notes.append(f"{part.__name__} is left out: {error}")
    settings = {
        "weights_bytes": sum(spec.num_bytes for spec in wanted(options.mib, 1, 0)),
        "trainer": f"FSDP {SHARDS} on one host",
        "shares": "one replica, TP 2, its ranks on two hosts",
        "relays": f"{options.replicas} replicas, TP 1, on hosts of their own, {options.mbit} Mbit/s each way per host",
    }
    kept = {"folder": options.folder} if options.folder else {}
    path = write_result("hosts_weights", settings, figures, [*NOTES, *notes], **kept)
    print(json.dumps({key: value for key, value in figures.items() if "rounds" not in key}, indent=2))
    print(path)


NOTES = [
    "All hosts share the cores of one machine, so sending, receiving and proving take turns on them.",
    "Times are from the order to fetch to the last answer; publishing is not in them. `bare` proves nothing.",
    "relay_ratio: all replicas with relays over one replica alone; direct_ratio: all of them without relays.",
]

if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        path, role, rank, mib, tp, address = sys.argv[2:]
        work(path, role, int(rank), int(mib), int(tp), address)
    else:
        main()
