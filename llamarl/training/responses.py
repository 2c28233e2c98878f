"""One number per response token from any decoder, a group's prompt computed once for all its responses.

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
    """Hidden states that predict the response tokens, [R, D]."""
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
    """Numbers that `compute` gives, float32 [R] per microbatch, for each response token: [T] per rollout of each group;
    0 for failed ones.

    A group has microbatches of its own, so that its bits do not depend on what else has arrived. Sequences of agents
    are computed one by one; what they begin with, up to the first token that was sampled, is 0.
    """
    packed = list[Microbatch]()
    for prompt, rollouts in groups:
        packed += pack(_samples(prompt, list(filter(_is_computed, rollouts))), max_tokens)
    found = chain.from_iterable(map(_split, packed, compute(packed)))
    return [[_numbers(one, found) for one in rollouts] for _, rollouts in groups]


def _samples(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[SampleGroup]:
    if not any("sequence" in one.columns for one in rollouts):
        samples = tuple(TrainSample(columns={"token_ids": one.token_ids_T}) for one in rollouts)
        return [SampleGroup(prompt_token_ids_T=prompt.token_ids_T, samples=samples)]
    episodes = (sequences_of(one.columns | {"loss_mask": one.is_sampled_T}) for one in rollouts)
    return [
        SampleGroup(prompt_token_ids_T=prompt.token_ids_T[:0], samples=(TrainSample(columns=one),))
        for one in chain.from_iterable(episodes)
    ]


def _numbers(rollout: Rollout, found: Iterator[np.ndarray]) -> np.ndarray:
    if not _is_computed(rollout):
        return np.zeros(rollout.num_tokens, np.float32)
    if "sequence" not in rollout.columns:
        return next(found)
    parts = ((len(one["token_ids"]), next(found)) for one in sequences_of(rollout.columns))
    return np.concatenate([np.pad(part, (length - len(part), 0)) for length, part in parts])


def _is_computed(rollout: Rollout) -> bool:
    return rollout.num_tokens > 0 and rollout.finish_reason is not FinishReason.FAILED


def _split(batch: Microbatch, computed_R: np.ndarray) -> Iterable[np.ndarray]:
    lengths = [inputs + 1 for responses in batch.response_lengths for inputs in responses]
    return np.split(computed_R, np.cumsum(lengths)[:-1])
