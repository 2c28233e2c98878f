"""Mixtures of experts: how near decoding comes to what memory gives, what recording each token's experts costs, how
long a sync of 235B takes to plan, and how long a step of the trainer takes beside that of a dense model; how far a
generator is from the trainer with router replay and without, of what causes, and what the demo learns in which time.

    python benchmarks/moe.py [--only speed|kl|causes|learning] [--add-to FILE]

writes `benchmarks/results/moe-DATE.json`, and with `causes` the picture of docs/layouts.md. Speed: one thread, CPU
time of this thread, kernels in turns, medians. The others run the demo and its dense twin (`_moe_runs.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _moe_picture import PICTURE, draw
from _moe_runs import base_kl, causes, learning
from _record import write_result
from torch import Tensor

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.roles import TrainerConfig
from llamarl.generation.model import GeneratorModel, Precision
from llamarl.generation.network import ExpertMixture, route_kernel
from llamarl.kernels import ops, paths
from llamarl.kernels.experts import ExpertFeedForward, Stack
from llamarl.kernels.linear import Linear
from llamarl.models.hf import new_model
from llamarl.models.quantize import quantize_rows
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import QUANTIZED
from llamarl.sharding.tensor_parallel import (
    cuts_by_expert,
    expert_box,
    is_expert,
    is_quantizable,
    is_router,
    tensor_parallel_box,
)
from llamarl.training.optimization import finished
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import SampleGroup, TrainSample
from llamarl.weight_sync.base import plan_writers
from llamarl.weight_sync.layout import TensorSpec, lay_out

SIZES = {"512 x 256, 32 experts, 4": (512, 256, 32, 4), "1024 x 384, 64 experts, 8": (1024, 384, 64, 8)}
"""Model dim, width, experts, experts of a token."""
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
ROWS = (8, 32, 128)
FAR_BYTES = 192 << 20
"""Weights that take turns, so that they come from memory, as in a model."""
REPEATS = 9
MODEL = ModelShape(
    family="qwen3_moe", hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=1024,
    vocab_size=8000, max_position_embeddings=1024,
    moe=MoeShape(
        num_experts=32, experts_per_token=4, expert_size=256, sparse_layers=tuple(range(8)), normalized=True,
    ),
)  # fmt: skip
DEMO = ModelShape(
    family="qwen3_moe", hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=192,
    vocab_size=331, max_position_embeddings=512, tie_embeddings=True,
    moe=MoeShape(num_experts=8, experts_per_token=2, expert_size=96, sparse_layers=(0, 1, 2), normalized=True),
)  # fmt: skip
"""The demo's, whose dense twin is as wide as the experts of a token."""
RECORD = ("name", "date", "command", "machine", "versions", "settings", "notes")
"""What `write_result` adds to figures."""
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 16, 8, 24, 45
TRAINERS, EXPERT_RANKS, TENSOR_RANKS = 128, 32, 8
"""Ranks of the trainer of 235B, over how many its experts go, and ranks of a generator."""
LAYERS, DIM, EXPERTS, WIDTH, VOCAB, QUERY, KV_HEADS, HEAD = 94, 4096, 128, 1536, 151_936, 8192, 4, 128
NOTES = """\
`decode_share`: bytes per second of the weights of the experts that were chosen, with router and choice, over bytes per
second of a dense feed-forward through the same kernels, which has as many rows as an expert has on average; both from
memory, the least of all cases. `route_share`: CPU time of a forward of 32 rows that records the experts of each token,
less that of one that does not, over the former, without attention, logits and sampling, so an upper bound.
`plan_s`: what a trainer rank of 235B plans before the first sync, from what all 128 ranks hold (experts over 32, their
rows over 4) to generators of tensor parallel 8, in bfloat16 and in 8 bits, the larger; nothing is transferred.
`step_ratio`: CPU time of forward, backward and AdamW of the demo's mixture, with recorded experts, over that of a dense
model that is as wide as the experts of a token, in turns.
`kl_ratio`: exact KL(generator || float32 trainer) per response token of the demo's mixture, with recorded experts, over
that of its dense twin in the same precision, both after their warm starts; `kl_ratio_live`: without.
`kl_of_runs`: `kl_to_behavior` over the steps of demo runs with router replay and without, one seed. `kl_by_cause`:
exact KL of what a generator samples to the policy a step later, divided, mean over every 30th step of the runs with
replay; on and off are of the same tokens and weights.
`accuracy_after`: greedy, on 2,048 problems that were not trained on, mean over seeds; `demo_time_ratio`: CPU time of
all processes of the mixture's run over that of the dense demo, median over seeds; `demo_wall_ratio`: by the clock;
`demo_steps_ratio`: by the clock from the first step on. The former two have start and evaluations in them.
Other work shared the machine: shares are of calls that took turns, seconds are upper bounds.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One case: what is compared at some number of rows."""

    sparse: Callable[[], object]
    dense: Callable[[], object]
    sparse_bytes: float
    dense_bytes: float


