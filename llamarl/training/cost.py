"""The arithmetic cost of training on given tokens, from the shape of the model. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.config.roles import LoraConfig
from llamarl.models.shape import ModelShape
from llamarl.types import SampleGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Cost of one optimizer step, for any layout and microbatches: a prompt counts once per group."""

    flops: float
    """Useful FLOPs. Recomputation does not count."""
    padding_share: float
    """Share of the rows of attention to responses that are behind the end of a response, 0 to 1."""


def step_cost(
    shape: ModelShape, groups: Sequence[SampleGroup], lora: LoraConfig | None = None, num_inputs: float = float("inf")
) -> StepCost:
    """Returns the cost of a step on `groups`. Causal pairs are counted exactly.

    Args:
        num_inputs: number of computed tokens, which is smaller than that of all groups if groups shared a beginning.
    """
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
    return StepCost(
        flops=shape.step_flops(int(min(tokens, num_inputs)), targets, pairs, lora),
        padding_share=1 - (targets - num_responses) / padded if padded else 0.0,
    )
