"""One GB of float32 weights from 2 trainer processes (FSDP shards) to 2 generator processes (tensor parallel).

    python benchmarks/weight_sync.py [--rounds 7] [--demo runs/demo/summary.json]

Every round runs every way once, so all see the same machine: each transport with and without fingerprints, the baseline
(per tensor, gather to one trainer rank, broadcast to the generators, over gloo), and plain memcpy into shared memory.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: one thread per process

import argparse
import ctypes
import json
import mmap
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import torch.distributed as dist
from _record import write_result
from torch import Tensor

from llamarl.kernels import build, copy
from llamarl.sharding.box import Box
from llamarl.sharding.tensor_parallel import tensor_parallel_box
from llamarl.weight_sync.base import Subscriber, WriterPlan, plan_writers
from llamarl.weight_sync.layout import Address, TensorSpec, lay_out
from llamarl.weight_sync.select import open_subscriber, publisher_class

HIDDEN, INNER, KV, VOCABULARY, LAYERS = 2048, 5632, 512, 33000, 4
NUM_TRAINERS = NUM_GENERATORS = 2
TRANSPORTS = ("shared_memory", "p2p", "file")
DEADLINE_S = 120
BARE = "bare.so"
TAKEN_KERNEL, TAKEN_PROVE = copy.kernel, Subscriber.prove


def shapes() -> dict[str, tuple[int, ...]]:
    layer = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (KV, HIDDEN),
        "self_attn.v_proj.weight": (KV, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    layers = {f"layers.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    return {"embed_tokens.weight": (VOCABULARY, HIDDEN), **layers, "norm.weight": (HIDDEN,)}


def held(rank: int) -> list[TensorSpec]:
    """Rows, as FSDP2 cuts."""

    def rows(shape: tuple[int, ...]) -> Box:
        size = shape[0] // NUM_TRAINERS
        return Box.whole(shape).cut(0, rank * size, (rank + 1) * size)

    return [
        TensorSpec(name=name, global_shape=shape, box=rows(shape), dtype="float32") for name, shape in shapes().items()
    ]


def wanted(rank: int) -> list[TensorSpec]:
    """Cut by tensor parallelism."""
    return [
        TensorSpec(
            name=name,
            global_shape=shape,
            box=tensor_parallel_box(name, shape, NUM_GENERATORS, rank, num_kv_heads=NUM_GENERATORS),
            dtype="float32",
        )
        for name, shape in shapes().items()
    ]


def without_fingerprints(bare: build.Kernel | None) -> None:
    """Copies alone, for comparison: the same kernel without its sum, and generators check nothing. None: as always."""
    copy.kernel = (lambda: bare) if bare else TAKEN_KERNEL
    Subscriber.prove = (lambda *_: None) if bare else TAKEN_PROVE


def compile_bare_kernel(folder: str) -> None:
    """The copy kernel without the lines that multiply and add."""
    source = Path(build.__file__).with_name("copy.cpp").read_text(encoding="utf-8")
    sums = [line for line in source.splitlines(keepends=True) if "V::multiply(" in line or "const Vector k =" in line]
    assert len(sums) == 3, "copy.cpp has changed; mend this function"
    for line in sums:
        source = source.replace(line, "")
    text, made = Path(folder) / "bare.cpp", Path(folder) / BARE
    text.write_text(source, encoding="utf-8")
    subprocess.run(["g++", *build.FLAGS, "-shared", str(text), "-o", str(made)], check=True, timeout=120)


def load_bare_kernel(folder: str) -> build.Kernel:
    """As `copy.kernel`, which checks the sums that this one does not compute."""
    library = ctypes.CDLL(f"{folder}/{BARE}")
    taken = TAKEN_KERNEL().library
    assert taken is not None, "this benchmark needs a C++ compiler"
    library.copy_rows.restype, library.copy_rows.argtypes = taken.copy_rows.restype, taken.copy_rows.argtypes
    library.use_way(taken.way_in_use())
    return build.Kernel(library=library, reason="")


def trainer(connection: Connection, rank: int, plan: WriterPlan, rendezvous: str, folder: str) -> None:
    def exchange(value: Any) -> list[Any]:
        connection.send(value)
        return connection.recv()

    torch.set_num_threads(1)
    weights = {spec.name: torch.randn(spec.box.shape) for spec in held(rank)}
    publishers = {
        name: publisher_class(name)(plan, exchange, **({"folder": Path(folder) / "weights"} if name == "file" else {}))
        for name in TRANSPORTS
    }
    connection.send("ready")
    baseline = Baseline(rendezvous, rank)
    kernel = load_bare_kernel(folder)
    target = shared_target(plan.layouts[0].num_bytes)
    source = np.random.default_rng(rank).integers(0, 255, plan.layouts[0].num_bytes, np.uint8)
    while True:
        way, version, bare = connection.recv()
        if way == "memcpy":
            ctypes.memmove(target.ctypes.data, source.ctypes.data, len(source))
            connection.send(None)
        elif way == "baseline":
            baseline.send(weights)
            connection.send(None)
        elif way == "end":
            for publisher in publishers.values():
                publisher.close()
            return
        else:
            without_fingerprints(kernel if bare else None)
            for weight in weights.values():
                weight.view(-1)[0] = version
            connection.send(publishers[way].publish(version, weights, [version - 1]))


def shared_target(num_bytes: int) -> np.ndarray:
    """Memory that another process could map."""
    fd = os.memfd_create("benchmark")
    os.ftruncate(fd, num_bytes)
    memory = np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
    os.close(fd)
    memory[:] = 1
    return memory


def generator(connection: Connection, rank: int, rendezvous: str, folder: str) -> None:
    torch.set_num_threads(1)
    kernel = load_bare_kernel(folder)
    baseline = Baseline(rendezvous, NUM_TRAINERS + rank)
    subscribers = dict[str, Subscriber]()
    served = dict[str, Tensor]()
    connection.send(None)
    while True:
        way, version, address, bare = connection.recv()
        if way == "end":
            return
        if way == "baseline":
            baseline.receive(rank)
        else:
            if way not in subscribers:
                subscribers[way] = open_subscriber(address, wanted(rank), rank)
            without_fingerprints(kernel if bare else None)
            served = subscribers[way].fetch(version, address)
            assert all(tensor.view(-1)[0] == version for tensor in served.values() if rank == 0)
        connection.send(None)


class Baseline:
    """Gather each parameter on trainer rank 0 and broadcast it to all generators, who keep their part."""

    def __init__(self, rendezvous: str, rank: int) -> None:
        world = NUM_TRAINERS + NUM_GENERATORS
        dist.init_process_group(
            "gloo", f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=DEADLINE_S)
        )
        self._rank = rank
        self._trainers = dist.new_group(list(range(NUM_TRAINERS)))
        self._receivers = dist.new_group([0, *range(NUM_TRAINERS, world)])
        self._own = (
            {spec.name: torch.empty(spec.shape) for spec in wanted(rank - NUM_TRAINERS)} if rank >= NUM_TRAINERS else {}
        )

    def send(self, weights: dict[str, Tensor]) -> None:
        for weight in weights.values():
            shards = [torch.empty_like(weight) for _ in range(NUM_TRAINERS)] if self._rank == 0 else None
            dist.gather(weight, shards, dst=0, group=self._trainers)
            if shards is not None:
                dist.broadcast(torch.cat(shards), src=0, group=self._receivers)

    def receive(self, rank: int) -> None:
        for spec in wanted(rank):
            whole = torch.empty(spec.global_shape)
            dist.broadcast(whole, src=0, group=self._receivers)
            self._own[spec.name].copy_(whole[spec.box.within(Box.whole(spec.global_shape))])


class Machine:
    """The processes, and one way after the other through them."""

    def __init__(self, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._started = list[Any]()
        plans = plan_writers([lay_out(wanted(rank)) for rank in range(2)], [held(rank) for rank in range(2)])
        rendezvous = f"{folder}/rendezvous"
        compile_bare_kernel(folder)

        def start(function: Callable[..., None], *args: Any) -> Connection:
            ours, theirs = context.Pipe()
            process = context.Process(target=function, args=(theirs, *args), daemon=True)
            process.start()
            self._started.append(process)
            return ours

        self.trainers = [start(trainer, rank, plan, rendezvous, folder) for rank, plan in enumerate(plans)]
        self.generators = [start(generator, rank, rendezvous, folder) for rank in range(NUM_GENERATORS)]
        while (values := self._answers(self.trainers)) != ["ready"] * NUM_TRAINERS:  # publishers exchange addresses
            for connection in self.trainers:
                connection.send(values)
        self._answers(self.generators)
        self._version = 0

    def _answers(self, connections: list[Connection]) -> list[Any]:
        for connection in connections:
            assert connection.poll(DEADLINE_S), "a process does not answer"
        return [connection.recv() for connection in connections]

    def memcpy(self, num_processes: int) -> float:
        """Seconds in which each of these trainers copies half of the weights."""
        start_s = time.perf_counter()
        for connection in self.trainers[:num_processes]:
            connection.send(("memcpy", 0, False))
        self._answers(self.trainers[:num_processes])
        return time.perf_counter() - start_s

    def baseline(self) -> float:
        start_s = time.perf_counter()
        for connection in self.trainers:
            connection.send(("baseline", 0, False))
        for connection in self.generators:
            connection.send(("baseline", 0, None, False))
        self._answers([*self.trainers, *self.generators])
        return time.perf_counter() - start_s

    def sync(self, way: str, bare: bool = False) -> tuple[float, float]:
        """Seconds of publishing, and of publishing and fetching one after the other."""
        self._version += 1
        start_s = time.perf_counter()
        for connection in self.trainers:
            connection.send((way, self._version, bare))
        self.address: Address = self._answers(self.trainers)[0]
        published_s = time.perf_counter() - start_s
        for connection in self.generators:
            connection.send((way, self._version, self.address, bare))
        self._answers(self.generators)
        return published_s, time.perf_counter() - start_s

    def overlapped(self, way: str) -> float:
        """Seconds of a sync in which generators begin to fetch when trainers begin to publish."""
        self._version += 1
        start_s = time.perf_counter()
        for connection in self.trainers:
            connection.send((way, self._version, False))
        for connection in self.generators:
            connection.send((way, self._version, self.address, False))
        self._answers([*self.trainers, *self.generators])
        return time.perf_counter() - start_s

    def end(self) -> None:
        for connection in self.trainers:
            connection.send(("end", 0, False))
        for connection in self.generators:
            connection.send(("end", 0, None, False))
        for process in self._started:
            process.join(DEADLINE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--demo", type=Path, help="summary.json of a run of configs/demo.toml, for its stall")
    options = parser.parse_args()
    rows = list[dict[str, float]]()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        machine = Machine(folder)
        for number in range(options.rounds + 2):  # the first two map memory
            row = {"memcpy_1_s": machine.memcpy(1), "memcpy_2_s": machine.memcpy(2), "baseline_s": machine.baseline()}
            for way in TRANSPORTS:
                row[f"{way}_publish_s"], row[f"{way}_s"] = machine.sync(way)
                row[f"{way}_bare_publish_s"], row[f"{way}_bare_s"] = machine.sync(way, bare=True)
                if way == "shared_memory":
                    row["shared_memory_overlapped_s"] = machine.overlapped(way)
            print(f"round {number}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
            rows.append(row)
        machine.end()
    figures = evaluate(rows[2:])
    if options.demo:
        figures["stall_p99_s"] = json.loads(options.demo.read_text(encoding="utf-8"))["extra.stall_p99_s"]
    settings = {
        "weights_bytes": sum(4 * int(np.prod(shape)) for shape in shapes().values()),
        "trainer": "2 processes, rows (FSDP)",
        "generator": "2 processes, tensor parallel",
        "rounds": options.rounds,
        "threads_per_process": 1,
    }
    path = write_result("weight_sync", settings, figures, NOTES)
    print(json.dumps({key: value for key, value in figures.items() if key != "rounds"}, indent=2))
    print(path)


def evaluate(rows: list[dict[str, float]]) -> dict[str, Any]:
    def median(of: Callable[[dict[str, float]], float]) -> float:
        return round(statistics.median(map(of, rows)), 4)

    def fingerprints(way: str) -> dict[str, float]:
        return {
            "writers": median(lambda row: row[f"{way}_publish_s"] / row[f"{way}_bare_publish_s"] - 1),
            "readers": median(
                lambda row: (
                    (row[f"{way}_s"] - row[f"{way}_publish_s"] - row[f"{way}_bare_s"] + row[f"{way}_bare_publish_s"])
                    / row[f"{way}_bare_s"]
                )
            ),
            "both": median(lambda row: row[f"{way}_s"] / row[f"{way}_bare_s"] - 1),
        }

    return {
        "median_s": {name: median(lambda row, name=name: row[name]) for name in rows[0]},
        "share_of_memcpy": median(lambda row: row["memcpy_2_s"] / row["shared_memory_publish_s"]),
        "share_of_memcpy_when_proved": median(lambda row: row["memcpy_2_s"] / row["shared_memory_s"]),
        "share_of_memcpy_when_proved_overlapped": median(
            lambda row: row["memcpy_2_s"] / row["shared_memory_overlapped_s"]
        ),
        "ratio_vs_gather_broadcast": median(lambda row: row["baseline_s"] / row["shared_memory_s"]),
        "p2p_ratio_vs_gather_broadcast": median(lambda row: row["baseline_s"] / row["p2p_s"]),
        "ratio_vs_file": median(lambda row: row["file_s"] / row["shared_memory_s"]),
        "fingerprint_share": {way: fingerprints(way) for way in TRANSPORTS},
        "rounds": rows,
    }


NOTES = [
    "Medians of ratios within rounds. A sync ends when every generator rank has proved every tensor of the version.",
    "share_of_memcpy counts publishing: the weights then lie in the generators' layout, fingerprinted by the writers.",
    "The generators' proof reads all weights once more, in a background thread; decoding is not stopped by it.",
    "Overlapped: generators prove tensors while trainers still write later ones; on two cores both wait for cores.",
    "Without fingerprints (bare): the same kernel compiled without its sum, and generators check nothing.",
]

if __name__ == "__main__":
    main()
