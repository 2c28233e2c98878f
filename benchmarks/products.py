"""Float32 products of training by each path of `kernels/products.py`, and a step of the trainer with and without them.

    python benchmarks/products.py [--repeats 9]
    MKL_CBWR=COMPATIBLE python benchmarks/products.py

Processor time of one thread; variants take turns. Steps have other numbers of tokens each time, as in a run. The second
command has MKL use SSE2, which leaves it as far behind oneDNN here as it is on AMD's processors with AVX-512.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from _record import write_result
from training import CPU_SHAPE, demo_groups, group, in_turn, trainer_of

from llamarl.kernels import build, products
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape
from llamarl.types import RolloutGroup

TOKENS = 2600
WEIGHTS = ((128, 128), (64, 128), (384, 128), (128, 384), (512, 512), (1536, 512), (512, 1536), (8192, 512))
"""Outputs and inputs: of the demo's model, of one with 60M parameters, and of a tile of its head."""
PATHS = (products.TORCH, products.ONEDNN, products.COPIED)
NOTES = [
    "`torch` is MKL; ratios are medians of its time over a path's in the same round.",
    "`switch` is torch's own with float32 products allowed in bfloat16, where torch 2.13 takes oneDNN on AVX-512.",
    "In `steps`, `chosen` is what is measured at a run's start; `onednn` has all products by oneDNN.",
]


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """To the first variant, of which more is faster."""
    first = next(iter(times.values()))
    return {
        name: round(statistics.median(a / b for a, b in zip(first, of_one, strict=True)), 3)
        for name, of_one in times.items()
    }


def switched(product: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        return products._multiply(products.TORCH, product, a, b, None, False)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def one_product(product: str, o: int, i: int, repeats: int) -> dict[str, Any]:
    a, b = products._operands(product, TOKENS, o, i)
    calls = max(1, int(2e9 / (2 * TOKENS * o * i)))

    def work(path: str) -> None:
        for _ in range(calls):
            switched(product, a, b) if path == "switch" else products._multiply(path, product, a, b, None, False)

    times = in_turn({path: lambda path=path: work(path) for path in (*PATHS, "switch")}, repeats)
    exact = products._multiply(products.TORCH, product, a.double(), b.double(), None, False)
    return {
        "torch_gflops": round(2e-9 * TOKENS * o * i * calls / statistics.median(times[products.TORCH]), 1),
        "ratios": ratios(times),
        "switch_is_off_by": float(f"{((switched(product, a, b) - exact).norm() / exact.norm()).item():.1g}"),
    }


@contextmanager
def serving(path: str) -> Iterator[None]:
    """Meanwhile all products are computed by a path, or by those that were chosen."""
    chosen = products.chosen
    if path != "chosen":
        forced = products.ProductPaths(paths=dict.fromkeys(products.PRODUCTS, path), measured_us={}, refused=[])
        products.chosen = lambda num_outputs, num_inputs: forced
    try:
        yield
    finally:
        products.chosen = chosen


def groups_of(number: int, shape: ModelShape, num_groups: int) -> list[RolloutGroup]:
    """Of a step: as many tokens as another number's, more or less."""
    rng = np.random.default_rng(number)
    return [
        group(n, rng.integers(0, shape.vocab_size, 20), list(rng.integers(20, 96, 8)), shape.vocab_size)
        for n in range(num_groups)
    ]


def steps(shape: ModelShape, num_groups: int, repeats: int) -> dict[str, Any]:
    """Of three trainers that begin alike."""
    variants = (products.TORCH, "chosen", products.ONEDNN)
    trainers = {name: trainer_of(new_model(shape, seed=1, std=0.02)) for name in variants}
    rounds = dict.fromkeys(variants, 0)

    def step(name: str) -> None:
        rounds[name] += 1
        with serving(name):
            trainers[name].step(groups_of(rounds[name], shape, num_groups))

    times = in_turn({name: lambda name=name: step(name) for name in variants}, repeats)
    return {
        "parameters": shape.num_parameters,
        "torch_s": round(statistics.median(times[products.TORCH]), 4),
        "ratios": ratios(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"products": {}}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # what was measured at other times does not count
        for o, i in WEIGHTS:
            for product in products.PRODUCTS:
                name = f"{product} {o}x{i}"
                figures["products"][name] = one_product(product, o, i, options.repeats)
                print(name, json.dumps(figures["products"][name]), flush=True)
        demo, middle = demo_groups()[1], ModelShape(**CPU_SHAPE)
        figures["steps"] = {"demo": steps(demo, 16, 3 * options.repeats), "60M": steps(middle, 2, options.repeats)}
    print(json.dumps(figures["steps"]), products.describe())
    figures["chosen"] = products.describe()
    settings = {"repeats": options.repeats, "tokens": TOKENS, "MKL_CBWR": os.environ.get("MKL_CBWR", "")}
    print(
        write_result(
            f"products{'-slow-mkl' * bool(settings['MKL_CBWR'])}",
            settings | {"processor": build.processor().split(" flags")[0]},
            figures,
            NOTES,
        )
    )


if __name__ == "__main__":
    main()
