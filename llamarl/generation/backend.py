"""The interface between the generator and an engine, and the rules by which an engine accepts requests. No torch at run
time.

`GenerationBackend` is what every engine implements; `tests/generation/conformance.py` tests each of them. `accept`
sorts the rollouts of a request into those to generate and FAILED ones that name the fault.

Shape suffixes: T tokens of one sequence, N packed tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from llamarl.config.schema import MIN_TEMPERATURE
from llamarl.models.shape import ModelShape
from llamarl.models.vocabulary import Spans, is_unused
from llamarl.types import CandidateSets, FinishReason, GenerationRequest, Rollout, SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llamarl.models.transformer import Attend

_INT32_MAX = (1 << 31) - 1
_TEMPERATURES = f"it must be 0 (greedy) or at least {MIN_TEMPERATURE}"
_SHARED_FIELDS = {field.name for field in fields(GenerationRequest)} - {"prompt_token_ids_T", "partials"}


def response_limit(request: GenerationRequest, context: int) -> int:
    """Returns the largest number of tokens of a rollout, over all its segments."""
    return min(request.sampling.max_new_tokens, context - len(request.prompt_token_ids_T))


def same(one: GenerationRequest, other: GenerationRequest) -> bool:
    """Returns True if both requests have the same prompt and settings, so that rollouts can move from one to the
    other."""
    has_same_settings = all(getattr(one, name) == getattr(other, name) for name in _SHARED_FIELDS)
    return has_same_settings and np.array_equal(one.prompt_token_ids_T, other.prompt_token_ids_T)


def failed(request: GenerationRequest, index: int, error: str) -> Rollout:
    """Returns a rollout that cannot be generated."""
    return Rollout.empty(request.group_id, index, FinishReason.FAILED, error)


def accept(
    request: GenerationRequest,
    *,
    context: int,
    vocab_size: int,
    can_decode: bool,
    is_known: bool = False,
    unused_ids: Spans = (),
) -> tuple[list[Rollout], list[Rollout]]:
    """Sorts the rollouts of a request.

    Args:
        can_decode: whether the engine can turn tokens into text, which stop strings need.
        is_known: whether the engine holds rollouts of the group, so that prompt and sampling were checked before.
        unused_ids: ids below `vocab_size` that have no token.

    Returns:
        Rollouts to generate: the partial rollouts of the request, or empty ones if it has none. Then the refused
            rollouts: FAILED, or LENGTH if an observation has filled the context.
    """
    partials = request.starts()
    indices = {partial.index for partial in partials} or {0}
    error = "" if is_known else _request_error(request, context, vocab_size, can_decode, unused_ids)
    if len(indices) < len(partials):
        error = f"partials hold index {sorted(partial.index for partial in partials)}; give each index once"
    if error:
        return [], [failed(request, index, error) for index in sorted(indices)]
    if not request.partials:
        return list(partials), []
    accepted, refused, limit = list[Rollout](), list[Rollout](), response_limit(request, context)
    for partial in partials:
        if error := _partial_error(request, partial, limit, vocab_size, unused_ids):
            refused.append(failed(request, partial.index, error))
        elif partial.num_tokens >= limit:
            refused.append(_full(partial))
        else:
            accepted.append(partial)
    return accepted, refused


def _full(partial: Rollout) -> Rollout:
    """Returns a rollout whose last observation has filled the context, cut after its last sampled token."""
    end = int(np.flatnonzero(partial.is_sampled_T)[-1]) + 1
    columns = {name: values_T[:end] for name, values_T in partial.columns.items()}
    return replace(partial, columns=columns, finish_reason=FinishReason.LENGTH)


def _request_error(
    request: GenerationRequest, context: int, vocab_size: int, can_decode: bool, unused_ids: Spans
) -> str:
    prompt_T = request.prompt_token_ids_T
    if not len(prompt_T):
        return "the prompt is empty; at least one token is needed"
    if len(prompt_T) >= context:
        return f"the prompt has {len(prompt_T)} tokens and the context {context}; no token can be generated"
    if error := unknown_id(prompt_T, vocab_size, unused_ids):
        return f"the prompt has {error}"
    if request.group_size < 1:
        return f"group_size = {request.group_size}; it must be at least 1"
    if request.segment_tokens < 0:
        return f"segment_tokens = {request.segment_tokens}; it must be 0 (never park) or more"
    if request.sampling.stop_strings and not can_decode:
        return f"stop_strings = {request.sampling.stop_strings}; this engine has no tokenizer, use stop_token_ids"
    return _sampling_error(request.sampling)


def _sampling_error(params: SamplingParams) -> str:
    """Returns the fault of sampling parameters, or "" if they have none. The comparisons refuse NaN."""
    checks = (
        ("temperature", params.temperature == 0 or MIN_TEMPERATURE <= params.temperature < float("inf"), _TEMPERATURES),
        ("top_p", 0 < params.top_p <= 1, "it must be above 0 and at most 1"),
        ("top_k", 0 <= params.top_k <= _INT32_MAX, "it must be 0 (off) or positive, and below 2^31"),
        ("min_p", 0 <= params.min_p <= 1, "it must be between 0 and 1"),
        ("max_new_tokens", params.max_new_tokens >= 1, "it must be at least 1"),
        ("stop_token_ids", all(0 <= token <= _INT32_MAX for token in params.stop_token_ids), "each must be a token id"),
        ("stop_strings", "" not in params.stop_strings, "each must have a character"),
    )
    return next(
        (f"{name} = {getattr(params, name)!r}; {error}" for name, is_right, error in checks if not is_right), ""
    )


def _partial_error(request: GenerationRequest, partial: Rollout, limit: int, vocab_size: int, unused_ids: Spans) -> str:
    name, num_tokens = f"partial rollout {partial.index}", partial.num_tokens
    if partial.group_id != request.group_id:
        return f"{name} is of group {partial.group_id}, not {request.group_id}"
    if not 0 <= partial.index < request.group_size:
        return f"{name} is not in a group of {request.group_size}"
    if partial.finish_reason.is_final:
        return f"{name} ended with {partial.finish_reason}; only parked and aborted rollouts continue"
    if any(len(values_T) != num_tokens for values_T in partial.columns.values()):
        lengths = ", ".join(f"{len(values_T)} {column}" for column, values_T in partial.columns.items())
        return f"{name} has columns of different lengths: {lengths}"
    if num_tokens >= limit and partial.is_sampled_T[-1]:
        return f"{name} has {num_tokens} tokens, but the limit is {limit}"
    if error := unknown_id(partial.token_ids_T, vocab_size, unused_ids):
        return f"{name} has {error}"
    return ""


def unknown_id(token_ids_T: np.ndarray, vocab_size: int, unused_ids: Spans = ()) -> str:
    """Returns text that names a token outside of the vocabulary, or "" if there is none."""
    unknown_T = (token_ids_T < 0) | (token_ids_T >= vocab_size)
    if unknown_T.any():
        return f"token id {token_ids_T[unknown_T][0]}, outside the vocabulary of {vocab_size}"
    unused_T = is_unused(token_ids_T, unused_ids)
    return f"token id {token_ids_T[unused_T][0]}, for which the tokenizer has no token" if unused_T.any() else ""


class EngineModel(Protocol):
    """A decoder that the native engine can run: `Transformer`, or `GeneratorModel`."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of cached keys and values."""
        ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Returns hidden states after the final norm, [N, D]."""
        ...

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        """Returns [N, V]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Counters and gauges of an engine. Counters start at 0 with the engine."""

    running: int
    """Rollouts that decode."""
    waiting: int
    """Rollouts that hold no blocks: not admitted yet, or parked."""
    kv_use: float
    """Share of KV blocks in use, 0 to 1."""
    decode_tokens: int
    """Tokens sampled."""
    prefill_tokens: int
    """Tokens prefilled, including tokens of resumed and recomputed rollouts."""
    steps: int
    """Forwards."""
    parked: int = 0
    """Times that a rollout lost its blocks to an older rollout."""
    recomputed_tokens: int = 0
    """Tokens prefilled again because the weights changed."""
    recompute_s: float = 0.0
    """Wall seconds of steps with recomputed tokens, times the share of these tokens in the step."""
    slot_steps: int = 0
    """Sum, over steps in which rollouts waited, of the number of rollouts that could decode at once."""
    filled_slot_steps: int = 0
    """Sum, over the same steps, of the number of rollouts that decoded."""


class RolloutEngine(Protocol):
    """Turns requests into rollouts. Not thread-safe. The caller repeats `step` while `has_work`."""

    @property
    def has_work(self) -> bool:
        """True if `step` has something to compute or to return."""
        ...

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queues requests. A request that cannot run comes out of `step` as FAILED rollouts; the other requests run.

        Raises:
            ValueError: a group id is in the engine already. Nothing was queued.
        """
        ...

    def step(self) -> list[Rollout]:
        """Computes one step. Returns rollouts that finished, failed, or were parked after `segment_tokens`."""
        ...

    def abort(self, group_ids: Iterable[int]) -> list[Rollout]:
        """Withdraws groups. Their unfinished rollouts, with the tokens so far, come now or from `step`. Ids that are
        not in the engine are ignored."""
        ...

    def so_far(self, group_ids: Iterable[int]) -> list[Rollout]:
        """Returns copies of the rollouts of these groups that decode now, or nothing if the engine cannot tell."""
        ...

    def stats(self) -> EngineStats:
        """Returns the current state of the engine."""
        ...


