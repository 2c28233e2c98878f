"""Hybrids of attention and delta nets compared with a dense model: gradients, speed, and what the demo learns.

    python benchmarks/families.py [--only figures|learning] [--seeds 0 1 2] [--more RESULT]

`gradient_error`: largest relative error of a tensor's gradient, of the demo's hybrid in float32, against the same files
in transformers in float32, and against float64. `step_ratio`: CPU time of an optimizer step on what a step of the demo
learns from, in turns with the dense demo. `decode_share`: the bytes that a decode step must move (weights once, states
of all rows read and written, keys and values), divided by its CPU time and by the rate at which one core reads memory.
`chunked_vs_recurrent_nats`: how far the trainer's chunked form moves the log-probabilities from those of the recurrent
form, in the same float32 model. `accuracy_after`: greedy, on 2,048 fresh problems, after the whole demo.

The result is written after each run of a seed. `--more` of its own file continues a stopped one.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _moe_runs import FRESH, ROOT, trained, warm
from _record import write_result
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.roles import TrainerConfig
from llamarl.data.sources.running_total import RunningTotal
from llamarl.data.tokenizer import Tokenizer
from llamarl.distributed.mesh import CPU
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel, Precision
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.attention import packed_attend
from llamarl.models.hf import load_model, new_model, save_model
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.training.optimization import finished
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import GenerationRequest, SampleGroup, SamplingParams, TrainSample

HYBRID, DENSE = "demo_hybrid", "demo"
STEP_REPEATS, DECODE_STEPS = 9, 24
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 16, 8, 24, 45
"""About what a step of the demo learns from."""
ROWS, CONTEXT = 4, 256
LARGE = ModelShape(
    family="qwen3", hidden_size=768, num_layers=12, num_heads=6, num_kv_heads=2, head_dim=128, intermediate_size=2048,
    vocab_size=8000, max_position_embeddings=1024, tie_embeddings=True,
)  # fmt: skip
"""Weights that no cache holds."""
LARGE_HYBRID = replace(
    LARGE, family="qwen3_5_text", partial_rotary_factor=0.25,
    delta=DeltaShape(
        layers=tuple(layer for layer in range(12) if layer % 4 != 3), num_key_heads=3, num_value_heads=6, key_dim=128,
        value_dim=128,
    ),
)  # fmt: skip
BARS = {"accuracy_gap_points": -2.0, "step_ratio": 1.5}
NOTES = """\
gradient_error: norm of the difference over the norm, per tensor, the largest of all tensors.
step_ratio: CPU time of one thread, medians of steps that take turns; not the generator's time.
demo_cpu_ratio: CPU time of whole runs of the demo, warm start excluded, medians of the seeds' ratios.
decode_share: prefill and sampling excluded from the bytes, sampling included in the time; random weights.
""".splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("figures", "learning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--more", type=Path, help="a result of this script, which is continued")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, Any] = json.loads(options.more.read_text(encoding="utf-8")) if options.more else {}
    kept = ("gradient_error", "chunked_vs_recurrent_nats", "step_ratio", "step_s", "decode_share", "decode")
    figures = {key: known[key] for key in kept if key in known}
    rows: list[dict[str, Any]] = known.get("learning", [])
    settings = {"steps": options.steps, "rows": ROWS, "context": CONTEXT, "bars": BARS}

    def write() -> None:
        print(write_result("families", settings, figures | learned(rows), NOTES), flush=True)

    for name in (DENSE, HYBRID):
        warm(name)
    if options.only != "learning" and "decode" not in figures:
        figures |= {"gradient_error": gradient_error(), "chunked_vs_recurrent_nats": form_error()}
        figures |= steps() | decoding()
        write()
    if options.only != "figures":
        for seed in options.seeds:
            done = {row["demo"] for row in rows if row["seed"] == seed}
            for name in (DENSE, HYBRID) if seed % 2 else (HYBRID, DENSE):
                if name not in done:
                    rows.append(run(name, seed, options.steps))
                    write()


def documents(count: int) -> list[Tensor]:
    """Returns tokens of held-out problems with their solutions."""
    tokenizer = Tokenizer(ROOT / f"runs/base/{HYBRID}")
    source = RunningTotal(count=count)
    texts = [f"{source[index].question}\n{source[index].solution}" for index in range(count)]
    return [torch.from_numpy(np.asarray(tokenizer.encode(text), np.int64)) for text in texts]


def gradient_error() -> dict[str, float]:
    """Returns the largest relative error of a gradient against transformers in float32, and of both against
    float64."""
    folder = ROOT / f"runs/base/{HYBRID}"
    ids = documents(1)[0]
    ours, exact = (load_model(folder, torch.float32, CPU).to(dtype) for dtype in (torch.float32, torch.float64))
    for model in (ours, exact):
        hidden = model(ids, torch.arange(len(ids)), packed_attend([len(ids)], [()], fused=True))
        cross_entropy(model.logits(hidden)[:-1], ids[1:]).backward()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    cross_entropy(theirs(ids[None]).logits[0, :-1], ids[1:]).backward()
    own = _as_saved(ours)
    other = {name: one.grad for name, one in theirs.named_parameters()}
    wide = _as_saved(exact)
    assert own.keys() == other.keys(), own.keys() ^ other.keys()
    return {
        "against_transformers": max(_error(own[name], other[name].float()) for name in own),
        "against_float64": max(_error(own[name], wide[name]) for name in own),
        "of_transformers_against_float64": max(_error(other[name], wide[name]) for name in own),
    }


def _as_saved(model: Transformer) -> dict[str, Tensor]:
    """Returns gradients by the names and in the layout of a Hugging Face file."""
    twin = new_model(model.shape, 0, 0.06).float()
    with torch.no_grad():
        for weight, one in zip(twin.parameters(), model.parameters(), strict=True):
            assert one.grad is not None
            weight.copy_(one.grad)
    with tempfile.TemporaryDirectory() as folder:
        save_model(twin, Path(folder) / "gradients", None)
        return load_file(Path(folder) / "gradients/model.safetensors")


def _error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact.double()).norm() / exact.double().norm())


@torch.no_grad()
def form_error() -> dict[str, float]:
    """Returns the mean and the largest difference of log-probabilities of the chunked and the recurrent form."""
    model = load_model(ROOT / f"runs/base/{HYBRID}", torch.float32, CPU)
    differences = list[Tensor]()
    for ids in documents(64):
        chunked = packed_attend([len(ids)], [()], fused=True)
        found = [
            model.logits(model(ids, torch.arange(len(ids)), attend)).log_softmax(-1)[:-1].gather(1, ids[1:, None])
            for attend in (chunked, chunked.in_recurrent_form())
        ]
        differences.append((found[0] - found[1]).abs())
    whole = torch.cat(differences)
    return {"mean": float(whole.mean()), "largest": float(whole.max())}


def steps() -> dict[str, Any]:
    """Returns CPU seconds of an optimizer step of both demos, in turns, and their ratio."""
    trainers = {
        name: Trainer(
            load_model(ROOT / f"runs/base/{name}", torch.float32, CPU),
            TrainerConfig(),
            Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0),
        )
        for name in (HYBRID, DENSE)
    }
    groups, found = _groups(), {name: list[float]() for name in trainers}
    for _ in range(STEP_REPEATS + 1):
        for name, trainer in trainers.items():
            start_s = time.thread_time()
            finished(trainer.accumulate(groups, 1000))
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=False)
            found[name].append(time.thread_time() - start_s)
    ratios = [ours / dense for ours, dense in zip(*(times[1:] for times in found.values()), strict=True)]
    seconds = {name: statistics.median(times[1:]) for name, times in found.items()}
    print(json.dumps(seconds), flush=True)
    return {"step_ratio": statistics.median(ratios), "step_s": seconds}


def _groups() -> list[SampleGroup]:
    rng = np.random.default_rng(0)

    def sample() -> TrainSample:
        columns = {
            "token_ids": rng.integers(0, 300, RESPONSE_TOKENS).astype(np.int32),
            "behavior_logprobs": np.full(RESPONSE_TOKENS, -1.0, np.float32),
            "policy_versions": np.zeros(RESPONSE_TOKENS, np.int32),
            "advantages": np.full(RESPONSE_TOKENS, rng.normal(), np.float32),
            "loss_mask": np.ones(RESPONSE_TOKENS, bool),
        }
        return TrainSample(columns=columns)

    return [
        SampleGroup(
            prompt_token_ids_T=rng.integers(0, 300, PROMPT_TOKENS).astype(np.int32),
            samples=tuple(sample() for _ in range(SAMPLES)),
        )
        for _ in range(PROMPTS)
    ]


def decoding() -> dict[str, Any]:
    """Returns the share of the bytes' lower bound that a decode step of a large hybrid reaches, and its dense twin."""
    gb_s, found = _memory_gb_s(), dict[str, Any]()
    for kind in ("float32", "bfloat16"):
        for name, shape in (("hybrid", LARGE_HYBRID), ("dense", LARGE)):
            seconds, num_bytes = _decode(shape, kind)
            row = {"step_s": seconds, "gb": 1e-9 * num_bytes, "share": 1e-9 * num_bytes / seconds / gb_s}
            found.setdefault(kind, {})[name] = row
    print(json.dumps(found), flush=True)
    return {
        "decode_share": {kind: rows["hybrid"]["share"] for kind, rows in found.items()},
        "decode": found | {"memory_gb_s": gb_s},
    }


