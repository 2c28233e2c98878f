"""Groups and requests in pieces that fit into one call: long responses make them larger than a call may carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from llamarl.rollouts.segments import continued, cut_out
from llamarl.types import GenerationRequest, Rollout, RolloutGroup

PIECE_TOKENS = 24_576
"""Tokens of one piece: with up to 20 bytes per token and the text, about half of what a call carries."""


def slices(rollouts: Sequence[Rollout], max_tokens: int = PIECE_TOKENS) -> Iterator[slice]:
    """Consecutive rollouts of at most `max_tokens` together; a longer one is alone."""
    start, tokens = 0, 0
    for index, rollout in enumerate(rollouts):
        if index > start and tokens + rollout.num_tokens > max_tokens:
            yield slice(start, index)
            start, tokens = index, 0
        tokens += rollout.num_tokens
    yield slice(start, len(rollouts))


def pieces(group: RolloutGroup) -> Iterator[RolloutGroup]:
    """The group itself when it is small, else parts of it, in order. A long rollout is cut, and its text left out."""
    for part in slices(group.rollouts):
        rollouts, results, responses = group.rollouts[part], group.results[part], group.responses[part]
        if rollouts[0].num_tokens > PIECE_TOKENS:
            for start in range(0, rollouts[0].num_tokens, PIECE_TOKENS):
                cut = cut_out(rollouts[0], start, start + PIECE_TOKENS)
                yield replace(group, rollouts=(cut,), results=results, responses=("",))
        elif len(rollouts) == len(group.rollouts):
            yield group
        else:
            yield replace(group, rollouts=rollouts, results=results, responses=responses)


def joined(first: RolloutGroup | None, second: RolloutGroup) -> RolloutGroup:
    """Two consecutive pieces of a group as one."""
    if first is None:
        return second
    last, skip = first.rollouts, 0
    if last[-1].index == second.rollouts[0].index:
        last, skip = (*last[:-1], continued(last[-1], second.rollouts[0])), 1
    return replace(
        first,
        rollouts=last + second.rollouts[skip:],
        results=first.results + second.results[skip:],
        responses=first.responses + second.responses[skip:],
    )


def split(request: GenerationRequest) -> list[GenerationRequest]:
    """The request itself, or several for some of its partials each; only their token ids travel."""
    parts = slices(request.partials, 4 * PIECE_TOKENS) if request.partials else ()
    return [replace(request, partials=request.partials[part]) for part in parts] or [request]
