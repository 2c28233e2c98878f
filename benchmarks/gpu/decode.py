"""Decoding by the native engine, with CUDA graphs and without, against the time that reading weights and cache takes.

    python benchmarks/gpu/decode.py [--device cpu] [--model 8b] [--dtype fp8] [--kv_dtype fp8] [--batches 64 256]
                                    [--context 8192]

The model has random weights. All rows are prefilled first; then so many steps are timed at once, with all rows running.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import replace
from typing import Any

from shapes import MODELS, RandomWeights, copy_bytes_per_s, requests, say, seconds_of, settings

from llamarl.generation.attention import KVCache
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel

STEPS, REPEATS, WARM_UP = 32, 3, 8
COUNT = WARM_UP + STEPS * REPEATS
CONTEXT = {64: 1024}
"""Tokens of a row when it is timed; of others 256."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv_dtype", default="auto")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256, 512])
    parser.add_argument("--context", type=int, help="tokens of a row when it is timed")
    options = settings(parser, dtype="bfloat16", batches=[4], context=96)
    shape, bandwidth = MODELS[options.model], copy_bytes_per_s(options.device)
    if options.context:
        shape = replace(shape, max_position_embeddings=2 * options.context)
    model = GeneratorModel(shape, options.dtype, options.device, kv_dtype=options.kv_dtype)
    model.load(RandomWeights(shape, options.device))
    for batch, graphs in itertools.product(options.batches, (True, False) if options.device != "cpu" else (False,)):
        context = options.context or CONTEXT.get(batch, 256)
        about = {"model": options.model, "dtype": options.dtype, "graphs": graphs, "batch": batch, "context": context}
        about |= {} if options.kv_dtype == "auto" else {"kv_dtype": options.kv_dtype}
        say(about, lambda b=batch, c=context, g=graphs: measure(model, b, c, g, bandwidth))


def running(model: GeneratorModel, batch: int, context: int, graphs: bool) -> Engine:
    """An engine that decodes so many rows, all of so many tokens when half of the steps to be timed are done."""
    shape = model.shape
    kv_bytes = KVCache.block_bytes(shape, model.kv_dtype)
    kv_bytes *= batch * ((context + 2 * COUNT) // 16 + 2)
    engine = Engine(model, EngineSettings(max_running=batch, prefill_tokens=8192, kv_bytes=kv_bytes, graphs=graphs))
    engine.submit(requests(shape, range(batch), max(context - COUNT // 2, 1), 2 * COUNT))
    while engine.stats().running < batch:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    return engine


def measure(model: GeneratorModel, batch: int, context: int, graphs: bool, bandwidth: float) -> dict[str, Any]:
    """Seconds of a step, and the share of the bandwidth that reading weights and cache once would take of it."""
    device, shape, engine = str(model.device), model.shape, running(model, batch, context, graphs)
    times = [seconds_of(device, lambda: [engine.step() for _ in range(STEPS)]) / STEPS for _ in range(REPEATS)]
    assert engine.stats().running == batch, "a row has left: its time is not that of so many"
    step_s = statistics.median(times)
    weight_bytes = sum(spec.num_bytes for spec in model.specs() if "embed_tokens" not in spec.name)
    if shape.tie_embeddings:
        weight_bytes += 2 * shape.vocab_size * shape.hidden_size
    kv_bytes = batch * context * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * model.kv_dtype.itemsize
    share = (weight_bytes + kv_bytes) / bandwidth / step_s
    return {
        "step_s": step_s, "tokens_per_s": batch / step_s, "bandwidth_share": share, "steps_s": times,
        "computed_by": engine.describe()[-200:],
    }  # fmt: skip


if __name__ == "__main__":
    main()
