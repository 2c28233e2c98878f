"""Partial rollouts: parked or aborted, to go on with on any generator, from their tokens alone.

To a generator travel only token ids, and only new tokens come back, so a response may be longer than what one message
carries with log-probabilities and versions. Those of the earlier segments stay with the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llamarl.types import FinishReason, GenerationRequest, Rollout

UNFINISHED = frozenset({FinishReason.PARKED, FinishReason.ABORTED})
"""Of rollouts that go on."""
_PER_TOKEN = ("token_ids_T", "behavior_logprobs_T", "policy_versions_T", "reference_logprobs_T", "values_T")
_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


def not_begun(group_id: int, index: int) -> Rollout:
    """The partial rollout of which there is no token yet."""
    return Rollout(
        group_id=group_id,
        index=index,
        token_ids_T=_NO_IDS,
        behavior_logprobs_T=_NO_LOGPROBS,
        policy_versions_T=_NO_IDS,
        finish_reason=FinishReason.PARKED,
    )


def partials_of(request: GenerationRequest) -> Sequence[Rollout]:
    """What each rollout that a request asks for begins with."""
    return request.partials or [not_begun(request.group_id, index) for index in range(request.group_size)]


def continued(partial: Rollout, rest: Rollout) -> Rollout:
    """A partial rollout and what was sampled after it, as one."""
    if not partial.num_tokens:
        return rest
    return _with_arrays(rest, lambda name: np.concatenate([getattr(partial, name), getattr(rest, name)]))


def cut_out(rollout: Rollout, start: int, stop: int | None = None) -> Rollout:
    """The tokens from `start` to `stop`."""
    return _with_arrays(rollout, lambda name: getattr(rollout, name)[start:stop])


def _with_arrays(rollout: Rollout, make: Callable[[str], np.ndarray]) -> Rollout:
    arrays: dict[str, Any] = {name: make(name) for name in _PER_TOKEN}
    return replace(rollout, **arrays)


def ids_only(rollout: Rollout) -> Rollout:
    """Without log-probabilities and versions: a third of the bytes."""
    return Rollout(  # `replace` takes five times as long, and this runs once per rollout
        group_id=rollout.group_id,
        index=rollout.index,
        token_ids_T=rollout.token_ids_T,
        behavior_logprobs_T=_NO_LOGPROBS,
        policy_versions_T=_NO_IDS,
        finish_reason=rollout.finish_reason,
        error=rollout.error,
    )


def padded(request: GenerationRequest) -> GenerationRequest:
    """A request whose partials came as token ids only, in the form that engines take."""
    return replace(
        request,
        partials=tuple(
            replace(
                partial,
                behavior_logprobs_T=np.zeros(partial.num_tokens, np.float32),
                policy_versions_T=np.zeros(partial.num_tokens, np.int32),
            )
            for partial in request.partials
        ),
    )
