"""Rollouts on their way to executors, cut so that a call carries them: the experts of a mixture make them large."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from llamarl.types import GenerationRequest, Rollout, RolloutGroup

PARCEL_BYTES = 64 << 20
"""Size in bytes from which on a call takes no more: a quarter of what one may carry."""
TOKEN_BYTES = 24
"""Bytes of a token of a rollout, with its columns and its part of the text."""
NUMBER_BYTES = 8
"""Bytes of a number in the metadata of a prompt."""
Item = TypeVar("Item")


def routes_bytes(rollouts: Iterable[Rollout]) -> int:
    """Size of the experts that were recorded of these, those of a prompt that they share counted once."""
    rollouts = list(rollouts)
    prompts = {id(one.prompt_routes): one.prompt_routes.nbytes for one in rollouts if one.prompt_routes is not None}
    return sum(prompts.values()) + sum(one.routes_bytes for one in rollouts)


def parcels(items: Iterable[Item], num_bytes: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive items for one call each."""
    parcel, size = list[Item](), 0
    for item in items:
        if parcel and size + num_bytes(item) > PARCEL_BYTES:
            yield parcel
            parcel, size = [], 0
        parcel.append(item)
        size += num_bytes(item)
    if parcel:
        yield parcel


def requests_of(requests: Sequence[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
    """Requests for one call each; one with large partials becomes several, for some of its rollouts each."""
    cut = (part for request in requests for part in _parts(request))
    return parcels(cut, lambda request: routes_bytes(request.partials))


def _parts(request: GenerationRequest) -> Iterator[GenerationRequest]:
    if routes_bytes(request.partials) <= PARCEL_BYTES:
        yield request
        return
    for partials in parcels(request.partials, lambda one: routes_bytes([one])):
        yield replace(request, partials=tuple(partials))


def groups_of(groups: Iterable[RolloutGroup]) -> Iterator[list[RolloutGroup]]:
    """Groups for one call each; a large one becomes several, of some of its rollouts each, which whoever gets them puts
    together again (`RolloutGroup.with_more`)."""
    return parcels((part for group in groups for part in _some(group)), group_bytes)


def _some(group: RolloutGroup) -> Iterator[RolloutGroup]:
    if group_bytes(group) <= PARCEL_BYTES or not group.rollouts:
        yield group
        return
    for places in parcels(range(len(group.rollouts)), lambda place: _rollout_bytes(group.rollouts[place])):
        yield group.some(places)


def _rollout_bytes(rollout: Rollout) -> int:
    return routes_bytes([rollout]) + TOKEN_BYTES * rollout.num_tokens


def group_bytes(group: RolloutGroup) -> int:
    """About the size of a group in a call."""
    prompt = group.prompt
    text = len(prompt.text) + len(prompt.answer) + _num_characters(prompt.metadata)
    num_tokens = len(prompt.token_ids_T) + sum(one.num_tokens for one in group.rollouts)
    return text + routes_bytes(group.rollouts) + TOKEN_BYTES * num_tokens


def _num_characters(plain: Any) -> int:
    """About, of plain data as text, by some parts of a long list: writing it out takes milliseconds."""
    parts = [*plain, *plain.values()] if isinstance(plain, dict) else plain
    if isinstance(parts, list | tuple):
        some = parts[:: len(parts) // 32 + 1]
        return sum(map(_num_characters, some)) * len(parts) // max(len(some), 1)
    return len(plain) if isinstance(plain, str) else NUMBER_BYTES
