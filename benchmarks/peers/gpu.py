"""The native engine on one GPU, with CUDA graphs and without: decode steps per second against the time that reading
weights and cache takes.

In this process, without peers. Models have random weights, made on the GPU tensor by tensor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from ours import generate
from work import Workload

from llamarl.generation.engine import Engine
from llamarl.generation.model import GeneratorModel, Precision
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer

MODELS = {
    "1b": ModelShape(
        family="llama", hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64,
        intermediate_size=8192, vocab_size=128_256, max_position_embeddings=1024, tie_embeddings=True,
    ),
    "8b": ModelShape(
        family="llama", hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=14_336, vocab_size=128_256, max_position_embeddings=1024,
    ),
}  # fmt: skip
DTYPES: tuple[Precision, ...] = ("bfloat16", "fp8")
BATCHES = (64, 128, 256, 512)
PROMPT_TOKENS, NEW_TOKENS = 64, 256
REPEATS = 3


class RandomWeights(Mapping[str, torch.Tensor]):
    """Each tensor is drawn when it is asked for: float32 copies of all would not fit beside the model."""

    def __init__(self, shape: ModelShape) -> None:
        with torch.device("meta"):
            self._shapes = {name: weight.shape for name, weight in Transformer(shape).named_parameters()}

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        drawn = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return drawn * 0.02 if len(shape) > 1 else torch.ones_like(drawn)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def read_bytes_per_s() -> float:
    """By copying 4 GiB, which reads and writes as much."""
    source = torch.ones(1 << 30, device="cuda")
    target, best_s = torch.empty_like(source), float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * source.nbytes / best_s


def on_gpu(models: list[str] | None, quick: bool) -> dict[str, Any]:
    """Rows of all models, precisions and batches."""
    bandwidth, rows = read_bytes_per_s(), list[dict[str, Any]]()
    for name in models or MODELS:
        for dtype in DTYPES:
            model = GeneratorModel(MODELS[name], dtype, "cuda")
            model.load(RandomWeights(MODELS[name]))
            weight_bytes = sum(spec.num_bytes for spec in model.specs() if "embed_tokens" not in spec.name)
            if model.shape.tie_embeddings:
                weight_bytes += 2 * model.shape.vocab_size * model.shape.hidden_size
            for batch, graphs in product(BATCHES[:1] if quick else BATCHES, (False, True)):
                found = _decode(model, batch, weight_bytes, bandwidth, graphs)
                rows.append({"model": name, "dtype": dtype, "cuda_graphs": graphs, **found})
                print(rows[-1], flush=True)
            del model
            torch.cuda.empty_cache()
    return {"device": torch.cuda.get_device_name(), "bytes_per_s": bandwidth, "rows": rows}


def _decode(model: GeneratorModel, batch: int, weight_bytes: int, bandwidth: float, graphs: bool) -> dict[str, Any]:
    """Two runs that differ by half of the new tokens: their difference is decoding alone."""
    engine = Engine(model, max_running=batch, prefill_tokens=8192, kv_bytes=None, graphs=graphs)
    prompts = torch.randint(1, model.shape.vocab_size, (batch, PROMPT_TOKENS)).tolist()
    half = NEW_TOKENS // 2
    _seconds(engine, prompts, NEW_TOKENS)  # captures what it can
    step_s = [(_seconds(engine, prompts, NEW_TOKENS) - _seconds(engine, prompts, half)) / half for _ in range(REPEATS)]
    shape, median_s = model.shape, statistics.median(step_s)
    seen = PROMPT_TOKENS + (NEW_TOKENS + half) / 2
    kv_bytes = batch * seen * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 2
    share = (weight_bytes + kv_bytes) / bandwidth / median_s
    return {"batch": batch, "tokens_per_s": batch / median_s, "bandwidth_share": share, "step_s": step_s}


def _seconds(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    start_s = time.perf_counter()
    generate(engine, Workload(prompts=prompts, new_tokens=[new_tokens] * len(prompts)))
    torch.cuda.synchronize()
    return time.perf_counter() - start_s
