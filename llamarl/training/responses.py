"""One number per response token from any decoder, a group's prompt computed once for all its responses.

Shape suffixes: N packed input tokens, R response tokens, D model dim, T tokens of one response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.models.transformer import Attend
from llamarl.rollouts.packing import Microbatch, pack
from llamarl.training.attention import shared_prefix_attend
from llamarl.types import FinishReason, Prompt, Rollout, SampleGroup, TrainSample

Forward = Callable[[Tensor, Tensor, Attend], Tensor]
"""forward(token_ids_N, positions_N, attend) -> hidden_N_D."""


def hidden_of(forward: Forward, microbatch: Microbatch, device: torch.device) -> Tensor:
    """Hidden states that predict the response tokens, [R, D]."""
    attend = shared_prefix_attend(microbatch.prompt_lengths, microbatch.response_lengths, device)
    ids_N, positions_N, predictors_R = (
        torch.from_numpy(array).to(device)
        for array in (microbatch.token_ids_N, microbatch.positions_N, microbatch.predictors_R)
    )
    return forward(ids_N, positions_N, attend).index_select(0, predictors_R)


@torch.inference_mode()
def per_response(
    groups: Iterable[tuple[Prompt, Sequence[Rollout]]], max_tokens: int, compute: Callable[[Microbatch], Tensor]
) -> list[list[np.ndarray]]:
    """What `compute` says, [R], of each response token, as float32 [T] per rollout of each group; 0 for failed ones.

    A group is computed by itself, so that its bits do not depend on what else has arrived.
    """
    answers = list[list[np.ndarray]]()
    for prompt, rollouts in groups:
        can = [one.num_tokens > 0 and one.finish_reason is not FinishReason.FAILED for one in rollouts]
        samples = tuple(_sample(rollout.token_ids_T) for rollout in compress(rollouts, can))
        group = SampleGroup(prompt_token_ids_T=prompt.token_ids_T, samples=samples)
        found = iter(chain.from_iterable(_split(batch, compute(batch)) for batch in pack([group], max_tokens)))
        answers.append([
            next(found) if is_computed else np.zeros(rollout.num_tokens, np.float32)
            for rollout, is_computed in zip(rollouts, can, strict=True)
        ])  # fmt: skip
    return answers


def _split(batch: Microbatch, computed_R: Tensor) -> Iterable[np.ndarray]:
    lengths = [inputs + 1 for responses in batch.response_lengths for inputs in responses]
    return np.split(computed_R.float().cpu().numpy(), np.cumsum(lengths)[:-1])


def _sample(token_ids_T: np.ndarray) -> TrainSample:
    nothing: dict[str, Any] = dict.fromkeys(("behavior_logprobs_T", "advantages_T"), np.zeros(0, np.float32))
    return TrainSample(
        response_token_ids_T=token_ids_T,
        policy_versions_T=np.zeros(0, np.int32),
        loss_mask_T=np.zeros(0, bool),
        **nothing,
    )
