"""What generation asks of a pretended GPU. Runs where `guard.begin` has been called; tests compare what it returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel, KvPrecision, Precision
from llamarl.kernels import ops
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.models.transformer import Rope, Transformer
from llamarl.types import GenerationRequest, SamplingParams
from tests.gpu.kernels import CALLS
from tests.gpu.pretend import Ledger, ledger

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 208,
    "max_position_embeddings": 128,
}

MOE = MoeShape(
    num_experts=8, experts_per_token=2, expert_size=32, sparse_layers=(1,), scoring="sigmoid", normalized=True,
    num_groups=4, groups_per_token=2, shared_size=32, has_selection_bias=True,
)  # fmt: skip
MIXTURES = {
    "qwen3_moe": replace(
        MOE, sparse_layers=(0, 1), scoring="softmax", num_groups=1, groups_per_token=1, shared_size=0,
        has_selection_bias=False,
    ),
    "glm4_moe": MOE,
}  # fmt: skip


@dataclass
class Generated:
    """By an engine."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    finite: bool = True
    apart: float = 0.0
    """Difference of behavior log-probs to those of scoring that four fifths do not exceed: sums in another order that
    lie between two bfloat16 numbers may round either way, and the tokens behind them see it."""
    steps: list[Ledger] = field(default_factory=list)
    """Of each step in which all rows decode, nothing is prefilled and nothing captured."""
    described: str = ""
    """What computes, for the log."""
    flash_calls: int = 0
    """For chunks of prompts."""
    scoring: Ledger = field(default_factory=Ledger)


def made(shape: ModelShape) -> Transformer:
    """With selection biases that differ."""
    model = new_model(shape, 3, 0.2)
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.linspace(-0.2, 0.2, len(tensor)))
    return model


def generate(
    family: str,
    precision: Precision,
    graphs: bool | None,
    sampling: dict[str, Any],
    kv_dtype: KvPrecision = "auto",
    prefill_tokens: int = 64,
) -> Generated:
    shape = ModelShape(**SIZES, family=family, tie_embeddings=family == "llama", moe=MIXTURES.get(family))
    model = GeneratorModel(shape, precision, "cuda:0", kv_dtype=kv_dtype)
    model.load(made(shape))
    engine = Engine(
        model, EngineSettings(max_running=8, prefill_tokens=prefill_tokens, kv_bytes=1 << 22, graphs=graphs)
    )
    engine.submit(
        GenerationRequest(
            group_id=group, prompt_token_ids_T=np.arange(1, 18 + group, dtype=np.int32), group_size=3,
            sampling=SamplingParams(max_new_tokens=24, seed=7, **sampling),
        )
        for group in range(2)
    )  # fmt: skip
    CALLS.clear()
    found, shapes, behavior = (
        Generated(described=engine.describe()),
        Counter[int](),
        dict[tuple[int, int], np.ndarray](),
    )

    def captured() -> int:
        return getattr(engine._graphs, "num_captured", 0)

    while engine.has_work:
        before, graphs_before = engine.stats(), captured()
        with ledger() as step:
            rollouts = engine.step()
        after, is_replay = engine.stats(), captured() == graphs_before
        if is_replay and before.prefill_tokens == after.prefill_tokens and before.running == after.running == 6:
            shapes[step.kernels] += 1
            found.steps.append(step)
        for one in rollouts:
            key = one.group_id, one.index
            found.tokens[key], behavior[key] = one.token_ids_T.tolist(), one.behavior_logprobs_T
    found.flash_calls = CALLS["flash of one"]
    sequences = [np.concatenate([np.arange(1, 18 + key[0]), tokens]) for key, tokens in found.tokens.items()]
    with ledger() as found.scoring:
        scores = engine.score(sequences)
    apart = [np.abs(behavior[key] - score[-len(behavior[key]) :]) for key, score in zip(behavior, scores, strict=True)]
    found.apart = float(np.quantile(np.concatenate(apart), 0.8))
    found.finite = all(np.isfinite(one).all() for one in behavior.values())
    return found


def rotations() -> list[tuple[str, bool]]:
    """Types by which bfloat16 generation rotates while it decodes and scores, and whether scoring's queries are the
    trainer's, bit for bit, behind 100 others."""
    found, angles = list[str](), Rope.__call__

    def recorded(rope: Rope, positions_N: torch.Tensor, dtype: torch.dtype) -> Any:
        found.append(str(dtype))
        return angles(rope, positions_N, dtype)

    Rope.__call__ = recorded
    try:
        generate("qwen3", "bfloat16", False, {"temperature": 1.0})
    finally:
        Rope.__call__ = angles
    q = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotation = Rope(ModelShape(**SIZES, family="llama"))(torch.arange(100, 108), torch.float32)
    own, _ = ops.rotate(q.clone(), q[:, :2].clone(), rotation, None, 1e-6)
    trainers = ops.rotate_by_torch(q, rotation).bfloat16()
    return [(dtype, bool(own.dtype == torch.bfloat16 and torch.equal(own, trainers))) for dtype in sorted({*found})]
