"""Weights from a trainer process to a generator process that decodes, by each transport, on one device.

    python benchmarks/gpu/sync.py [--device cuda] [--model 8b] [--transports nixl shared_memory p2p]

The trainer holds bfloat16 weights. Fetched is what `Adopter` fetches in a generator: brought, proved, and put to use
between two steps. Times of steps while nothing is fetched, and while something is, say what that costs decoding.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import MODELS, RandomWeights, copy_bytes_per_s, say

from llamarl.executors.adoption import Adopter
from llamarl.executors.replies import Adoption
from llamarl.generation.engine import Engine
from llamarl.generation.model import GeneratorModel
from llamarl.types import GenerationRequest, SamplingParams
from llamarl.weight_sync.base import plan_writers
from llamarl.weight_sync.layout import TensorSpec, lay_out
from llamarl.weight_sync.select import publisher_class

DEADLINE_S, VERSIONS, BATCH = 120.0, 6, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--transports", nargs="+", default=["nixl", "shared_memory", "p2p"])
    options = parser.parse_args()
    bandwidth = copy_bytes_per_s(options.device)
    for transport in options.transports:
        about = {"transport": transport, "model": options.model, "copy_bytes_per_s": bandwidth}
        say(about, lambda transport=transport: measured(transport, options.model, options.device))


def measured(transport: str, model: str, device: str) -> dict[str, Any]:
    """Medians over some versions."""
    context, processes, ends = multiprocessing.get_context("spawn"), [], []
    with tempfile.TemporaryDirectory() as folder:
        for function in (trainer, generator):
            ours, theirs = context.Pipe()
            process = context.Process(target=function, args=(theirs, transport, model, device, folder), daemon=True)
            process.start()
            theirs.close()  # else its end would not be noticed
            processes.append(process)
            ends.append(ours)
        try:
            return _rounds(*ends)
        finally:
            for process in processes:
                process.kill()
                process.join(10)


def _rounds(train: Connection, generate: Connection) -> dict[str, Any]:
    def heard(connection: Connection) -> Any:
        if not connection.poll(DEADLINE_S):
            raise TimeoutError(f"no answer in {DEADLINE_S:g} s")
        if isinstance(answer := connection.recv(), str):
            raise RuntimeError(answer)
        return answer

    train.send(specs := heard(generate))
    rows = []
    for version in range(1, VERSIONS + 1):
        train.send((version, [version - 1]))
        publish_s, address = heard(train)
        generate.send((version, address))
        rows.append(heard(generate) | {"publish_s": publish_s})
    num_bytes = sum(spec.num_bytes for spec in specs)
    keys = ("publish_s", "fetch_s", "stall_s", "quiet_step_s", "slowest_step_s")
    medians = {key: statistics.median(row[key] for row in rows[1:]) for key in keys}  # the first one sets up
    served_s = medians["publish_s"] + medians["fetch_s"] + medians["stall_s"]
    return {"num_bytes": num_bytes, **medians, "served_s": served_s, "bytes_per_s": num_bytes / medians["fetch_s"]}


def trainer(connection: Connection, transport: str, model: str, device: str, folder: str) -> None:
    layout, shape = lay_out(connection.recv()), MODELS[model]
    weights = dict(RandomWeights(shape, device).items())
    held = [TensorSpec.whole(name, weight.shape, "bfloat16") for name, weight in weights.items()]
    (plan,) = plan_writers([layout], [held])
    end = publisher_class(transport)
    publisher = end(plan, lambda value: [value], Path(folder) / "weights", device=torch.device(device))
    while True:
        version, in_use = connection.recv()
        next(iter(weights.values())).view(-1)[0] = version
        start_s = time.perf_counter()
        address = publisher.publish(version, weights, in_use)
        connection.send((time.perf_counter() - start_s, address))


def generator(connection: Connection, transport: str, name: str, device: str, folder: str) -> None:
    shape = MODELS[name]
    model = GeneratorModel(shape, "bfloat16", device)
    model.load(RandomWeights(shape, device))
    room = model.room if device.startswith("cuda") else None
    adopter = Adopter(model.specs(), model.use, hold=model.hold, room=room)
    engine = Engine(model, max_running=BATCH, prefill_tokens=8192, kv_bytes=None)
    rng = np.random.default_rng(0)

    def begin(version: int) -> None:
        """Rollouts with a whole context before them, so that they outlast slow transports."""
        first = version * BATCH
        engine.abort(range(first - BATCH, first))
        engine.submit(
            GenerationRequest(
                group_id=i, prompt_token_ids_T=rng.integers(1, shape.vocab_size, 64, np.int32), group_size=1,
                sampling=SamplingParams(max_new_tokens=shape.max_position_embeddings - 64, seed=i),
            )
            for i in range(first, first + BATCH)
        )  # fmt: skip
        while engine.stats().running < BATCH:
            engine.step()

    def steps(until: Any) -> list[float]:
        times, last_s = list[float](), time.perf_counter()
        while not until(times):
            engine.step()
            now_s = time.perf_counter()
            times.append(now_s - last_s)
            last_s = now_s
        return times

    connection.send(model.specs())
    while True:
        version, address = connection.recv()
        begin(version)
        quiet = steps(lambda times: len(times) >= 8)
        adopter.begin(version, address)
        poll = _Poll(adopter)
        during = steps(lambda _, poll=poll: not engine.has_work or poll())
        adoption = poll.found or adopter.poll(DEADLINE_S)
        if adoption is None or adoption.outcome != "adopted":
            connection.send(f"{adoption.outcome}: {adoption.reason}" if adoption else "nothing came")
            return
        start_s = time.perf_counter()
        adopter.use(version)
        engine.set_version(version)
        connection.send(
            {
                "fetch_s": adoption.fetch_s,
                "stall_s": time.perf_counter() - start_s,
                "quiet_step_s": statistics.median(quiet),
                "slowest_step_s": max(during or quiet),
            }
        )


class _Poll:
    """Whether a version has come, and how."""

    def __init__(self, adopter: Adopter) -> None:
        self._adopter = adopter
        self.found: Adoption | None = None

    def __call__(self) -> bool:
        self.found = self.found or self._adopter.poll()
        return self.found is not None


if __name__ == "__main__":
    main()