def speed() -> dict[str, Any]:
    """Kernels, plans and steps."""
    cases = {
        f"{name}, {kind}, {rows} rows": _compared(_pairs(sizes, kind, rows))
        for name, sizes in SIZES.items() for kind in TYPES for rows in ROWS
    }  # fmt: skip
    recorded = {kind: _recorded(kind) for kind in ("bfloat16", "int8")}
    plans = {dtype: _plan(dtype) for dtype in ("bfloat16", "float8_e4m3fn")}
    steps = _steps()
    return {
        "decode_share": min(one["share"] for one in cases.values()),
        "route_share": max(one["share"] for one in recorded.values()),
        "plan_s": max(one["wall_s"] for one in plans.values()),
        "step_ratio": steps["mixture"] / steps["dense"],
        "step_s": steps,
        "decode": cases,
        "recorded": recorded,
        "plans": plans,
        "paths": {shape: choice.path for shape, choice in paths.record().items()},
    }


def main() -> None:
    """Measures, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["speed", "kl", "causes", "learning"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of what is learnt")
    parser.add_argument("--steps", type=int, default=200, help="of what is learnt")
    parser.add_argument("--cause-steps", type=int, default=120, help="of the runs whose KL is divided by cause")
    parser.add_argument("--add-to", type=Path, metavar="FILE", help="a result whose other figures are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures, kept = dict[str, Any](), dict[str, Any]()
    if options.add_to:
        kept = json.loads(options.add_to.read_text(encoding="utf-8"))
        figures |= {key: value for key, value in kept.items() if key not in RECORD}
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "speed": speed,
            "kl": base_kl,
            "causes": lambda: causes(options.cause_steps, Path(folder)),
            "learning": lambda: learning(options.seeds, options.steps, Path(folder)),
        }
        for name in [options.only] if options.only else parts:
            figures |= parts[name]()
    if "kl_by_cause" in figures:
        PICTURE.write_text(draw(figures), encoding="utf-8")
    settings = {name: value for name, value in vars(options).items() if name != "add_to"}
    settings |= {"rows": ROWS, "repeats": REPEATS, "threads": 1}
    if kept:
        before = {"command": kept["command"], "date": kept["date"], "processor": kept["machine"]["processor"]}
        settings["kept_of"] = [*kept["settings"].get("kept_of", []), before]
    print(write_result("moe", settings, figures, NOTES.splitlines()))


def _steps() -> dict[str, float]:
    """CPU seconds of a step."""
    shapes = {"mixture": DEMO, "dense": replace(DEMO, family="qwen3", moe=None)}
    trainers = {
        name: Trainer(
            new_model(shape, 0, 0.06), TrainerConfig(), Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0)
        )
        for name, shape in shapes.items()
    }
    found = {name: list[float]() for name in trainers}
    for _ in range(REPEATS):
        for name, trainer in trainers.items():
            groups = _groups(trainer.model.shape)
            start = time.thread_time()
            finished(trainer.accumulate(groups, 1000))
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=False)
            found[name].append(time.thread_time() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def _groups(shape: ModelShape) -> list[SampleGroup]:
    """About what a step of the demo learns from."""
    rng = np.random.default_rng(0)
    width = shape.moe.route_width if shape.moe else 0

    def routes(rows: int) -> np.ndarray:
        num = shape.moe.num_experts if shape.moe else 1
        chosen = rng.random((rows, shape.num_layers, num)).argsort(-1)[..., : width // shape.num_layers]
        return chosen.reshape(rows, width).astype(np.uint8)

    def sample() -> TrainSample:
        columns = {
            "token_ids": rng.integers(0, shape.vocab_size, RESPONSE_TOKENS).astype(np.int32),
            "behavior_logprobs": np.full(RESPONSE_TOKENS, -1.0, np.float32),
            "policy_versions": np.zeros(RESPONSE_TOKENS, np.int32),
            "advantages": np.full(RESPONSE_TOKENS, rng.normal(), np.float32),
            "loss_mask": np.ones(RESPONSE_TOKENS, bool),
        }
        return TrainSample(columns=columns | ({"routes": routes(RESPONSE_TOKENS)} if shape.moe else {}))

    return [
        SampleGroup(
            prompt_token_ids_T=rng.integers(0, shape.vocab_size, PROMPT_TOKENS).astype(np.int32),
            samples=tuple(sample() for _ in range(SAMPLES)),
        )
        for _ in range(PROMPTS)
    ]


def _pairs(sizes: tuple[int, int, int, int], kind: str, rows: int) -> list[Pair]:
    """Layers that take turns, each with rows and routes of its own."""
    dim, width, num_experts, _ = sizes
    layer_bytes = 3 * dim * width * num_experts * TYPES[kind].itemsize
    return [_pair(sizes, kind, rows) for _ in range(max(2, math.ceil(FAR_BYTES / layer_bytes)))]


def _pair(sizes: tuple[int, int, int, int], kind: str, rows: int) -> Pair:
    dim, width, num_experts, per_row = sizes
    gate, up, down = (_stack(num_experts, *size, kind) for size in ((width, dim), (width, dim), (dim, width)))
    moe = MoeShape(
        num_experts=num_experts, experts_per_token=per_row, expert_size=width, sparse_layers=(0,), normalized=True
    )
    mixture = ExpertMixture(
        moe=moe, router=Linear(torch.randn(num_experts, dim)), selection_bias_E=None,
        experts=ExpertFeedForward(gate, up, down), shared=None, kernel=route_kernel(moe),
    )  # fmt: skip
    x = torch.randn(rows, dim)
    touched = len(mixture(x)[1].unique())
    few = torch.randn(max(1, round(rows * per_row / touched)), dim)
    into, back = _dense(gate, up), _linear(_turned(down))
    element = TYPES[kind].itemsize

    def dense() -> Tensor:
        return back(ops.silu_mul(*into(few).chunk(2, -1)))

    return Pair(
        sparse=lambda: mixture(x),
        dense=dense,
        sparse_bytes=3 * dim * width * touched * element,
        dense_bytes=3 * dim * width * num_experts * element,
    )


def _stack(num_experts: int, outputs: int, inputs: int, kind: str) -> Stack:
    weights = torch.randn(num_experts, outputs, inputs) / inputs**0.5
    return quantize_rows(weights, kind) if kind == "int8" else (weights.to(TYPES[kind]), None)


def _dense(gate: Stack, up: Stack) -> Linear:
    """All experts below each other."""
    values = torch.cat((gate[0].flatten(0, 1), up[0].flatten(0, 1)))
    scales = None if gate[1] is None or up[1] is None else torch.cat((gate[1].flatten(), up[1].flatten()))
    return Linear(values, scales)


def _turned(down: Stack) -> Stack:
    """All experts side by side; the scales of the first stand for all."""
    values, scales = down
    return values.transpose(0, 1).flatten(1).contiguous(), None if scales is None else scales[0].contiguous()


def _linear(stack: Stack) -> Linear:
    return Linear(*stack)


def _compared(pairs: Sequence[Pair]) -> dict[str, float]:
    seconds = {name: _median_s([getattr(one, name) for one in pairs]) for name in ("sparse", "dense")}
    gb_s = {
        name: 1e-9 * statistics.mean(getattr(one, f"{name}_bytes") for one in pairs) / seconds[name] for name in seconds
    }
    return {"gb_s": gb_s["sparse"], "dense_gb_s": gb_s["dense"], "share": gb_s["sparse"] / gb_s["dense"]}


def _median_s(calls: Sequence[Callable[[], object]]) -> float:
    """CPU time of one of several calls that take turns; the median of the rounds."""
    rounds = list[float]()
    for number in range(REPEATS + 1):
        start_s = time.thread_time()
        for call in calls:
            call()
        if number:
            rounds.append((time.thread_time() - start_s) / len(calls))
    return statistics.median(rounds)


@torch.inference_mode()
def _recorded(kind: Precision) -> dict[str, float]:
    model = GeneratorModel(MODEL, kind, "cpu")
    with torch.inference_mode(False):
        model.load(new_model(MODEL, 0, 0.05))
    assert MODEL.moe is not None
    token_N, position_N = torch.arange(32) * 7, torch.arange(32)
    routes_N_W = torch.empty(32, MODEL.moe.route_width, dtype=torch.uint8)

    def attend(_layer: int, q_N_H_K: Tensor, *_: Tensor) -> Tensor:
        return q_N_H_K

    rounds = dict[bool, list[float]]()
    for _ in range(8 * REPEATS):
        for records in (False, True):
            start_s = time.thread_time()
            model(token_N, position_N, attend, routes_N_W if records else None)
            rounds.setdefault(records, []).append(time.thread_time() - start_s)
    without_s, with_s = (statistics.median(rounds[records]) for records in (False, True))
    return {"forward_s": without_s, "forward_recorded_s": with_s, "share": (with_s - without_s) / with_s}


def _plan(dtype: str) -> dict[str, float]:
    """What each trainer rank does before the first sync: what all hold, into the layouts of a replica."""
    shapes = _shapes()
    held = [_held(shapes, rank) for rank in range(TRAINERS)]
    layouts = [lay_out(_wanted(shapes, rank, dtype)) for rank in range(TENSOR_RANKS)]
    start_s = time.perf_counter()
    (plan,) = plan_writers(layouts, held, [TRAINERS - 1])
    return {
        "wall_s": time.perf_counter() - start_s,
        "tensors": len(shapes),
        "parts_of_one_rank": sum(map(len, plan.parts)),
        "gb_of_one_generator_rank": 1e-9 * layouts[0].num_bytes,
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    kv = KV_HEADS * HEAD
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (DIM,), "self_attn.q_proj.weight": (QUERY, DIM),
        "self_attn.k_proj.weight": (kv, DIM), "self_attn.v_proj.weight": (kv, DIM),
        "self_attn.o_proj.weight": (DIM, QUERY), "self_attn.q_norm.weight": (HEAD,), "self_attn.k_norm.weight": (HEAD,),
        "post_attention_layernorm.weight": (DIM,), "mlp.gate.weight": (EXPERTS, DIM),
        "mlp.experts.gate_proj": (EXPERTS, WIDTH, DIM), "mlp.experts.up_proj": (EXPERTS, WIDTH, DIM),
        "mlp.experts.down_proj": (EXPERTS, DIM, WIDTH),
    }  # fmt: skip
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, DIM),
        "model.norm.weight": (DIM,),
        "lm_head.weight": (VOCAB, DIM),
    }
    return ends | {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}


def _held(shapes: dict[str, tuple[int, ...]], rank: int) -> list[TensorSpec]:
    """One rank of FSDP2 over all, experts first by their numbers."""
    found, (expert_rank, row_rank) = list[TensorSpec](), divmod(rank, TRAINERS // EXPERT_RANKS)
    for name, shape in shapes.items():
        if is_expert(name):
            box = _chunk(expert_box(shape, EXPERT_RANKS, expert_rank), 1, TRAINERS // EXPERT_RANKS, row_rank)
        else:
            box = _chunk(Box.whole(shape), 0, TRAINERS, rank)
        kind = "float32" if is_router(name) else "bfloat16"
        found.append(TensorSpec(name=name, global_shape=shape, box=box, dtype=kind))
    return found


def _chunk(box: Box, dim: int, num: int, rank: int) -> Box:
    size, step = box.shape[dim], -(-box.shape[dim] // num)
    return box.cut(dim, min(rank * step, size), min((rank + 1) * step, size))


def _wanted(shapes: dict[str, tuple[int, ...]], rank: int, dtype: str) -> list[TensorSpec]:
    found, by_expert = list[TensorSpec](), cuts_by_expert(EXPERTS, WIDTH, TENSOR_RANKS)
    for name, shape in shapes.items():
        if is_expert(name) and by_expert:
            box = expert_box(shape, TENSOR_RANKS, rank)
        else:
            box = tensor_parallel_box(name, shape, TENSOR_RANKS, rank, KV_HEADS)
        kind = "float32" if is_router(name) else dtype if is_quantizable(name) else "bfloat16"
        found.append(TensorSpec(name=name, global_shape=shape, box=box, dtype=kind))
        if kind in QUANTIZED:
            found.append(replace(found[-1], part="scales", dtype="float32"))
    return found


if __name__ == "__main__":
    main()