class GenerationBackend(RolloutEngine, Protocol):
    """An engine whose weights change, and which scores given tokens."""

    @property
    def keyed_sampling(self) -> bool:
        """True if a sampled rollout depends only on its seed, group id, index and the weights, not on the rollouts that
        run next to it."""
        ...

    def sleep(self) -> None:
        """Frees the memory of weights, keys and values until weights are replaced. There must be no work."""
        ...

    def release(self, rollouts: Iterable[tuple[int, int]]) -> None:
        """Frees the KV cache of rollouts, by group and index, that ended a turn of a request with `has_turns` and will
        not return."""
        ...

    def set_version(self, version: int) -> None:
        """Notes that the weights were replaced between two steps. Tokens sampled from now on carry `version`."""
        ...

    def score(self, sequences: Sequence[np.ndarray], candidates: CandidateSets | None = None) -> list[np.ndarray]:
        """Returns the natural log-probability of each token given the tokens before it, at temperature 1, by the
        current weights.

        Running rollouts are not disturbed.

        Args:
            sequences: token ids, int [T] each, T >= 1.
            candidates: asks the native engine for log-probabilities in three ways, which separate the causes of a
                difference.

        Returns:
            float32 [T - 1] each, for all tokens but the first. With `candidates` [3, T - 1], at their temperature: by
                these weights in float32 arithmetic (NaN if unknown here), by the engine's arithmetic, and by the
                engine's arithmetic among candidates only.

        Raises:
            ValueError: a sequence is empty, longer than the context, or has unknown ids.
        """
        ...
