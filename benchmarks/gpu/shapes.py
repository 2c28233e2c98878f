"""Models, requests, what a device does at best, and rows that are said as they come, for the parts of the check."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.types import GenerationRequest, SamplingParams

MODELS = {
    "1b": ModelShape(
        family="llama", hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64,
        intermediate_size=8192, vocab_size=128_256, max_position_embeddings=4096, tie_embeddings=True,
    ),
    "3b": ModelShape(
        family="llama", hidden_size=3072, num_layers=28, num_heads=24, num_kv_heads=8, head_dim=128,
        intermediate_size=8192, vocab_size=128_256, max_position_embeddings=4096, tie_embeddings=True,
    ),
    "8b": ModelShape(
        family="llama", hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=14_336, vocab_size=128_256, max_position_embeddings=4096,
    ),
    "toy": ModelShape(
        family="llama", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=512, max_position_embeddings=512, tie_embeddings=True,
    ),
}  # fmt: skip
"""Llama 3.2 1B and 3B, Llama 3.1 8B, and what a processor runs to try the check itself."""


DATA_SHEET_TFLOPS = 989.0
"""bfloat16 of an H100 or H200, dense."""


def settings(parser: argparse.ArgumentParser, **toy: Any) -> argparse.Namespace:
    """Those of the command line; on a processor, where only the check itself is tried, those of a toy."""
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    if options.device == "cpu":
        vars(options).update(model="toy", **toy)
    return options


def say(about: dict[str, Any], work: Callable[[], dict[str, Any]]) -> None:
    """Prints a row: what was measured, or why it was not, which leaves the other rows alone."""
    try:
        found = work()
    except Exception as error:
        found = {"failure": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(about | found), flush=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what fits next is asked of the device


class RandomWeights(Mapping[str, torch.Tensor]):
    """Each tensor is drawn when it is asked for: copies of all would not fit beside the model."""

    def __init__(self, shape: ModelShape, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        with torch.device("meta"):
            self._shapes = {name: weight.shape for name, weight in Transformer(shape).named_parameters()}
        self._device, self._dtype = device, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        drawn = torch.randn(shape, device=self._device, dtype=self._dtype)
        return drawn * 0.02 if len(shape) > 1 else torch.ones_like(drawn)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def wait(device: str) -> None:
    """Until the device has done what it was asked."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds_of(device: str, work: object) -> float:
    """Of a call, all of it."""
    wait(device)
    start_s = time.perf_counter()
    work()  # pyrefly: ignore
    wait(device)
    return time.perf_counter() - start_s


def copy_bytes_per_s(device: str) -> float:
    """Bytes read and written by a copy, on the device."""
    source = torch.ones(1 << (29 if device.startswith("cuda") else 24), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds_of(device, lambda: target.copy_(source)) for _ in range(5))


def requests(shape: ModelShape, group_ids: Iterable[int], prompt: int, response: int) -> list[GenerationRequest]:
    """Of one rollout each, behind random prompts of so many tokens."""
    rng = np.random.default_rng(0)
    return [
        GenerationRequest(
            group_id=i, prompt_token_ids_T=rng.integers(1, shape.vocab_size, prompt, np.int32), group_size=1,
            sampling=SamplingParams(max_new_tokens=response, seed=i),
        )
        for i in group_ids
    ]  # fmt: skip
