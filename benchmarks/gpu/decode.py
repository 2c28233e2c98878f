"""Decoding by the native engine, with CUDA graphs and without, against the time that reading weights and cache takes.

    python benchmarks/gpu/decode.py [--device cuda] [--models 1b 8b] [--batches 64 256 512]

Models have random weights. All rows are prefilled first; then so many steps are timed at once, with all rows running.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
from typing import Any

import numpy as np
import torch
from shapes import MODELS, RandomWeights, copy_bytes_per_s, seconds_of

from llamarl.generation.engine import Engine
from llamarl.generation.model import GeneratorModel
from llamarl.types import GenerationRequest, SamplingParams

STEPS, REPEATS, WARM_UP = 32, 3, 8
CONTEXT = {64: 1024}
"""Tokens of a row when it is timed; of others 256."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=["1b", "8b"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "fp8"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256, 512])
    options = parser.parse_args()
    bandwidth, rows = copy_bytes_per_s(options.device), list[dict[str, Any]]()
    for name, dtype in itertools.product(options.models, options.dtypes):
        model = GeneratorModel(MODELS[name], dtype, options.device)
        model.load(RandomWeights(MODELS[name], options.device))
        ways = (False, True) if options.device.startswith("cuda") else (False,)
        for batch, graphs in itertools.product(options.batches, ways):
            context = CONTEXT.get(batch, 256) if name != "toy" else 64
            rows.append({"model": name, "dtype": dtype, "graphs": graphs, "batch": batch, "context": context})
            rows[-1] |= measure(model, batch, context, graphs, bandwidth)
            print(json.dumps(rows[-1]), flush=True)
            gc.collect()
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()
        del model
    print(json.dumps({"bytes_per_s": bandwidth, "rows": rows}), flush=True)


def measure(model: GeneratorModel, batch: int, context: int, graphs: bool, bandwidth: float) -> dict[str, Any]:
    """Seconds of a step, and the share of the bandwidth that reading weights and cache once would take of it."""
    device, shape, rng = str(model.device), model.shape, np.random.default_rng(0)
    count = WARM_UP + STEPS * REPEATS
    engine = Engine(model, max_running=batch, prefill_tokens=8192, kv_bytes=None, graphs=graphs)
    engine.submit(
        GenerationRequest(
            group_id=i, prompt_token_ids_T=rng.integers(1, shape.vocab_size, max(context - count // 2, 1), np.int32),
            group_size=1, sampling=SamplingParams(max_new_tokens=4 * count, seed=i),
        )
        for i in range(batch)
    )  # fmt: skip
    while engine.stats().running < batch:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    times = [seconds_of(device, lambda: [engine.step() for _ in range(STEPS)]) / STEPS for _ in range(REPEATS)]
    assert engine.stats().running == batch, "a row has left: its time is not that of so many"
    step_s = statistics.median(times)
    weight_bytes = sum(spec.num_bytes for spec in model.specs() if "embed_tokens" not in spec.name)
    if shape.tie_embeddings:
        weight_bytes += 2 * shape.vocab_size * shape.hidden_size
    kv_bytes = batch * context * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * model.kv_dtype.itemsize
    share = (weight_bytes + kv_bytes) / bandwidth / step_s
    return {"step_s": step_s, "tokens_per_s": batch / step_s, "bandwidth_share": share, "steps_s": times}


if __name__ == "__main__":
    main()
