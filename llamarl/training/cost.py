"""Costs of training on some tokens: arithmetic, from the shape of the model. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.config.trainer import LoraConfig
from llamarl.models.shape import ModelShape
from llamarl.types import SampleGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Cost of one optimizer step, whatever the layout and the microbatches: a prompt counts once per group."""

    flops: float
    """Useful ones: recomputed parts don't count."""
    padding_share: float
    """Share of rows in which attention computes responses that lie behind the end of a response, 0 to 1."""


def step_cost(shape: ModelShape, groups: Sequence[SampleGroup], lora: LoraConfig | None = None) -> StepCost:
    """Forward and twice as much for backward: 2 FLOPs per weight that a token meets, and 4 per query channel and pair
    of tokens that see each other (Kaplan et al., arXiv 2001.08361, table 1; causal pairs counted exactly). A frozen
    weight has no gradient, so backward costs it as much as forward."""
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    scalars, adapters = shape.num_layers * 2 * hidden * (query + kv) + shape.feed_forward_scalars, 0
    if lora:
        outer = {"q_proj": query, "o_proj": query, "k_proj": kv, "v_proj": kv}
        adapters = lora.rank * sum(hidden + outer.get(projection, inner) for projection in lora.targets)
    tokens = targets = pairs = padded = 0
    for group in groups:
        if not group.samples:
            continue
        prompt, lengths = len(group.prompt_token_ids_T), [len(sample.token_ids_T) for sample in group.samples]
        inputs = [length - 1 for length in lengths]
        tokens, targets = tokens + prompt + sum(inputs), targets + sum(lengths)
        pairs += prompt * (prompt + 1) // 2 + sum(length * prompt + length * (length + 1) // 2 for length in inputs)
        padded += len(inputs) * max(inputs)
    num_responses = sum(len(group.samples) for group in groups)
    matrices = 2 * (scalars * tokens + hidden * shape.vocab_size * targets)
    flops = (2 if lora else 3) * matrices + 3 * shape.num_layers * (2 * adapters * tokens + 4 * query * pairs)
    return StepCost(flops=float(flops), padding_share=1 - (targets - num_responses) / padded if padded else 0.0)
