"""Requests in an engine: one becomes rollouts to go on with, and FAILED ones that say what is wrong. No torch.

Shape suffix: T tokens of one sequence.

`GenerationBackend`: what the generator asks of an engine, whoever computes. No torch at run time.

Every backend runs `tests/generation/conformance.py`.

Shape suffixes: T tokens of one sequence, N packed tokens, B rows of a step, D model dim, V vocabulary, W experts of a
token in all layers.
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
_OF_ALL_ROLLOUTS = {one.name for one in fields(GenerationRequest)} - {"prompt_token_ids_T", "partials"}


def response_limit(request: GenerationRequest, context: int) -> int:
    """Most tokens that a rollout may have, over all its segments."""
    return min(request.sampling.max_new_tokens, context - len(request.prompt_token_ids_T))


def same(one: GenerationRequest, other: GenerationRequest) -> bool:
    """Rollouts of one can go on in the other."""
    alike = all(getattr(one, name) == getattr(other, name) for name in _OF_ALL_ROLLOUTS)
    return alike and np.array_equal(one.prompt_token_ids_T, other.prompt_token_ids_T)


def failed(request: GenerationRequest, index: int, error: str) -> Rollout:
    """A rollout that cannot be generated."""
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
    """Sort a request's rollouts.

    Args:
        can_decode: the engine can turn tokens into text, which stop strings need.
        is_known: rollouts of the group are here, so that prompt and sampling have been looked at.
        unused_ids: ids below `vocab_size` that have no token.

    Returns:
        Rollouts to go on with: the partials, or without any, empty ones. And those refused, as FAILED; or as LENGTH,
        where an observation has filled the context.
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
    going, refused, limit = list[Rollout](), list[Rollout](), response_limit(request, context)
    for partial in partials:
        if error := _partial_error(request, partial, limit, vocab_size, unused_ids):
            refused.append(failed(request, partial.index, error))
        elif partial.num_tokens >= limit:
            refused.append(_full(partial))
        else:
            going.append(partial)
    return going, refused


def _full(partial: Rollout) -> Rollout:
    """Its last observation leaves no room in the context: it ends with what was sampled before."""
    end = int(np.flatnonzero(partial.is_sampled_T)[-1]) + 1
    columns = {name: values_T[:end] for name, values_T in partial.columns.items()}
    return replace(partial, columns=columns, finish_reason=FinishReason.LENGTH)


def _request_error(
    request: GenerationRequest, context: int, vocab_size: int, can_decode: bool, unused_ids: Spans
) -> str:
    """Text that says what is wrong with a request; empty when nothing is."""
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
        return f"segment_tokens = {request.segment_tokens}; it must be 0 (never park) or positive"
    if request.sampling.stop_strings and not can_decode:
        return f"stop_strings = {request.sampling.stop_strings}; this engine has no tokenizer, use stop_token_ids"
    return _sampling_error(request.sampling)


def _sampling_error(params: SamplingParams) -> str:
    """Text that says what is wrong with sampling parameters; empty when nothing is. Written so that NaN is wrong."""
    checks = (
        ("temperature", params.temperature == 0 or MIN_TEMPERATURE <= params.temperature < float("inf"), _TEMPERATURES),
        ("top_p", 0 < params.top_p <= 1, "it must be above 0 and at most 1"),
        ("top_k", 0 <= params.top_k <= _INT32_MAX, "it must be 0 (off) or positive, and below 2^31"),
        ("min_p", 0 <= params.min_p <= 1, "it must be between 0 and 1"),
        ("max_new_tokens", params.max_new_tokens >= 1, "it must be at least 1"),
        ("stop_token_ids", all(0 <= one <= _INT32_MAX for one in params.stop_token_ids), "these are no tokens"),
        ("stop_strings", "" not in params.stop_strings, "an empty string stops nothing"),
    )
    return next(
        (f"{name} = {getattr(params, name)!r}; {error}" for name, is_right, error in checks if not is_right), ""
    )


def _partial_error(request: GenerationRequest, partial: Rollout, limit: int, vocab_size: int, unused_ids: Spans) -> str:
    """Why a partial rollout cannot go on; empty when it can."""
    name, num_tokens = f"partial rollout {partial.index}", partial.num_tokens
    if partial.group_id != request.group_id:
        return f"{name} is of group {partial.group_id}, not {request.group_id}"
    if not 0 <= partial.index < request.group_size:
        return f"{name} is not in a group of {request.group_size}"
    if partial.finish_reason.is_final:
        return f"{name} ended with {partial.finish_reason}; only parked and aborted ones go on"
    if any(len(values_T) != num_tokens for values_T in partial.columns.values()):
        lengths = ", ".join(f"{len(values_T)} {column}" for column, values_T in partial.columns.items())
        return f"{name} has columns of different lengths: {lengths}"
    if num_tokens >= limit and partial.is_sampled_T[-1]:
        return f"{name} has {num_tokens} tokens already, and {limit} is the limit"
    if error := unknown_id(partial.token_ids_T, vocab_size, unused_ids):
        return f"{name} has {error}"
    return ""


