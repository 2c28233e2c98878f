"""Weights from a trainer process to a generator process that decodes, by each transport, on one device.

    python benchmarks/gpu/sync.py [--device cpu] [--model 8b] [--transports nixl shared_memory p2p]

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

import torch
from shapes import MODELS, RandomWeights, copy_bytes_per_s, requests, say, settings

from llamarl.executors.generator import Adopter
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel
from llamarl.weight_sync.base import plan_writers
from llamarl.weight_sync.layout import TensorSpec, lay_out
from llamarl.weight_sync.select import publisher_class

DEADLINE_S, VERSIONS, BATCH = 120.0, 6, 64
COPIES = 6
"""Of the weights on the device, with what keys and values take."""
ENOUGH_S = 10.0
"""No further version after so long: by a slow transport there is one row rather than none."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--transports", nargs="+", default=["nixl", "shared_memory", "p2p"])
    options = settings(parser)
    bandwidth, model = copy_bytes_per_s(options.device), fitted(options.model, options.device)
    for transport in options.transports:
        about = {"transport": transport, "model": model}
        say(about, lambda transport=transport: measured(transport, model, options.device, bandwidth))


def fitted(model: str, device: str) -> str:
    """3B in the place of 8B on a card of 80 GB: the trainer's weights and two slots, and the generator's twice."""
    is_small = model == "8b" and torch.cuda.get_device_properties(device).total_memory < COPIES * 17e9
    return "3b" if is_small else model


def measured(transport: str, model: str, device: str, bandwidth: float) -> dict[str, Any]:
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
            return _rounds(*ends, bandwidth)
        finally:
            for process in processes:
                process.kill()
                process.join(10)


def _rounds(train: Connection, generate: Connection, bandwidth: float) -> dict[str, Any]:
    def heard(connection: Connection) -> Any:
        if not connection.poll(DEADLINE_S):
            raise TimeoutError(f"no answer in {DEADLINE_S:g} s")
        if isinstance(answer := connection.recv(), str):
            raise RuntimeError(answer)
        return answer

    train.send(specs := heard(generate))
    rows, start_s = [], time.monotonic()
    for version in range(1, VERSIONS + 1):
        if rows and time.monotonic() - start_s > ENOUGH_S:
            break
        train.send((version, [version - 1]))
        publish_s, address = heard(train)
        generate.send((version, address))
        rows.append(heard(generate) | {"publish_s": publish_s})
    num_bytes = sum(spec.num_bytes for spec in specs)
    keys = ("publish_s", "fetch_s", "stall_s", "quiet_step_s", "slowest_step_s")
    medians = {key: statistics.median(row[key] for row in rows[1:] or rows) for key in keys}  # the first sets up
    served_s, bytes_per_s = sum(medians[key] for key in keys[:3]), num_bytes / medians["fetch_s"]
    share = 3 * bytes_per_s / bandwidth  # each byte is read and written, and read again for its proof
    about = {"versions": len(rows), "num_bytes": num_bytes, "bytes_per_s": bytes_per_s, "fetch_share": share}
    return about | medians | {"served_s": served_s}


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
    engine = Engine(model, EngineSettings(max_running=BATCH, prefill_tokens=8192, kv_bytes=None))

    def begin(version: int) -> None:
        """Rollouts with a whole context before them, so that they outlast slow transports."""
        first = version * BATCH
        engine.abort(range(first - BATCH, first))
        engine.submit(requests(shape, range(first, first + BATCH), 64, shape.max_position_embeddings - 64))
        while engine.stats().running < BATCH:
            engine.step()

    def step_s() -> float:
        start_s = time.perf_counter()
        engine.step()
        return time.perf_counter() - start_s

    connection.send(model.specs())
    while True:
        version, address = connection.recv()
        begin(version)
        quiet, during = [step_s() for _ in range(8)], list[float]()
        adopter.begin(version, address)
        while (adoption := adopter.poll()) is None and engine.has_work:
            during.append(step_s())
        adoption = adoption or adopter.poll(DEADLINE_S)
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


if __name__ == "__main__":
    main()
