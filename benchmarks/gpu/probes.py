"""Smaller measurements on a GPU: prefill, log-probs of trainer and generator, attention alone, the longest kernels.

python benchmarks/gpu/probes.py mismatch|prefill|attention|profile [--device cpu] [--model 1b]
    profile: [--dtype fp8] [--rows 256] [--steps decode train]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from decode import CONTEXT, running
from shapes import DATA_SHEET_TFLOPS, MODELS, RandomWeights, copy_bytes_per_s, requests, say, seconds_of, settings
from train import fitted, make_trainer

from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel, part_reader
from llamarl.kernels.attention import BLOCK_SIZE
from llamarl.parts.cuda import decode as kernels
from llamarl.training.optimization import finished
from llamarl.types import GenerationRequest, Rollout

REPEATS, LONGEST = 5, 20
Rows = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]
"""What each row is about, and what measures it."""


def main() -> None:
    probes: dict[str, Callable[[str, str], Rows]] = {
        "mismatch": mismatch, "prefill": prefill, "attention": attention, "profile": profile,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", choices=probes)
    parser.add_argument("--model", default="1b", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16", help="of the generator that is profiled")
    parser.add_argument("--rows", type=int, default=64, help="rows of the decode step that is profiled")
    parser.add_argument("--steps", nargs="+", default=["decode", "train"], choices=["decode", "train"])
    options = settings(parser, dtype="bfloat16", rows=4)
    probes["profile"] = partial(profile, dtype=options.dtype, num_rows=options.rows, steps=options.steps)
    for about, work in probes[options.probe](options.model, options.device):
        say({"probe": options.probe, "model": options.model} | about, work)


def generated(engine: Engine, given: Sequence[GenerationRequest]) -> list[Rollout]:
    """A rollout of each, in their order."""
    engine.submit(given)
    found = dict[int, Rollout]()
    while engine.has_work:
        found |= {one.group_id: one for one in engine.step()}
    return [found[one.group_id] for one in given]


def mismatch(model: str, device: str) -> Rows:
    """Log-probs of sampled tokens in the trainer, less those at which they were sampled."""
    shape, is_toy = MODELS[model], device == "cpu"
    weights = dict(RandomWeights(shape, device, torch.float32).items())
    trainer, _ = make_trainer(shape, device, 2048, part_reader(weights))

    def measured(dtype: Any) -> dict[str, Any]:
        served = GeneratorModel(shape, dtype, device)
        served.load(weights)
        engine = Engine(
            served, EngineSettings(max_running=16, prefill_tokens=4096, kv_bytes=(64 if is_toy else 2048) << 20)
        )
        given = requests(shape, range(16), 64, 32 if is_toy else 256)
        rollouts = generated(engine, given)
        whole = [np.append(of.prompt_token_ids_T, one.token_ids_T) for of, one in zip(given, rollouts, strict=True)]
        scored = np.concatenate([own_T[63:] for own_T in trainer.score(whole, half=True)])
        apart_N = scored - np.concatenate([one.behavior_logprobs_T for one in rollouts]).astype(np.float64)
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
        engine = Engine(served, EngineSettings(max_running=rows, prefill_tokens=8192, kv_bytes=None, graphs=False))
        given = requests(shape, range(rows), prompt, 1)
        times = [seconds_of(device, lambda: generated(engine, given)) for _ in range(1 + REPEATS)]
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
        width, prefix_B, own_B = (
            torch.tensor(one, device=device, dtype=torch.int32) for one in ([blocks], [0] * rows, [context] * rows)
        )
        kernels._STAGES, calls = stages, 1 if is_toy else 20

        def work() -> None:
            for _ in range(calls):
                kernels.decode_attention(q, keys.transpose(2, 3), values, table, width, prefix_B, own_B)

        work()
        replay = work
        if not is_toy:  # launched one by one, short ones take as long as their launch
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            replay = graph.replay
        attend_s = statistics.median(seconds_of(device, replay) for _ in range(REPEATS)) / calls
        bytes_per_s = 2 * keys.nbytes / attend_s
        return {"attend_s": attend_s, "bytes_per_s": bytes_per_s, "bandwidth_share": bytes_per_s / bandwidth}

    kinds = (torch.bfloat16,) if is_toy else (torch.bfloat16, torch.float8_e4m3fn)
    for context, cached, stages in itertools.product((64,) if is_toy else (1024, 8192, 32_768), kinds, (3, 5)):
        about = {"context": context, "cached": str(cached).removeprefix("torch."), "stages": stages}
        yield about, lambda given=(context, cached, stages): measured(*given)


def profile(
    model: str, device: str, dtype: Any = "bfloat16", num_rows: int = 64, steps: Sequence[str] = ("decode", "train")
) -> Rows:
    """The kernels that take longest in a decode step, and in gradients of packed tokens."""
    shape, is_toy = MODELS[model], device == "cpu"

    def longest(work: Callable[[], object]) -> dict[str, Any]:
        work()
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CPU] if is_toy else [activity.CUDA]) as found:
            seconds_of(device, work)
        of = (lambda one: one.self_cpu_time_total) if is_toy else (lambda one: one.self_device_time_total)
        rows = sorted(filter(of, found.key_averages()), key=of, reverse=True)  # launches, too, have rows, but no time
        kernels = [{"name": one.key[:120], "us": of(one), "count": one.count} for one in rows[:LONGEST]]
        return {"sum_us": sum(map(of, rows)), "launches": sum(one.count for one in rows), "kernels": kernels}

    def decode_step() -> dict[str, Any]:
        served = GeneratorModel(shape, dtype, device)
        served.load(RandomWeights(shape, device))
        context = 64 if is_toy else CONTEXT.get(num_rows, 256)
        return longest(running(served, num_rows, context, not is_toy).step)

    def train_step() -> dict[str, Any]:
        tokens, some = 256 if is_toy else 4096, fitted(shape, device)
        trainer, groups = make_trainer(some, device, tokens)
        return {"layers": some.num_layers} | longest(lambda: finished(trainer.accumulate(groups, tokens)))

    works = {"decode": decode_step, "train": train_step}
    for step in steps:
        yield {"step": step, "dtype": dtype, "rows": num_rows}, works[step]


if __name__ == "__main__":
    main()
