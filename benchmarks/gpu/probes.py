"""Smaller measurements on a GPU: prefill, log-probs of trainer and generator, attention alone, the longest kernels.

python benchmarks/gpu/probes.py mismatch prefill attention profile [--device cuda] [--model 1b]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from decode import running
from shapes import DATA_SHEET_TFLOPS, MODELS, RandomWeights, copy_bytes_per_s, say, seconds_of
from torch import Tensor
from train import make_trainer

from llamarl.generation.engine import Engine
from llamarl.generation.model import GeneratorModel, part_reader
from llamarl.kernels import triton_decode
from llamarl.kernels.attention import BLOCK_SIZE
from llamarl.models.shape import ModelShape
from llamarl.training.optimization import finished
from llamarl.types import GenerationRequest, Rollout, SamplingParams

REPEATS, LONGEST = 5, 20
Rows = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]
"""What each row is about, and what measures it."""


def main() -> None:
    probes: dict[str, Callable[[str, str], Rows]] = {
        "mismatch": mismatch, "prefill": prefill, "attention": attention, "profile": profile,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probes", nargs="+", choices=probes)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="1b", choices=MODELS)
    options = parser.parse_args()
    for name in options.probes:
        for about, work in probes[name](options.model, options.device):
            say({"probe": name, "model": options.model} | about, work)


def random_prompts(shape: ModelShape, rows: int, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, shape.vocab_size, length, np.int32) for _ in range(rows)]


def generated(engine: Engine, prompts: Sequence[np.ndarray], response: int) -> list[Rollout]:
    """A rollout of each, in their order."""
    sampling, found = SamplingParams(max_new_tokens=response), dict[int, Rollout]()
    engine.submit(
        GenerationRequest(group_id=i, prompt_token_ids_T=prompt, group_size=1, sampling=replace(sampling, seed=i))
        for i, prompt in enumerate(prompts)
    )
    while engine.has_work:
        found |= {one.group_id: one for one in engine.step()}
    return [found[i] for i in range(len(prompts))]


def mismatch(model: str, device: str) -> Rows:
    """Log-probs of sampled tokens in the trainer, less those at which they were sampled."""
    shape, is_toy = MODELS[model], device == "cpu"
    weights = dict(RandomWeights(shape, device, torch.float32).items())
    trainer, _ = make_trainer(shape, device, 2048, part_reader(weights))

    def measured(dtype: Any) -> dict[str, Any]:
        served = GeneratorModel(shape, dtype, device)
        served.load(weights)
        engine = Engine(served, max_running=16, prefill_tokens=4096, kv_bytes=(64 if is_toy else 2048) << 20)
        prompts = random_prompts(shape, 16, 64)
        rollouts = generated(engine, prompts, 32 if is_toy else 256)
        scored = trainer.score(
            [np.append(p, one.token_ids_T) for p, one in zip(prompts, rollouts, strict=True)], half=True
        )
        apart = [
            own_T[-one.num_tokens :] - one.behavior_logprobs_T for own_T, one in zip(scored, rollouts, strict=True)
        ]
        apart_N = np.concatenate(apart).astype(np.float64)
        kl = float(np.mean(np.exp(apart_N) - 1 - apart_N))
        return {"kl": kl, "mean": float(np.abs(apart_N).mean()), "max": float(np.abs(apart_N).max())}

    for dtype in ("bfloat16",) if is_toy else ("bfloat16", "fp8", "int8"):
        yield {"dtype": dtype}, lambda dtype=dtype: measured(dtype)


def prefill(model: str, device: str) -> Rows:
    """Prompts alone: one token each follows."""
    shape, is_toy = MODELS[model], device == "cpu"
    served = GeneratorModel(shape, "bfloat16", device)
    served.load(RandomWeights(shape, device))

    def measured(rows: int, prompt: int) -> dict[str, Any]:
        engine = Engine(served, max_running=rows, prefill_tokens=8192, kv_bytes=None, graphs=False)
        prompts = random_prompts(shape, rows, prompt)
        times = [seconds_of(device, lambda: generated(engine, prompts, 1)) for _ in range(1 + REPEATS)]
        tokens_per_s = rows * prompt / statistics.median(times[1:])
        mfu = 2 * shape.num_parameters * tokens_per_s / DATA_SHEET_TFLOPS / 1e12
        return {"rows": rows, "prompt": prompt, "tokens_per_s": tokens_per_s, "mfu": mfu}

    for rows, prompt in ((4, 32),) if is_toy else ((64, 128), (16, 2048)):
        yield {}, lambda rows=rows, prompt=prompt: measured(rows, prompt)


def attention(model: str, device: str) -> Rows:
    """Decode attention alone: bytes of keys and values a second, with so many stages of the pipeline of loads."""
    shape, is_toy, bandwidth = MODELS[model], device == "cpu", copy_bytes_per_s(device)

    def measured(context: int, cached: torch.dtype, stages: int) -> dict[str, Any]:
        rows, blocks = 2 if is_toy else 64, context // BLOCK_SIZE
        sizes = rows * blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim
        keys, values = (torch.randn(sizes, device=device, dtype=torch.bfloat16).to(cached) for _ in range(2))
        q = torch.randn(rows, shape.num_heads, shape.head_dim, device=device, dtype=torch.bfloat16)
        table = torch.randperm(rows * blocks, device=device).int()
        integers = (torch.tensor(one, device=device, dtype=torch.int32) for one in ([blocks], [0] * rows))
        width, prefix_B = integers
        triton_decode._STAGES = stages
        attend: Callable[[], Tensor] = lambda: triton_decode.decode_attention(  # noqa: E731
            q, keys.transpose(2, 3), values, table, width, prefix_B, torch.full_like(prefix_B, context)
        )
        seconds_of(device, attend)
        times = [seconds_of(device, lambda: [attend() for _ in range(1 if is_toy else 20)]) for _ in range(REPEATS)]
        attend_s = statistics.median(times) / (1 if is_toy else 20)
        bytes_per_s = 2 * keys.nbytes / attend_s
        return {"attend_s": attend_s, "bytes_per_s": bytes_per_s, "bandwidth_share": bytes_per_s / bandwidth}

    kinds = (torch.bfloat16,) if is_toy else (torch.bfloat16, torch.float8_e4m3fn)
    for context, cached, stages in itertools.product((64,) if is_toy else (1024, 8192, 32_768), kinds, (3, 5)):
        about = {"context": context, "cached": str(cached).removeprefix("torch."), "stages": stages}
        yield about, lambda given=(context, cached, stages): measured(*given)


def profile(model: str, device: str) -> Rows:
    """The kernels that take longest in a decode step, and in gradients of packed tokens."""
    shape, is_toy = MODELS[model], device == "cpu"

    def longest(work: Callable[[], object]) -> dict[str, Any]:
        work()
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CPU] if is_toy else [activity.CUDA]) as found:
            seconds_of(device, work)
        of = (lambda one: one.self_cpu_time_total) if is_toy else (lambda one: one.self_device_time_total)
        rows = sorted(found.key_averages(), key=of, reverse=True)
        kernels = [{"name": one.key[:120], "us": of(one), "count": one.count} for one in rows[:LONGEST]]
        return {"sum_us": sum(map(of, rows)), "launches": sum(one.count for one in rows), "kernels": kernels}

    def decode_step() -> dict[str, Any]:
        served = GeneratorModel(shape, "bfloat16", device)
        served.load(RandomWeights(shape, device))
        return longest(running(served, 4 if is_toy else 64, 64 if is_toy else 1024, not is_toy).step)

    def train_step() -> dict[str, Any]:
        tokens = 256 if is_toy else 4096
        trainer, groups = make_trainer(shape, device, tokens)
        return longest(lambda: finished(trainer.accumulate(groups, tokens)))

    yield {"step": "decode"}, decode_step
    yield {"step": "train"}, train_step


if __name__ == "__main__":
    main()