def _decode(shape: ModelShape, kind: Precision) -> tuple[float, float]:
    """Returns the median CPU time of decode steps, and the bytes that one must move."""
    model = GeneratorModel(shape, kind, CPU)
    model.load(new_model(shape, 0, 0.03))
    engine = Engine(model, EngineSettings(max_running=ROWS, prefill_tokens=ROWS * CONTEXT, kv_bytes=1 << 28))
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=DECODE_STEPS + 4)
    engine.submit([
        GenerationRequest(
            group_id=number, prompt_token_ids_T=rng.integers(0, 8000, CONTEXT).astype(np.int32), group_size=1,
            sampling=sampling,
        )
        for number in range(ROWS)
    ])  # fmt: skip
    times = list[float]()
    while engine.has_work:
        start_s = time.thread_time()
        engine.step()
        times.append(time.thread_time() - start_s)
    weights = sum(_num_bytes(spec) for spec in model.specs())  # a tied embedding is the head
    element = 4 if kind == "float32" else 2
    kv = 2 * shape.num_attention_layers * shape.kv_size * element * (CONTEXT + DECODE_STEPS / 2)
    return statistics.median(times[3:-2]), weights + ROWS * (kv + 2 * shape.state_bytes)


def _num_bytes(spec: Any) -> int:
    return int(np.prod(spec.box.shape)) * getattr(torch, spec.dtype).itemsize


