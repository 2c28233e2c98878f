"""Groups in pieces that fit into one call: long responses make a whole group larger than a call may carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from llamarl.types import Rollout, RolloutGroup

PIECE_TOKENS = 32_768
"""Tokens of one piece: with 12 bytes per token and the text, about half of what a call carries."""


def slices(rollouts: Sequence[Rollout]) -> Iterator[slice]:
    """Consecutive rollouts of at most PIECE_TOKENS together; a longer one is alone."""
    start, tokens = 0, 0
    for index, rollout in enumerate(rollouts):
        if index > start and tokens + rollout.num_tokens > PIECE_TOKENS:
            yield slice(start, index)
            start, tokens = index, 0
        tokens += rollout.num_tokens
    yield slice(start, len(rollouts))


def pieces(group: RolloutGroup) -> Iterator[RolloutGroup]:
    """The group itself when it is small, else parts of it, in order."""
    for part in slices(group.rollouts):
        whole = part == slice(0, len(group.rollouts))
        yield (
            group
            if whole
            else replace(
                group, rollouts=group.rollouts[part], results=group.results[part], responses=group.responses[part]
            )
        )


def joined(first: RolloutGroup | None, second: RolloutGroup) -> RolloutGroup:
    """Two consecutive pieces of a group as one."""
    if first is None:
        return second
    return replace(
        first,
        rollouts=first.rollouts + second.rollouts,
        results=first.results + second.results,
        responses=first.responses + second.responses,
    )
