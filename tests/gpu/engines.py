"""What generation asks of a pretended GPU. Runs where `guard.begin` has been called; tests compare what it returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamarl.generation.engine import Engine
from llamarl.generation.model import GeneratorModel, KvPrecision, Precision
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape
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


@dataclass
class Generated:
    """By an engine."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    finite: bool = True
    apart: float = 0.0
    """Largest difference of behavior log-probs to those of scoring."""
    steps: list[Ledger] = field(default_factory=list)
    """Of each step in which all rows decode, nothing is prefilled and nothing captured."""
    flash_calls: int = 0
    """For chunks of prompts."""
    scoring: Ledger = field(default_factory=Ledger)


def generate(
    family: str,
    precision: Precision,
    graphs: bool,
    sampling: dict[str, Any],
    kv_dtype: KvPrecision = "auto",
    prefill_tokens: int = 64,
) -> Generated:
    shape = ModelShape(**SIZES, family=family, tie_embeddings=family == "llama")
    model = GeneratorModel(shape, precision, "cuda:0", kv_dtype=kv_dtype)
    model.load(new_model(shape, 3, 0.2))
    engine = Engine(model, max_running=8, prefill_tokens=prefill_tokens, kv_bytes=1 << 22, graphs=graphs)
    engine.submit(
        GenerationRequest(
            group_id=group, prompt_token_ids_T=np.arange(1, 18 + group, dtype=np.int32), group_size=3,
            sampling=SamplingParams(max_new_tokens=24, seed=7, **sampling),
        )
        for group in range(2)
    )  # fmt: skip
    CALLS.clear()
    found, shapes, behavior = Generated(), Counter[int](), dict[tuple[int, int], np.ndarray]()
    while engine.has_work:
        before = engine.stats()
        with ledger() as step:
            rollouts = engine.step()
        after = engine.stats()
        if before.prefill_tokens == after.prefill_tokens and before.running == after.running == 6:
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
    found.apart = float(np.concatenate(apart).max())
    found.finite = all(np.isfinite(one).all() for one in behavior.values())
    return found