def unknown_id(token_ids_T: np.ndarray, vocab_size: int, unused_ids: Spans = ()) -> str:
    """Names a token that is not in the vocabulary; empty when all are."""
    unknown_T = (token_ids_T < 0) | (token_ids_T >= vocab_size)
    if unknown_T.any():
        return f"token id {token_ids_T[unknown_T][0]}, outside the vocabulary of {vocab_size}"
    unused_T = is_unused(token_ids_T, unused_ids)
    return f"token id {token_ids_T[unused_T][0]}, for which the tokenizer has no token" if unused_T.any() else ""


class EngineModel(Protocol):
    """A decoder that the native engine can run: `Transformer`, or one made for generation."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type in which keys and values are cached."""
        ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, [N, D]."""
        ...

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        """[N, V]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """State of an engine in numbers. Counters start at 0 with the engine."""

    running: int
    """Rollouts that decode."""
    waiting: int
    """Rollouts that have no blocks: not admitted yet, or parked."""
    kv_use: float
    """Share of KV blocks in use, 0 to 1."""
    decode_tokens: int
    """Tokens sampled."""
    prefill_tokens: int
    """Tokens prefilled, those of resumed and recomputed rollouts included."""
    steps: int
    """Forwards."""
    parked: int = 0
    """Times that a rollout lost its blocks to an older one."""
    recomputed_tokens: int = 0
    """Tokens prefilled again because the weights had changed."""
    recompute_s: float = 0.0
    """Wall seconds of the steps that did so, times the share of their tokens that these were."""
    slot_steps: int = 0
    """Sum over the steps with rollouts waiting of the rollouts that could decode at once."""
    filled_slot_steps: int = 0
    """Sum over the same steps of those that did."""


class RolloutEngine(Protocol):
    """Turns requests into rollouts. Not thread-safe; `step` is called again and again while `has_work`."""

    @property
    def has_work(self) -> bool:
        """`step` has something to do or to return."""
        ...

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests. Those that cannot run come out of `step` as FAILED rollouts, and the others go on.

        Raises:
            ValueError: a group id is in the engine already; nothing was queued.
        """
        ...

    def step(self) -> list[Rollout]:
        """Go on; returns rollouts that finished, failed, or were parked after `segment_tokens`."""
        ...

    def abort(self, group_ids: Iterable[int]) -> list[Rollout]:
        """Take groups back: their unfinished rollouts, with the tokens so far, come now or from `step`. Ids not in the
        engine are ignored."""
        ...

    def so_far(self, group_ids: Iterable[int]) -> list[Rollout]:
        """Rollouts of these groups that decode now, as they are; none where the engine cannot tell."""
        ...

    def stats(self) -> EngineStats:
        """State of the engine now, in numbers."""
        ...


class GenerationBackend(RolloutEngine, Protocol):
    """An engine whose weights change, and which says how likely tokens are by them."""

    @property
    def keyed_sampling(self) -> bool:
        """A sampled rollout depends only on its seed, group id, index and the weights, not on what runs beside it."""
        ...

    def sleep(self) -> None:
        """Gives the memory of weights, keys and values back until weights are replaced; there is no work."""
        ...

    def release(self, rollouts: Iterable[tuple[int, int]]) -> None:
        """Rollouts, by group and index, that stopped in a request with `has_turns` and do not come back."""
        ...

    def set_version(self, version: int) -> None:
        """The weights were replaced, between two steps; tokens sampled from now on carry `version`."""
        ...

    def score(self, sequences: Sequence[np.ndarray], candidates: CandidateSets | None = None) -> list[np.ndarray]:
        """Natural log-probability of each token given those before, at temperature 1, by the current weights.

        Running rollouts are not disturbed.

        Args:
            sequences: token ids, int [T] each, T >= 1.
            candidates: tells log-probabilities by their causes, if this is the native engine.

        Returns:
            float32 [T - 1] each: of all tokens but the first. With `candidates` [3, T - 1], at their temperature: by
            these weights in float32 arithmetic (NaN: not known here), by the engine's own, and by that among candidates
            alone.

        Raises:
            ValueError: a sequence is empty, longer than the context, or has unknown ids.
        """
        ...