def _memory_gb_s() -> float:
    numbers, rates = torch.ones(1 << 26), list[float]()
    for _ in range(7):
        start_s = time.thread_time()
        torch.dot(numbers, numbers)
        rates.append(1e-9 * numbers.nbytes / (time.thread_time() - start_s))
    return max(rates)


def run(name: str, seed: int, num_steps: int) -> dict[str, Any]:
    """Runs one demo with one seed. Returns its accuracies and times."""
    settings = "--steps", str(num_steps), "--data.eval", FRESH, "--eval.max_prompts", "2048"
    settings += "--eval.every_steps", "0", "--checkpoint.every_steps", "0", "--seed", str(seed)
    with tempfile.TemporaryDirectory() as folder:
        took = trained(name, f"{name}-{seed}", Path(folder), *settings)
        summary = json.loads((Path(folder) / f"{name}-{seed}/summary.json").read_text())
    row = {"demo": name, "seed": seed, **took, "steps_s": summary["wall_s"]}
    row |= {key: summary[key] for key in ("accuracy_before", "accuracy_after")}
    print(json.dumps(row), flush=True)
    return row


def learned(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns means over the seeds that both demos have finished, and whether the bars are met."""
    of = {name: {row["seed"]: row for row in rows if row["demo"] == name} for name in (HYBRID, DENSE)}
    seeds = sorted(of[HYBRID].keys() & of[DENSE].keys())
    if not seeds:
        return {"learning": rows}

    def mean(of_row: Callable[[dict[str, Any], dict[str, Any]], float]) -> float:
        return statistics.mean(of_row(of[HYBRID][seed], of[DENSE][seed]) for seed in seeds)

    gap = 100 * mean(lambda ours, dense: ours["accuracy_after"] - dense["accuracy_after"])
    return {
        "accuracy_after": mean(lambda ours, _: ours["accuracy_after"]),
        "accuracy_after_dense": mean(lambda _, dense: dense["accuracy_after"]),
        "accuracy_gap_points": gap,
        "demo_cpu_ratio": statistics.median(of[HYBRID][seed]["cpu_s"] / of[DENSE][seed]["cpu_s"] for seed in seeds),
        "demo_steps_ratio": statistics.median(
            of[HYBRID][seed]["steps_s"] / of[DENSE][seed]["steps_s"] for seed in seeds
        ),
        "learns_as_well": gap >= BARS["accuracy_gap_points"],
        "learning": rows,
    }


if __name__ == "__main__":
    main()
