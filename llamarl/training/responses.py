"""One number per response token from any decoder. A group's prompt is computed once for all its responses.

Shape suffixes: N packed input tokens, R response tokens, D model dim, T tokens of one response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from llamarl.models.attention import packed_attend
from llamarl.models.transformer import Attend
from llamarl.training.packing import Microbatch, pack, sequences_of
from llamarl.types import FinishReason, Prompt, Rollout, SampleGroup, TrainSample

Forward = Callable[[Tensor, Tensor, Attend], Tensor]
"""forward(token_ids_N, positions_N, attend) -> hidden_N_D."""


def hidden_of(forward: Forward, microbatch: Microbatch, device: torch.device) -> Tensor:
    """Returns hidden states that predict the response tokens, [R, D]."""
    attend = packed_attend(microbatch.prompt_lengths, microbatch.response_lengths, device)
    ids_N, positions_N, predictors_R = (
        torch.from_numpy(array).to(device, non_blocking=True)
        for array in (microbatch.token_ids_N, microbatch.positions_N, microbatch.predictors_R)
    )
    return forward(ids_N, positions_N, attend).index_select(0, predictors_R)


def per_response(
    groups: Sequence[tuple[Prompt, Sequence[Rollout]]],
    max_tokens: int,
    compute: Callable[[Sequence[Microbatch]], Iterable[np.ndarray]],
) -> list[list[np.ndarray]]:
    """Returns a number for each response token, [T] per rollout of each group; 0 for failed rollouts.

    A group has its own microbatches, so its bits do not depend on other groups. Sequences of agents are computed one by
    one; their tokens before the first sampled one get 0.

    Args:
        compute: returns the numbers of each microbatch, float32 [R].
    """
    packed = list[Microbatch]()
    for prompt, rollouts in groups:
        packed += pack(_samples(prompt, list(filter(_is_computed, rollouts))), max_tokens)
    numbers = chain.from_iterable(map(_split, packed, compute(packed)))
    return [[_numbers(rollout, numbers) for rollout in rollouts] for _, rollouts in groups]


def _samples(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[SampleGroup]:
    if not any("sequence" in rollout.columns for rollout in rollouts):
        samples = tuple(TrainSample(columns={"token_ids": rollout.token_ids_T}) for rollout in rollouts)
        return [SampleGroup(prompt_token_ids_T=prompt.token_ids_T, samples=samples)]
    episodes = (sequences_of(rollout.columns | {"loss_mask": rollout.is_sampled_T}) for rollout in rollouts)
    return [
        SampleGroup(prompt_token_ids_T=prompt.token_ids_T[:0], samples=(TrainSample(columns=columns),))
        for columns in chain.from_iterable(episodes)
    ]


def _numbers(rollout: Rollout, computed: Iterator[np.ndarray]) -> np.ndarray:
    if not _is_computed(rollout):
        return np.zeros(rollout.num_tokens, np.float32)
    if "sequence" not in rollout.columns:
        return next(computed)
    parts = ((len(columns["token_ids"]), next(computed)) for columns in sequences_of(rollout.columns))
    return np.concatenate([np.pad(part, (length - len(part), 0)) for length, part in parts])


def _is_computed(rollout: Rollout) -> bool:
    return rollout.num_tokens > 0 and rollout.finish_reason is not FinishReason.FAILED


def _split(batch: Microbatch, computed_R: np.ndarray) -> Iterable[np.ndarray]:
    lengths = [inputs + 1 for responses in batch.response_lengths for inputs in responses]
    return np.split(computed_R, np.cumsum(lengths)[:-1])
